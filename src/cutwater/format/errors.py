"""Errors of files. Each is a branch of the tree in ``cutwater.errors``.

::

    InvalidArgument
     └─ VolumeUnusable               volume_unusable        a volume is missing, no directory, or not writable
    AlreadyExists
     └─ NodeExists                   node_exists            the storage node has data, and --error-if-exists was said
    Refused
     ├─ NewerFormat                  newer_format           a file was written by a newer version of Cutwater
     ├─ VolumeConflict               volume_conflict        the data of one log stream lies under two volumes
     └─ VolumeLocked                 volume_locked          a running storage node uses the volume
    Damaged
     ├─ DamagedEntries               damaged_entries        entries fail their checksum; carries the LLSN range
     └─ DamagedFile                  damaged_file           a file other than an entry fails its checksum
    Trimmed
     └─ TrimmedEntries               trimmed_entries        the LLSN was trimmed; carries the first GLSN left
    Unavailable
     ├─ StorageBroken                storage_broken         a write or an fsync failed; reopen, cut back
     └─ ReadOnly
         └─ DiskFull                 disk_full              no room: nothing was lost, nothing was written
"""

from __future__ import annotations

from pathlib import Path

from cutwater.errors import (
    AlreadyExists,
    Damaged,
    InvalidArgument,
    ReadOnly,
    Refused,
    Trimmed,
    Unavailable,
)
from cutwater.types import GLSN, LLSN

ADVICE = "it is repaired from another replica, if there is an intact one; otherwise restore the file from a backup"


class VolumeUnusable(InvalidArgument):
    code = "volume_unusable"


class NodeExists(AlreadyExists):
    code = "node_exists"


class NewerFormat(Refused):
    code = "newer_format"

    def __init__(self, where: str, found: int, known: int) -> None:
        super().__init__(
            f"{where} has format version {found}; this program reads versions up to {known}: "
            "start the newer version of Cutwater that wrote it"
        )
        self.found, self.known = found, known


class VolumeConflict(Refused):
    code = "volume_conflict"


class VolumeLocked(Refused):
    code = "volume_locked"


class DamagedEntries(Damaged):
    code = "damaged_entries"

    def __init__(self, where: str, first_llsn: LLSN, last_llsn: LLSN, what: str) -> None:
        super().__init__(f"{where}: the entries of LLSN {first_llsn} to {last_llsn} are damaged ({what}): {ADVICE}")
        self.where, self.what = where, what
        self.first_llsn, self.last_llsn = first_llsn, last_llsn


class DamagedFile(Damaged):
    code = "damaged_file"

    def __init__(self, path: Path, what: str, advice: str = ADVICE) -> None:
        super().__init__(f"{path} is damaged ({what}): {advice}")
        self.path, self.what = path, what


class TrimmedEntries(Trimmed):
    code = "trimmed_entries"

    def __init__(self, llsn: LLSN, first_llsn: LLSN, first_left: GLSN) -> None:
        super().__init__(GLSN(0), first_left)
        self.message = (
            f"LLSN {llsn} was trimmed: the entries begin at LLSN {first_llsn}, the first GLSN left is {first_left}, "
            "start there"
        )
        self.args = (self.message,)
        self.llsn, self.first_llsn = llsn, first_llsn


class StorageBroken(Unavailable):
    code = "storage_broken"


class DiskFull(ReadOnly):
    code = "disk_full"
