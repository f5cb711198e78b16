"""Another name for the errors in ``cutwater.protocol.errors``.

The client guide used to name this module, so programs may import from it. Cutwater itself does not.
"""

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
