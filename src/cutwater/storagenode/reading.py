"""Serves committed records: ranges for readers, single entries for peers that repair damage."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from msgspec import structs

from cutwater.core.commit_index import context_of_llsn
from cutwater.errors import Damaged, InvalidArgument, NotYetCommitted, Trimmed
from cutwater.storage.checksum import Buffer, crc32c
from cutwater.storage.frames import Frame, encode_frame
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica_driver import ReplicaDriver
from cutwater.types import GLSN, LLSN, BatchKind
from cutwater.wire import storage_api as api
from cutwater.wire.frames import Payload
from cutwater.wire.methods import Reply
from cutwater.wire.serving import Call

READ_BYTES_MAX = 8 * 1024 * 1024
READ_WAIT_SECONDS = 0.001
READ_WAITS_MAX = 50
"""How long a read waits for commits that are just being written; what is not there then is read the next time."""


class Reading:
    """What is damaged is never served: the reader is told to try again or elsewhere, and a repair begins."""

    def __init__(self, node: StorageNode) -> None:
        self._node = node

    async def read(self, call: Call[api.ReadArguments]) -> Reply[api.ReadAnswerHeader]:
        arguments = call.argument
        driver = self._node.driver(arguments.stream)
        driver.require_readable()
        await until_indexed(driver)
        try:
            reply = await driver.in_reader(lambda: _read(driver, arguments))
        except Damaged as error:
            self._node.damage_met(arguments.stream, error)
            raise
        self._node.counters.reads += 1
        self._node.counters.read_bytes += sum(memoryview(piece).nbytes for piece in _pieces(reply.body))
        return reply

    async def copy(self, call: Call[api.CopyArguments]) -> Reply[api.CopyAnswer]:
        stream, llsn = call.argument.stream, call.argument.llsn
        driver = self._node.driver(stream)
        driver.require_readable()
        if llsn > indexed_end(driver):
            raise NotYetCommitted(f"log stream {stream} is committed to LLSN {indexed_end(driver)} here, not to {llsn}")
        try:
            part = await driver.in_reader(lambda: driver.storage.read(llsn, llsn, 1))
        except Damaged as error:
            self._node.damage_met(stream, error)
            raise
        return Reply(api.CopyAnswer(part.commits), part.data)


async def until_indexed(driver: ReplicaDriver) -> None:
    """Wait a little for commits that are acknowledged already and just being written, because someone reads."""
    for _ in range(READ_WAITS_MAX):
        if indexed_end(driver) >= driver.replica.committed_end:
            return
        await asyncio.sleep(READ_WAIT_SECONDS)


def indexed_end(driver: ReplicaDriver) -> LLSN:
    """The last LLSN whose commit is in the files, where reads look for it."""
    last = driver.storage.last_commit
    return last.last_llsn if last is not None else driver.replica.hard_state.base_llsn


def _read(driver: ReplicaDriver, arguments: api.ReadArguments) -> Reply[api.ReadAnswerHeader]:
    replica, storage = driver.replica, driver.storage
    # In this order: what was complete before is still complete after the read.
    through, revision, committed_end = replica.complete_through, replica.revision, replica.committed_end
    end = indexed_end(driver)
    if end < committed_end:
        # Nothing is known to be complete beyond what can be found.
        last = storage.last_commit
        committed_end = end
        through = min(through, last.high_watermark if last is not None else GLSN(0))
    trimmed_before = replica.hard_state.trimmed_before
    if arguments.from_glsn < trimmed_before:
        raise Trimmed(arguments.from_glsn, trimmed_before)
    llsn = storage.from_glsn(arguments.from_glsn)
    if llsn is None or llsn > committed_end:
        return Reply(api.ReadAnswerHeader(arguments.stream, (), through, revision))
    part = storage.read(llsn, committed_end, min(arguments.bytes_max, READ_BYTES_MAX))
    body: Payload = part.data
    frames: Sequence[Frame] = part.frames
    if arguments.projection:
        frames, body = pick_columns(part.frames, arguments.projection)
    last_llsn = frames[-1].header.last_llsn
    commits = tuple(context for context in part.commits if context.first_llsn <= last_llsn)
    if last_llsn < committed_end:
        context = context_of_llsn(commits, last_llsn)
        through = min(through, context.glsn_of(last_llsn) if context else GLSN(0))
    return Reply(api.ReadAnswerHeader(arguments.stream, commits, through, revision), body)


def pick_columns(
    frames: Sequence[Frame], projection: Mapping[int, api.Columns]
) -> tuple[Sequence[Frame], list[Buffer]]:
    """As many frames as an answer can hold, each with the wanted columns only."""
    pieces: list[Buffer] = []
    size = 0
    for number, frame in enumerate(frames):
        wanted = projection.get(frame.header.schema)
        parts = [frame.data] if wanted is None or frame.header.kind is BatchKind.FENCE else _picked(frame, wanted)
        size += sum(map(len, parts))
        if number and size > READ_BYTES_MAX:
            return frames[:number], pieces
        pieces += parts
    return frames, pieces


def _picked(frame: Frame, wanted: api.Columns) -> list[Buffer]:
    # Only nodes that are asked for columns need Arrow, which takes long to import.
    from cutwater.storage import projection  # noqa: PLC0415

    schema = projection.decode_schema(wanted.schema)
    try:
        body = memoryview(projection.project(frame.body, schema, wanted.columns))
        if len(body) > frame.header.body_bytes:
            # It was compressed before, and is compressed again: a message has a largest size.
            body = memoryview(projection.project(frame.body, schema, wanted.columns, "lz4"))
    except Damaged as error:
        # The checksum is right, so it is not the batch that is wrong.
        raise InvalidArgument(
            f"the batch at LLSN {frame.header.first_llsn} is not of the schema that was given for number "
            f"{frame.header.schema}: {error.message}"
        ) from error
    entry = frame.header.entry(b"")
    batch = structs.replace(entry.batch, body=cast(bytes, body), checksum=crc32c(body))
    header, trailer = encode_frame(structs.replace(entry, batch=batch), frame.header.running)
    return [header, body, trailer]


def _pieces(body: Payload) -> Sequence[Buffer]:
    return body if isinstance(body, list | tuple) else (body,)
