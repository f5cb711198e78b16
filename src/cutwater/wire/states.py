"""The states of a connection, and a snapshot of what it holds.

::

    GREETING ──▶ OPEN ──▶ CLOSING ──▶ CLOSED       closing: open requests are answered, no new ones are sent
        │          │         │          ▲
        └──────────┴─────────┴─▶ FAILED ┘          failed: the peer is told why, and nothing more is read from it
"""

from __future__ import annotations

import enum

from msgspec import Struct


class ConnectionState(enum.Enum):
    GREETING = "greeting"
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


class ConnectionSnapshot(Struct, frozen=True):
    """What a connection holds at the moment."""

    state: ConnectionState
    calls: int
    call_bytes: int
    served: int
    served_bytes: int
    refused: int
    send_bytes: int
    receive_bytes: int
    frames: int
