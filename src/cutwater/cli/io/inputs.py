"""Reads input to append, in pieces of bounded size, as it arrives: an input need not have an end.

A piece holds what can be read without waiting, up to a limit. So a file goes in large pieces, and a line that a person
types, or that a program prints now and then, goes at once.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cutwater.client.convert.encoding import Limits
from cutwater.client.errors import RecordTooLarge
from cutwater.errors import InvalidArgument

PIECE_BYTES = 512 * 1024
READ_BYTES = 256 * 1024
RECORDS_MAX = 8_192
"""The most records of one piece, however short they are."""
RECORD_BYTES_MAX = Limits().record_bytes_max
STANDARD_INPUT = Path("-")


class InputRecords(NamedTuple):
    """Consecutive records. ``places`` says where each record was found."""

    records: list[bytes]
    places: Sequence[object]
    source: str
    """The text before a place, such as the name of the file."""

    def place(self, row: int) -> str:
        return f"{self.source}{self.places[row]}"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield the descriptor of an open file; that of standard input for ``-``."""
    if path == STANDARD_INPUT:
        yield 0
        return
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def name_of(path: Path) -> str:
    return "standard input" if path == STANDARD_INPUT else str(path)


def total_bytes(paths: Iterable[Path]) -> int | None:
    """Return how much there is to read; None if that is not known."""
    total = 0
    for path in paths:
        with opened(path) as fd:
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        total += status.st_size
    return total


def whole_files(paths: Sequence[Path]) -> Iterator[InputRecords]:
    """Yield pieces in which each file is one record; small files share a piece."""
    records: list[bytes] = []
    places: list[Path] = []
    size = 0
    for path in paths:
        with opened(path) as fd:
            record = _whole(fd, name_of(path))
        if records and (size + len(record) > PIECE_BYTES or len(records) >= RECORDS_MAX):
            yield InputRecords(records, places, "")
            records, places, size = [], [], 0
        records.append(record)
        places.append(path)
        size += len(record)
    if records:
        yield InputRecords(records, places, "")


def _whole(fd: int, name: str) -> bytes:
    found = bytearray()
    try:
        while data := os.read(fd, READ_BYTES):
            found += data
            if len(found) > RECORD_BYTES_MAX:
                raise _too_long(name, len(found))
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error.strerror}") from None
    return bytes(found)


def lines(fd: int, name: str) -> Iterator[InputRecords]:
    """Yield pieces in which each line is one record, without its newline; the last line may lack it."""
    source = f"{name}, line "
    rest = b""
    number = 1
    for data in _available(fd, name):
        *complete, rest = (rest + data).split(b"\n")
        if len(rest) > RECORD_BYTES_MAX:
            raise _too_long(f"{source}{number + len(complete)}", len(rest))
        for first in range(0, len(complete), RECORDS_MAX):
            records = complete[first : first + RECORDS_MAX]
            yield InputRecords(records, range(number, number + len(records)), source)
            number += len(records)
    if rest:
        yield InputRecords([rest], [number], source)


def _available(fd: int, name: str) -> Iterator[bytes]:
    """Yield what can be read, waiting only for its first byte."""
    try:
        while data := os.read(fd, READ_BYTES):
            found = [data]
            size = len(data)
            while size < PIECE_BYTES and select.select([fd], [], [], 0)[0] and (data := os.read(fd, READ_BYTES)):
                found.append(data)
                size += len(data)
            yield b"".join(found)
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error.strerror}") from None


def _too_long(what: str, size: int) -> RecordTooLarge:
    """Return the error for a record that is too long; it was not read to its end."""
    error = RecordTooLarge(0, size, RECORD_BYTES_MAX)
    error.message = (
        f"{what}: a record has at most {RECORD_BYTES_MAX} bytes, and this one has more: split it, or store it "
        "elsewhere and append where it is"
    )
    return error
