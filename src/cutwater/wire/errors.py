"""The errors of ``cutwater.protocol.errors`` under the name that docs/clients.md gave them, for programs that use
it."""

from __future__ import annotations

from cutwater.protocol.errors import (
    CannotListen,
    ConnectionLost,
    FrameTooLarge,
    InternalError,
    MalformedFrame,
    Unauthenticated,
    UnknownMethod,
    Unproven,
    Untrusted,
    WrongCluster,
    WrongVersion,
)

__all__ = [
    "CannotListen",
    "ConnectionLost",
    "FrameTooLarge",
    "InternalError",
    "MalformedFrame",
    "Unauthenticated",
    "UnknownMethod",
    "Unproven",
    "Untrusted",
    "WrongCluster",
    "WrongVersion",
]
