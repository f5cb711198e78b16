"""From staged parts to the entries of a group: in order, and with few blocks in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cutwater.core.messages import PublishGroup
from cutwater.core.publish.staged import PartOrder, StagedPart
from cutwater.errors import Damaged, ReadOnly, Refused
from cutwater.format import merging
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import staged_frame
from cutwater.format.merging import POSITION, Blocks
from cutwater.format.projection import serialize
from cutwater.protocol.access import STORAGE_NODE
from cutwater.storage.part_files import Held, StagingFiles
from cutwater.storagenode.publish.group_entries import Source, block_sizes, entries_of
from cutwater.storagenode.publish.publishing import Publishing
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import (
    Batch,
    BatchNumber,
    DecisionIndex,
    Epoch,
    EventTime,
    LogStreamId,
    Part,
    RunId,
    TopicId,
)
from cutwater.wire.identity.server_keys import ProvenServer

SCHEMA = pa.schema([pa.field("value", pa.binary()), POSITION])
LARGE = 100_000


def rows(values: Sequence[bytes], positions: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values), pa.array(positions)], schema=SCHEMA)


def staged(area: StagingFiles, number: int, blocks: Sequence[pa.RecordBatch], compression: str) -> Held:
    order = PartOrder(SCHEMA.serialize().to_pybytes(), 1, "", compression)
    writer = area.begin(StagedPart(RunId(1), BatchNumber(0), 1, TopicId(1), f"{number:032x}", order))
    for block in blocks:
        body = serialize(block, compression or None).to_pybytes()
        batch = Batch(block.num_rows, body, crc32c(body), EventTime(1), EventTime(1))
        writer.append(b"".join(staged_frame(batch, writer.size.rows + 1)))
    return writer.finish(1)


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_the_largest_block_bounds_how_many_parts_are_merged_at_a_time(
    monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    """One block of each part is large, most are tiny, and compressed all of them are."""
    files, parts, tiny = FaultFiles(), 6, 50
    area = StagingFiles(lambda: nullcontext(Path("/volume/staged")), files)
    sources, expected = [], []
    for number in range(parts):
        positions = [b"%04d" % (i * parts + number) for i in range(tiny + 1)]
        blocks = [rows([bytes(LARGE)], positions[:1])] + [rows([b"x"], [position]) for position in positions[1:]]
        held = staged(area, number, blocks, compression)
        sizes = list(block_sizes(held, area))
        assert sizes == [block.nbytes for block in blocks]
        size = held.size
        part = Part(TopicId(1), LogStreamId(1), (), held.part.part, 1, size.entries, size.rows, size.bytes, True)
        sources.append(Source(part, held.part, partial(area.read, held), max(sizes)))
        expected += [(position, bytes(LARGE) if i == 0 else b"x") for i, position in enumerate(positions)]
    merged_at_a_time = []
    really_merge = merging.merge

    def merge(some: Sequence[Blocks]) -> Blocks:
        merged_at_a_time.append(len(some))
        return really_merge(some)

    monkeypatch.setattr(merging, "WINDOW_BYTES", 3 * (LARGE + 100))
    monkeypatch.setattr(merging, "merge", merge)
    group = PublishGroup(
        LogStreamId(1),
        Epoch(1),
        RunId(1),
        BatchNumber(0),
        TopicId(1),
        tuple(source.part for source in sources),
        len(expected),
        DecisionIndex(1),
        DecisionIndex(1),
    )
    found = []
    for batch in entries_of(group, sources, area):
        read = pa.ipc.read_record_batch(pa.py_buffer(batch.body), pa.schema([SCHEMA.field(0)]))
        found += read.column(0).to_pylist()
    assert found == [value for _, value in sorted(expected)]
    assert merged_at_a_time == [3, 3, 2]
    assert not [path for path in files.paths() if path.name.endswith(".tmp")]


def test_a_part_that_is_damaged_anywhere_is_found_when_it_is_read_through() -> None:
    files = FaultFiles()
    area = StagingFiles(lambda: nullcontext(Path("/volume/staged")), files)
    held = staged(area, 1, [rows([bytes(LARGE)], [b"%d" % i]) for i in range(9)], "")
    assert len(list(block_sizes(held, area))) == 9
    files.flip(held.path, held.data_start + held.size.bytes - 1_000, 3)
    with pytest.raises(Damaged, match="another holder"):
        list(block_sizes(held, area))


def test_only_the_node_before_in_the_chain_is_told_when_a_disk_has_kept_up() -> None:
    """Of the present epoch. Any other would hold a call, and pass it on to the nodes behind."""
    replica = SimpleNamespace(hard_state=SimpleNamespace(epoch=Epoch(2)), neighbour=lambda by: {-1: 1, 1: 3}[by])
    node = SimpleNamespace(node=2, driver=lambda stream: SimpleNamespace(replica=replica))

    def no_room(size: int) -> None:
        raise ReadOnly("it was let in, and there is no room")

    publishing: Any = SimpleNamespace(_node=node, _require_room=no_room)

    def asked(name: str | None, epoch: int) -> None:
        server = None if name is None else ProvenServer(STORAGE_NODE, name, "key")
        argument = SimpleNamespace(stream=LogStreamId(1), epoch=Epoch(epoch), bytes_to_come=1)
        connection = SimpleNamespace(peer=SimpleNamespace(server=server))
        call: Any = SimpleNamespace(argument=argument, connection=connection)
        asyncio.run(Publishing.keep_up(publishing, call))

    for name in ("3", "4", None):
        with pytest.raises(Refused, match="is not before storage node 2 in the chain"):
            asked(name, 2)
    with pytest.raises(ReadOnly):
        asked("1", 2)
