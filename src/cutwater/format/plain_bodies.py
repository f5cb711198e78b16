"""The most common body, as bytes: key, value and timestamp of records without headers, not compressed.

Clients write it without Arrow (ADR 0031), and storage nodes and readers check it without Arrow, which saves a fifth of
the processor time of a small append (ADR 0038). The bytes before the columns are
the same for all such bodies except for a few numbers, which follow from four of them. Arrow itself writes the same
bytes for the same records. Bodies that are written in any other way are left to Arrow.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from cutwater.format.checksum import Buffer

HEAD_BYTES: Final = 480
"""Size of the bytes before the columns: the FlatBuffers tables ``Message`` and ``RecordBatch`` of Arrow's format."""

_START = bytes.fromhex(
    "ffffffffd80100001400000000000000"
    "0c0016000600050008000c000c000000"
    "00030400180000000000000000000000"
    "00000a0018000c00040008000a000000"
    "2c010000100000000000000000000000"
    "0000000011000000"
)
"""Contains zeros in place of the number of bytes that follow and the number of records."""
_BODY_BYTES_AT, _COUNT_AT, _BUFFERS_AT, _NODES_AT = 40, 72, 88, 368
_BUFFERS = struct.Struct("<34q")
"""Offset and length of each of the 17 buffers: of key, value, timestamp, headers and their content."""
_NODES = struct.Struct("<14q")
"""Length and number of nulls of each of the seven columns."""
_BETWEEN = bytes.fromhex("0000000007000000")
_NUMBER = struct.Struct("<q")

_KNOWN = struct.Struct(f"<{_COUNT_AT}xq8x40xq40xq{_NODES_AT - 184}x8xq")
"""The numbers of a head that the others follow from: records, bytes of all keys, bytes of all values, missing keys."""

COUNT_MAX: Final = 256
"""Bodies with more records are left to Arrow, which is faster there."""


class BodyLayout(NamedTuple):
    """Offsets of the columns of a body, from its beginning. ``bits_bytes`` is 0 if no key is missing."""

    head: bytes
    bits_bytes: int
    key_offsets_at: int
    offsets_at: int
    times_at: int
    headers_at: int
    end: int


def up(size: int) -> int:
    """Round up to a multiple of eight, where every buffer begins."""
    return (size + 7) & -8


