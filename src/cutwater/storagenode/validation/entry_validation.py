"""Checks whether entries can be stored at all, where they arrive. An entry that the writer thread cannot write would
fail the whole replica and all its callers; a refusal here concerns only the sender. Pure.
"""

from __future__ import annotations

from cutwater.errors import InvalidArgument
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import BODY_BYTES_MAX, NUMBER_MAX, PRODUCER_BYTES_MAX
from cutwater.types import Batch, BatchKind, Entry, ProducerTag

UINT32_MAX = (1 << 32) - 1
LLSN_MAX = NUMBER_MAX - UINT32_MAX
TIME_MIN = -(1 << 63)


def check_entry(entry: Entry) -> None:
    """Raise if this entry cannot be stored as it is, or its bytes are not the ones that the client sent."""
    if not 1 <= entry.first_llsn <= LLSN_MAX:
        raise _outside("LLSN", entry.first_llsn, 1, LLSN_MAX)
    if not 0 <= entry.epoch <= UINT32_MAX:
        raise _outside("epoch", entry.epoch, 0, UINT32_MAX)
    _check(entry.batch)


def check_batch(batch: Batch) -> None:
    """Raise if this batch, which has no place yet, cannot be stored as it is, or claims to belong to a group."""
    if batch.more or batch.group is not None:
        raise InvalidArgument("an append is no part of a group: groups are published, see PublishRequest")
    _check(batch)


def _check(batch: Batch) -> None:
    """Check the batch. Numbers are compared inline, one by one: this runs for every batch, and nearly all are right."""
    if not 1 <= batch.count <= UINT32_MAX:
        raise _outside("count of records", batch.count, 1, UINT32_MAX)
    if not 0 <= batch.schema <= UINT32_MAX:
        raise _outside("number of the schema", batch.schema, 0, UINT32_MAX)
    if not TIME_MIN <= batch.time_min <= NUMBER_MAX:
        raise _outside("smallest event time", batch.time_min, TIME_MIN, NUMBER_MAX)
    if not TIME_MIN <= batch.time_max <= NUMBER_MAX:
        raise _outside("largest event time", batch.time_max, TIME_MIN, NUMBER_MAX)
    if batch.declared is not None and not TIME_MIN <= batch.declared <= NUMBER_MAX:
        raise _outside("declared watermark", batch.declared, TIME_MIN, NUMBER_MAX)
    if batch.kind is not BatchKind.DATA:
        _check_bodiless(batch)
    if batch.producer is not None:
        _check_producer(batch.producer)
    if len(batch.body) > BODY_BYTES_MAX:
        raise InvalidArgument(
            f"a batch has at most {BODY_BYTES_MAX} bytes, this one {len(batch.body)}: send smaller ones"
        )
    if crc32c(batch.body) != batch.checksum:
        raise InvalidArgument("the checksum of the batch does not fit its bytes: they were damaged on the way")


def _check_bodiless(batch: Batch) -> None:
    """Check a fence or declaration. These take one position and hold no record."""
    what = "fence" if batch.kind is BatchKind.FENCE else "declaration"
    if batch.count != 1 or batch.body or batch.schema:
        raise InvalidArgument(
            f"a {what} takes one position and has no body, this one has {batch.count} positions, {len(batch.body)} "
            f"bytes and schema {batch.schema}"
        )
    if batch.kind is BatchKind.DECLARATION and batch.declared is None and not batch.idle:
        raise InvalidArgument("this declaration declares nothing: give it a watermark, idleness or both")
    if batch.kind is BatchKind.FENCE and batch.idle:
        raise InvalidArgument("a fence ends idleness and cannot declare it: send a declaration after it")


def _check_producer(tag: ProducerTag) -> None:
    if not 0 <= tag.epoch <= NUMBER_MAX:
        raise _outside("producer's epoch", tag.epoch, 0, NUMBER_MAX)
    if not 0 <= tag.sequence <= NUMBER_MAX:
        raise _outside("producer's sequence number", tag.sequence, 0, NUMBER_MAX)
    name_bytes = len(tag.producer.encode())
    if name_bytes > PRODUCER_BYTES_MAX:
        raise InvalidArgument(
            f"a producer's name has at most {PRODUCER_BYTES_MAX} bytes, this one {name_bytes}: choose a shorter one"
        )


def _outside(what: str, number: int, low: int, high: int) -> InvalidArgument:
    return InvalidArgument(f"the {what} is {number}, which cannot be stored: it is from {low} to {high}")
