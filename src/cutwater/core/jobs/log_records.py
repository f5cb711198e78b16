"""Records of the topic of job logs: the key names the attempt; the value has bytes that it printed, and an offset."""

from __future__ import annotations

from cutwater.types import JobEpoch, JobNumber

OFFSET_BYTES = 8
HEAD_BYTES = 256 * 1024
"""The beginning of the log of an attempt is always stored."""
TAIL_BYTES = 768 * 1024
"""Of what comes after it, the last bytes are."""


def log_key(job: JobNumber, epoch: JobEpoch, attempt: int) -> bytes:
    return f"{job}/{epoch}/{attempt}".encode()


def encode_log(offset: int, data: bytes) -> bytes:
    return offset.to_bytes(OFFSET_BYTES, "big") + data


def decode_log(value: bytes) -> tuple[int, bytes]:
    """Return the offset of the first byte in the log of the attempt, and the bytes."""
    return int.from_bytes(value[:OFFSET_BYTES], "big"), bytes(value[OFFSET_BYTES:])
