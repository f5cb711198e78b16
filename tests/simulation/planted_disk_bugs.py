"""Bugs in finding and repairing damage, and in the store on a disk, that the simulator of shipped code must find. Each
function returns what to replace by what."""

from __future__ import annotations

from planted_bugs import Patch

from cutwater.format.entry_codec import EntryFrame
from cutwater.metadata.stores import sqlite_database
from cutwater.storage.replica.small_files import SmallFiles
from cutwater.storagenode.repair import scrubbing
from cutwater.storagenode.repair.damage_repair import Mender
from cutwater.types import LLSN


def damaged_copy_taken_for_intact() -> list[Patch]:
    """What fails its checksum is served, also as a copy for a repair."""
    return [(EntryFrame, "problem", None)]


def scrub_misses_the_last_segment() -> list[Patch]:
    return [(scrubbing, "indexed_end", lambda driver: LLSN(driver.storage._log.firsts[-1] - 1))]


def repair_called_done_without_a_copy() -> list[Patch]:
    async def mend_entries(self, driver, first_llsn, llsn):
        return 1

    return [(Mender, "_mend_entries", mend_entries)]


def damaged_small_files_left_alone() -> list[Patch]:
    return [(SmallFiles, "repair", lambda self: 0)]


def database_not_synced() -> list[Patch]:
    settings = tuple(setting.replace("= FULL", "= OFF") for setting in sqlite_database._SETTINGS)
    return [(sqlite_database, "_SETTINGS", settings)]
