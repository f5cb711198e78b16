"""Errors of the metadata store; each is a branch of the tree in ``cutwater.errors``.

::

    Refused
      ├─ StoreLocked        store_locked       another process has the database open; carries its process id
      └─ UnknownContent     unknown_content    the stored data is intact, but of a kind that this version does not know
     Damaged
      └─ DamagedStore       damaged_store      the stored data fails its checksum, or has a gap
"""

from __future__ import annotations

from cutwater.errors import Damaged, Refused


class StoreLocked(Refused):
    code = "store_locked"

    def __init__(self, path: str, pid: int) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{path} is in use by {holder}: stop that one first, or choose another database")
        self.path, self.pid = path, pid


class UnknownContent(Refused):
    code = "unknown_content"

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where} is intact, but holds what this version does not know ({what}): "
            "start the newer version of Cutwater that wrote it"
        )
        self.where = where


class DamagedStore(Damaged):
    code = "damaged_store"
    retriable = False

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where} is damaged ({what}): nothing of it was used. Restore the store from a backup that is newer than "
            "everything the storage nodes know, and keep the damaged one"
        )
        self.where = where
