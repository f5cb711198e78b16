"""Lets the tests of this folder import their helpers, which are modules next to them, by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
