"""The one checksum of Cutwater, CRC32C. The client computes it for bodies, and the writer for everything else."""

from __future__ import annotations

import sys

import google_crc32c

Buffer = bytes | bytearray | memoryview

_CHUNK_BYTES = 64 * 1024
"""The library takes ``bytes``. Views are copied in pieces that fit into the processor's cache."""
_LARGE_BYTES = 16 * 1024


def crc32c(data: Buffer, before: int = 0) -> int:
    """Return the checksum of the data. ``before`` is the checksum of the bytes that precede it, if any."""
    if type(data) is bytes:
        whole: int = google_crc32c.extend(before, data)
        return whole
    view = memoryview(data).cast("B")
    if len(view) > _LARGE_BYTES:
        # The library also takes Arrow's views, which saves a copy: a sixth of the processor time of a subscription to
        # large batches (ADR 0030). They are used only if Arrow is loaded anyway: in processes that read or write
        # records, but not in a server that never decodes them.
        arrow_view = getattr(sys.modules.get("pyarrow"), "py_buffer", None)
        if arrow_view is not None:
            return int(google_crc32c.extend(before, arrow_view(view)))
    for start in range(0, len(view), _CHUNK_BYTES):
        before = google_crc32c.extend(before, view[start : start + _CHUNK_BYTES].tobytes())
    return int(before)
