"""Decides by its name whether a file system can hold a checkpoint.

Spark puts each file of a checkpoint into its place by a rename. Exactly once needs that this is atomic: the file is
there whole or not at all, of two drivers that plan the same micro-batch only one succeeds, and a file that is written
again is replaced. Savepoints need less, because one process writes their manifest, last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cutwater.errors import InvalidArgument

LOCAL: Final = "file"
ATOMIC: Final = (LOCAL, "hdfs", "viewfs")
"""Schemes of file systems that rename atomically. For ``viewfs``, it depends on what is mounted there."""

_COPIES: Final = "a rename there copies the file and deletes the old one, so it is not atomic"
_DEPENDS: Final = "whether a rename is atomic depends on how the store is set up, which its name does not tell"
_REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("s3", "s3n", "s3a", "gs", "oss", "cosn", "obs", "swift"), _COPIES),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs", "adl", "ofs", "o3fs"), _DEPENDS),
}
_UNKNOWN: Final = "it is not known to create and rename files atomically"
_NAME_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789+-.")


def scheme_of(place: str) -> str:
    """Return the scheme of a place such as ``hdfs://name/path``, ``file`` for a plain path."""
    scheme, colon, rest = place.partition(":")
    scheme = scheme.lower()
    is_scheme = colon and scheme[:1].isalpha() and set(scheme) <= _NAME_CHARS
    # The path of a local file may contain a colon.
    return scheme if is_scheme and (rest.startswith("/") or scheme in ATOMIC or scheme in _REASONS) else LOCAL


def check_checkpoint_store(place: str, what: str = "the checkpoint") -> None:
    """Refuse a place for checkpoints whose file system is not known to create and rename files atomically."""
    scheme = scheme_of(place)
    if scheme not in ATOMIC:
        raise InvalidArgument(refusal(what, place, f"{scheme}://", _REASONS.get(scheme, _UNKNOWN)))


def refusal(what: str, place: str, store: str, reason: str = _UNKNOWN) -> str:
    """Return the text of the error for a place on a ``store`` that cannot hold checkpoints."""
    return (
        f"{what} {place[:400]} is on {store}, and that cannot hold checkpoints: {reason}. After a crash, batches could "
        "be missing or doubled. Name a directory of this machine, of a file system that is mounted here, or one on "
        "hdfs:// or viewfs://; savepoints may lie on any file system"
    )
