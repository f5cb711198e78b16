"""The one checksum of Cutwater: CRC32C, of bodies by the client and of everything else by whoever writes it."""

from __future__ import annotations

import google_crc32c

Buffer = bytes | bytearray | memoryview

_CHUNK_BYTES = 64 * 1024
"""The library takes ``bytes`` only. Views are copied in pieces that stay in the processor's cache."""


def crc32c(data: Buffer) -> int:
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    view = memoryview(data).cast("B")
    if len(view) <= _CHUNK_BYTES:
        return int(google_crc32c.value(view.tobytes()))
    crc = 0
    for start in range(0, len(view), _CHUNK_BYTES):
        crc = google_crc32c.extend(crc, view[start : start + _CHUNK_BYTES].tobytes())
    return int(crc)
