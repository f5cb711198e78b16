"""From the staged parts of a group to its entries, one after the other, for a thread that may wait for disks.

Parts without an order follow each other as they were decided, and their entries go into the log as they are, never
looked into. Ordered parts are merged by the positions of their rows, and what comes out is cut into entries anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from cutwater.core.messages import PublishGroup
from cutwater.core.publish.staged import StagedPart
from cutwater.errors import Damaged
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import Frame, frames_in, staged_frame
from cutwater.storage.part_files import Held, StagingFiles
from cutwater.types import Batch, EventTime, Part

if TYPE_CHECKING:
    from cutwater.format.merging import Blocks, Form

CHUNK_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 256 * 1024
"""About what an entry of rows that are kept for a second merge has."""

Read = Callable[[int, int], bytes]
"""Whole, verified frames of a part: from an offset on, so many bytes at most, but at least one."""


class Source(Struct, frozen=True):
    """A decided part that is here and intact, and how its frames are read. ``block_bytes`` is what its largest entry
    takes in memory."""

    part: Part
    staged: StagedPart
    read: Read
    block_bytes: int
    checked: bool = False


def block_sizes(held: Held, files: StagingFiles) -> Iterator[int]:
    """Read through a part that should be intact: what each of its entries takes in memory. Raises ``Damaged``."""
    if held.part.order is None:
        for frame in files.frames(held):
            yield frame.header.body_bytes
        return
    # Only nodes that publish ordered parts need Arrow, which takes long to import.
    from cutwater.format import merging  # noqa: PLC0415

    form = merging.form_of(held.part.order)
    for frame in files.frames(held):
        yield merging.read_block(frame.body, form, frame.header.count).nbytes


def entries_of(group: PublishGroup, sources: Sequence[Source], files: StagingFiles) -> Generator[Batch, None, None]:
    """All entries of the group. ``files`` is where rows are kept that have to be merged twice."""
    count = 0
    together = [sources] if all(source.staged.order for source in sources) else [[source] for source in sources]
    for some in together:
        entries = _merged(some, files) if some[0].staged.order else _as_staged(some)
        for batch in entries:
            count += batch.count
            yield batch
    if count != group.rows:
        raise Damaged(f"the parts of the group have {count} records, and {group.rows} were decided on")


def _as_staged(sources: Sequence[Source]) -> Iterator[Batch]:
    for source in sources:
        for frame in _frames(source.read, source.part.bytes, CHUNK_BYTES):
            yield structs.replace(frame.entry.batch, checked=source.checked)


def _frames(read: Read, size: int, bytes_max: int) -> Iterator[Frame]:
    offset = 0
    while offset < size:
        data = read(offset, bytes_max)
        if not data:
            raise Damaged(f"a staged part ends at byte {offset} and not at {size}")
        yield from frames_in(data)
        offset += len(data)


def _merged(sources: Sequence[Source], files: StagingFiles) -> Iterator[Batch]:
    from cutwater.format import merging  # noqa: PLC0415

    forms = [merging.form_of(source.staged.order) for source in sources if source.staged.order is not None]
    common = merging.common_form(forms)
    # Rows of a topic without a column for event time have that of their batch, and these batches are made here.
    time = max(next(_frames(source.read, source.part.bytes, 1)).header.time_max for source in sources)
    parts = [
        partial(_blocks, source.read, source.part.bytes, form, common)
        for source, form in zip(sources, forms, strict=True)
    ]
    block_bytes = max(source.block_bytes for source in sources)
    checked = all(source.checked for source in sources)
    with ExitStack() as kept:
        keep = partial(_keep, kept, files, sources[0].staged, common)
        for block in merging.in_entries(merging.merge_in_bounds(parts, block_bytes, keep)):
            yield structs.replace(merging.to_batch(block, common, time), checked=checked)


def _blocks(read: Read, size: int, form: Form, common: Form) -> Blocks:
    """The rows of an ordered part, in the form that all parts have in common; one entry in memory at a time."""
    from cutwater.format import merging  # noqa: PLC0415

    for frame in _frames(read, size, 1):
        yield merging.adapt(merging.read_block(frame.body, form, frame.header.count), common)


def _keep(kept: ExitStack, files: StagingFiles, like: StagedPart, form: Form, blocks: Blocks) -> Callable[[], Blocks]:
    """Put merged rows into a file that is removed when ``kept`` ends; how to read them again."""
    from cutwater.format import merging  # noqa: PLC0415

    writer = kept.enter_context(_temporary(files, structs.replace(like, part=secrets.token_hex(16), order=form.order)))
    rows = 0
    for block in merging.in_entries(blocks, BLOCK_BYTES):
        body = block.serialize().to_pybytes()
        batch = Batch(block.num_rows, body, crc32c(body), EventTime(0), EventTime(0))
        writer.append(b"".join(staged_frame(batch, rows + 1)))
        rows += block.num_rows
    held = writer.so_far()
    return partial(_blocks, partial(files.read, held), held.size.bytes, form, form)


@contextmanager
def _temporary(files: StagingFiles, part: StagedPart) -> Iterator[Any]:
    writer = files.begin(part)
    try:
        yield writer
    finally:
        writer.discard()