def no_headers_bytes(count: int) -> int:
    """Return the size of the headers column of records without headers.

    It is a map of nulls. Inside it are only the end offsets of no names and no values.
    """
    return up((count + 7) // 8) + up(4 * count + 4) + 16


@lru_cache(maxsize=256)
def layout(count: int, missing: int, keys_bytes: int, values_bytes: int) -> BodyLayout:
    """Return the layout of a body with ``count`` records, ``missing`` of them without a key.

    Many bodies share a layout.
    """
    offsets_bytes, headers_bits_bytes = 4 * count + 4, (count + 7) // 8
    bits_bytes = headers_bits_bytes if missing else 0
    offsets_up = up(offsets_bytes)
    key_offsets_at = up(bits_bytes)
    keys_at = key_offsets_at + offsets_up
    offsets_at = keys_at + up(keys_bytes)
    values_at = offsets_at + offsets_up
    times_at = values_at + up(values_bytes)
    headers_at = times_at + 8 * count
    header_offsets_at = headers_at + up(headers_bits_bytes)
    names_at = header_offsets_at + offsets_up
    inside_at = names_at + 8
    end = headers_at + no_headers_bytes(count)
    start = bytearray(_START)
    _NUMBER.pack_into(start, _BODY_BYTES_AT, end)
    _NUMBER.pack_into(start, _COUNT_AT, count)
    buffers = _BUFFERS.pack(
        *(0, bits_bytes, key_offsets_at, offsets_bytes, keys_at, keys_bytes),
        *(offsets_at, 0, offsets_at, offsets_bytes, values_at, values_bytes),
        *(times_at, 0, times_at, 8 * count),
        *(headers_at, headers_bits_bytes, header_offsets_at, offsets_bytes),
        *(names_at, 0, names_at, 0, names_at, 4, inside_at, 0),
        *(inside_at, 0, inside_at, 4, end, 0),
    )
    nodes = _NODES.pack(count, missing, count, 0, count, 0, count, count, 0, 0, 0, 0, 0, 0)
    head = b"".join((start, buffers, _BETWEEN, nodes))
    columns = (key_offsets_at, offsets_at, times_at, headers_at, end)
    return BodyLayout(head, bits_bytes, *(HEAD_BYTES + place for place in columns))


def values_body(values: Sequence[bytes], time: int) -> bytes:
    """Return the plain body of records that are only values, all with this event time. Clients have a faster way."""
    count = len(values)
    if not 0 < count <= COUNT_MAX:
        raise ValueError(f"a plain body has 1 to {COUNT_MAX} records, not {count}")
    offsets = array("i", accumulate(map(len, values), initial=0))
    if sys.byteorder == "big":
        offsets.byteswap()
    found = layout(count, count, 0, sum(map(len, values)))
    body = bytearray(found.end)
    body[:HEAD_BYTES] = found.head
    body[found.offsets_at : found.offsets_at + 4 * count + 4] = offsets.tobytes()
    values_at = found.offsets_at + up(4 * count + 4)
    content = b"".join(values)
    body[values_at : values_at + len(content)] = content
    body[found.times_at : found.headers_at] = _NUMBER.pack(time) * count
    return bytes(body)


# A memory view is copied before it is compared, because its own comparison works byte by byte.


def is_plain(body: Buffer, count: int, time_min: int, time_max: int) -> bool:
    """Return whether this is a valid plain body with ``count`` records and this smallest and largest event time.

    False does not mean that the body is malformed: it may be a valid body that is written in another way.
    """
    size = len(body)
    if size < HEAD_BYTES:
        return False
    found_count, keys_bytes, values_bytes, missing = _KNOWN.unpack_from(body)
    if found_count != count or not 0 < count <= COUNT_MAX or not 0 <= missing <= count:
        return False
    if not 0 <= keys_bytes < size or not 0 <= values_bytes < size:
        return False
    head, bits_bytes, key_offsets_at, offsets_at, times_at, headers_at, end = layout(
        count, missing, keys_bytes, values_bytes
    )
    if end != size or bytes(body[:HEAD_BYTES]) != head:
        return False
    if missing and not _has_nulls(body[HEAD_BYTES : HEAD_BYTES + bits_bytes], count, missing):
        return False
    offsets_bytes = 4 * count + 4
    if not are_in_order(body[key_offsets_at : key_offsets_at + offsets_bytes], count, keys_bytes):
        return False
    if not are_in_order(body[offsets_at : offsets_at + offsets_bytes], count, values_bytes):
        return False
    has_times = _have_ends(body[times_at:headers_at], count, time_min, time_max)
    return has_times and bytes(body[headers_at:]) == bytes(size - headers_at)


def _has_nulls(bits: Buffer, count: int, missing: int) -> bool:
    there = int.from_bytes(bits, "little") & ((1 << count) - 1)
    return there.bit_count() == count - missing


def are_in_order(offsets: Buffer, count: int, size: int, start: int = 0) -> bool:
    """Return whether these are valid offsets of ``count`` values that begin at ``start`` and end at ``size``.

    No value may end before it begins. Arrow can check this too, but it releases the interpreter lock meanwhile, and
    with many threads it takes long to get it back.
    """
    numbers = int.from_bytes(offsets, "little")
    tops, all_but_last = _top_bits(count + 1)
    if numbers & 0xFFFFFFFF != start or numbers >> 32 * count != size or numbers & tops:
        return False
    # A difference that is not negative leaves the top bit set, and nothing is borrowed from a neighbour.
    return ((numbers >> 32 | tops) - numbers) & all_but_last == all_but_last


@lru_cache(maxsize=16)
def _top_bits(count: int) -> tuple[int, int]:
    """Return the top bits of ``count`` offsets, and of one offset less."""
    return _repeated(1 << 31, count), _repeated(1 << 31, count - 1)


def _repeated(number: int, count: int) -> int:
    """Return a number repeated ``count`` times, 32 bits each, as offsets are."""
    return int.from_bytes(number.to_bytes(4, "little") * count, "little")


def _have_ends(times: Buffer, count: int, time_min: int, time_max: int) -> bool:
    if time_min == time_max:
        return bytes(times) == _NUMBER.pack(time_min) * count
    values = array("q", bytes(times))
    if sys.byteorder == "big":
        values.byteswap()
    return min(values) == time_min and max(values) == time_max
