"""``python -m cutwater.cli``."""

from __future__ import annotations

from cutwater.cli.main import main

main()
