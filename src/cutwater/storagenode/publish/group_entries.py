"""Turns the staged parts of a group into its entries, one after the other, in a thread that may wait for disks.

Parts without an order follow each other as they were decided, and their entries go into the log unread. Ordered parts
are merged by the positions of their rows, and the result is divided into new entries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from cutwater.core.messages import PublishGroup
from cutwater.core.publish.staged import StagedPart
from cutwater.errors import Damaged
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import EntryFrame, frames_in, staged_frame
from cutwater.runtime import system
from cutwater.storage.part_files import Held, StagingFiles
from cutwater.types import Batch, EventTime, Part

if TYPE_CHECKING:
    from cutwater.format.merging import Blocks, Form

CHUNK_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 256 * 1024
"""Approximate size of an entry of rows that are kept for a second merge."""

Read = Callable[[int, int], bytes]
"""Reads whole, verified frames of a part from an offset: at most this many bytes, but at least one frame."""


class Source(Struct, frozen=True):
    """A decided part that is here and intact, with the function that reads its frames. ``block_bytes`` is the size of
    its largest entry in memory."""

    part: Part
    staged: StagedPart
    read: Read
    block_bytes: int
    checked: bool = False


def block_sizes(held: Held, files: StagingFiles) -> Iterator[int]:
    """Read a whole part to verify it, and yield the size of each of its entries in memory. Raises ``Damaged``."""
    if held.part.order is None:
        for frame in files.frames(held):
            yield frame.header.body_bytes
        return
    # Only nodes that publish ordered parts need Arrow, which is slow to import.
    from cutwater.format import merging  # noqa: PLC0415

    form = merging.form_of(held.part.order)
    for frame in files.frames(held):
        yield merging.read_block(frame.body, form, frame.header.count).nbytes


def entries_of(group: PublishGroup, sources: Sequence[Source], files: StagingFiles) -> Generator[Batch, None, None]:
    """Yield all entries of the group. ``files`` keeps rows that must be merged twice."""
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


def _frames(read: Read, size: int, bytes_max: int) -> Iterator[EntryFrame]:
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
    # Rows of a topic without an event-time column have the time of their batch, and these batches are created here.
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
    """Yield the rows of an ordered part, in the form common to all parts, with one entry in memory at a time."""
    from cutwater.format import merging  # noqa: PLC0415

    for frame in _frames(read, size, 1):
        yield merging.adapt(merging.read_block(frame.body, form, frame.header.count), common)


def _keep(kept: ExitStack, files: StagingFiles, like: StagedPart, form: Form, blocks: Blocks) -> Callable[[], Blocks]:
    """Write merged rows to a file that is removed when ``kept`` ends; return a function that reads them again."""
    from cutwater.format import merging  # noqa: PLC0415

    writer = kept.enter_context(_temporary(files, structs.replace(like, part=system.token_hex(16), order=form.order)))
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
