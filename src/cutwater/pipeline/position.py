"""Defines positions: where in the one order of all records something happens.

A position is ``(g, phase, path)``. ``g`` is the GLSN whose record or watermark causes it. Within ``g``, the record
itself comes first, then the advance of event time, then the advance of processing time. The end of a bounded input
comes after its last position. ``path`` orders what happens within a phase, like one thread that works depth first:

*   a function that may emit several rows per call numbers them;
*   a row that goes to several consumers goes to them in the order in which the program names them;
*   timers fire operator by operator, in the order of the program, and within one by time, then by key bytes.

``(g, phase)`` is one integer, the *moment*. The path is bytes that sort like the path: each part is a number or a key,
written so that no part is a prefix of another. If there is no choice, nothing is written: the path of a record that
comes from a source through functions that emit one row each is empty.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cutwater.types import GLSN

RECORD: Final = 0
EVENT_TIME: Final = 1
PROCESSING_TIME: Final = 2
END: Final = 3

_PHASE_BITS: Final = 2
_TIME_ORIGIN: Final = 1 << 63
_KEY_END: Final = b"\x00\x00"


def moment(glsn: int, phase: int) -> int:
    return glsn << _PHASE_BITS | phase


def glsn_of(when: int) -> GLSN:
    return GLSN(when >> _PHASE_BITS)


@lru_cache(maxsize=1_024)
def number(value: int) -> bytes:
    """Return a number as part of a path. Small numbers are one byte; larger ones begin with their length, so that they
    sort after small ones."""
    if value < 0x80:
        return bytes((value,))
    size = (value.bit_length() + 7) // 8
    return bytes((0x80 + size,)) + value.to_bytes(size, "big")


FIRST: Final = number(0)


def key_part(key: bytes) -> bytes:
    """Return key bytes as part of a path. Zero bytes are escaped, so that the end mark sorts below everything."""
    return key.replace(b"\x00", b"\x00\xff") + _KEY_END


def firing(operator: int, time: int, key: bytes, count: int) -> bytes:
    """Return the path of the ``count``-th timer that a key fires in one advance of an operator.

    ``time`` is the largest time that the key has fired in this advance so far. A timer that is registered while timers
    fire may be earlier than the one that registers it. One thread, which always takes the smallest timer, then fires it
    at once: after the larger one, and before all remaining timers of other keys.
    """
    return _advance_part(operator, time) + key_part(key) + number(count)


@lru_cache(maxsize=256)
def _advance_part(operator: int, time: int) -> bytes:
    """Cached, because many keys have timers at the same time."""
    return number(operator) + (time + _TIME_ORIGIN).to_bytes(8, "big")
