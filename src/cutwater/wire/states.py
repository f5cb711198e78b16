"""The life of a connection, and what it holds at a moment.

::

    GREETING ──▶ OPEN ──▶ CLOSING ──▶ CLOSED       closing: what was asked is answered, nothing new is asked
        │          │         │          ▲
        └──────────┴─────────┴─▶ FAILED ┘          failed: the peer is told why, and not listened to any more
"""

from __future__ import annotations

import enum

from msgspec import Struct


class State(enum.Enum):
    GREETING = "greeting"
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


class Snapshot(Struct, frozen=True):
    """What a connection holds at the moment."""

    state: State
    calls: int
    call_bytes: int
    served: int
    served_bytes: int
    refused: int
    send_bytes: int
    receive_bytes: int
    frames: int
