"""The one checksum of Cutwater: CRC32C, of bodies by the client and of everything else by whoever writes it."""

from __future__ import annotations

import sys

import google_crc32c

Buffer = bytes | bytearray | memoryview

_CHUNK_BYTES = 64 * 1024
"""The library takes ``bytes``. Views are copied in pieces that stay in the processor's cache."""
_LARGE_BYTES = 16 * 1024


def crc32c(data: Buffer, before: int = 0) -> int:
    """``before`` is the checksum of what comes before this, if anything does."""
    if type(data) is bytes:
        whole: int = google_crc32c.extend(before, data)
        return whole
    view = memoryview(data).cast("B")
    if len(view) > _LARGE_BYTES:
        # Arrow's views are the others that the library takes. It is used where it is in use anyway: by those who read
        # or write records, but not by a server that never looks into them.
        arrow_view = getattr(sys.modules.get("pyarrow"), "py_buffer", None)
        if arrow_view is not None:
            return int(google_crc32c.extend(before, arrow_view(view)))
    for start in range(0, len(view), _CHUNK_BYTES):
        before = google_crc32c.extend(before, view[start : start + _CHUNK_BYTES].tobytes())
    return int(before)
