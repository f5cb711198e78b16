"""Positions: where in the one order of all records something happens.

A position is ``(g, phase, path)``. ``g`` is the GLSN whose record or watermark causes it. Within ``g`` come first the
record itself, then the advance of event time, then the advance of processing time; after the last position of a bounded
input comes its end. ``path`` orders what happens within a phase as one thread does that goes depth first:

*   a function that may emit several rows per call numbers them;
*   a row that goes to several consumers goes to them in the order in which the program names them;
*   timers fire operator by operator, in the order of the program, and within one by time, then by key bytes.

``(g, phase)`` is one integer, the *moment*. The path is bytes that sort as the path does: each part is a number or a
key, written so that no part is the beginning of another. Where there is no choice, nothing is written: the path of a
record that comes from a source through functions that emit one row each is empty.
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


def _number(value: int) -> bytes:
    """Small numbers are one byte; larger ones say their length first, so that they sort behind."""
    if value < 0x80:
        return bytes((value,))
    size = (value.bit_length() + 7) // 8
    return bytes((0x80 + size,)) + value.to_bytes(size, "big")


_NUMBERS: Final = tuple(_number(value) for value in range(1_024))


FIRST: Final = _NUMBERS[0]


def number(value: int) -> bytes:
    """A number as part of a path."""
    return _NUMBERS[value] if value < len(_NUMBERS) else _number(value)


def key_part(key: bytes) -> bytes:
    """Key bytes as part of a path: an end mark that sorts below everything, and its likes inside are escaped."""
    return key.replace(b"\x00", b"\x00\xff") + _KEY_END


def firing(operator: int, time: int, key: bytes, count: int) -> bytes:
    """The path of the ``count``-th timer that a key fires in one advance of an operator.

    ``time`` is the largest time that the key has fired in this advance so far. A timer that is registered while timers
    fire may lie before the one that registers it. One thread, which always takes the smallest timer there is, then
    fires it at once: behind the larger one, and ahead of everything that other keys have left.
    """
    return _advance_part(operator, time) + key.replace(b"\x00", b"\x00\xff") + _KEY_END + number(count)


@lru_cache(maxsize=256)
def _advance_part(operator: int, time: int) -> bytes:
    """Many keys have timers at one time."""
    return number(operator) + (time + _TIME_ORIGIN).to_bytes(8, "big")
