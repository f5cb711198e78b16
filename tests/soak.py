"""How long campaigns of faults run: shortly in the suite, at length under `make soak`."""

from __future__ import annotations

import os

IS_SOAK = os.environ.get("CUTWATER_SOAK") == "1"


def rounds(short: int, long: int) -> int:
    return long if IS_SOAK else short
