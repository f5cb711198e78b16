"""Bugs in the servers and in the files that the simulator of shipped code must find. Each function returns what to
replace by what."""

from __future__ import annotations

from contextlib import suppress

from msgspec import structs
from planted_bugs import Patch

from cutwater.core.messages import SyncEntries
from cutwater.core.requests import CommitCursorRequest, Done
from cutwater.errors import CutwaterError, StreamSealed
from cutwater.format.entry_codec import NO_TIME, frames_in
from cutwater.metadata.term import Term
from cutwater.storage.files import TEMPORARY
from cutwater.storage.format import HEADER_BYTES
from cutwater.storage.replica import marked_file, small_files
from cutwater.storage.replica.commits import CONTEXT_BYTES, CommitLog
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.segment import Segment
from cutwater.storage.replica.segment_log import SegmentLog
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.repair.syncing import Syncing
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.serving import push_reads, reading
from cutwater.storagenode.serving.push_reads import Following
from cutwater.storagenode.serving.reading import FoundEntries, indexed_end
from cutwater.types import LLSN

# Files.


def name_of_a_new_file_not_synced() -> list[Patch]:
    def replace(files, path, data):
        temporary = path.with_name(path.name + TEMPORARY)
        file = files.create(temporary)
        file.pwritev([data], 0)
        file.sync_all()
        files.rename(temporary, path)

    return [(marked_file, "replace", replace)]


def hard_state_renamed_before_its_sync() -> list[Patch]:
    def replace(files, path, data):
        temporary = path.with_name(path.name + TEMPORARY)
        files.create(temporary).pwritev([data], 0)
        files.rename(temporary, path)
        files.sync_dir(path.parent)

    return [(small_files, "replace", replace)]


def entries_called_durable_one_sync_early() -> list[Patch]:
    right = Segment.append

    def append(self, entries, bytes_max, room_ahead_bytes):
        self.marked.sync_data()
        return right(self, entries, bytes_max, room_ahead_bytes)

    def sync(self):
        if self.end != self.durable:
            self.durable = self.end
            self._unmarked = self.end, self.running

    return [(Segment, "append", append), (Segment, "sync", sync)]


def full_segment_not_synced() -> list[Patch]:
    """When a segment is full, the sync goes to the next one."""

    def finish(self):
        self.durable = self.end
        self._unmarked = None
        self.marked.set_mark(self.end.offset, self.end.llsn, self.running)
        if self.marked.size > self.end.offset:
            self.marked.shorten(self.end.offset)

    return [(Segment, "finish", finish)]


def commits_called_durable_without_a_sync() -> list[Patch]:
    def sync(self):
        if self._file is not None and self._count > self._durable_count:
            self._file.set_mark(HEADER_BYTES + self._count * CONTEXT_BYTES, self._end_llsn, NO_TIME)
        self._durable_count, self.durable = self._count, self.last

    return [(CommitLog, "sync", sync)]


def failed_sync_taken_for_success() -> list[Patch]:
    def sync(self, sync):
        with suppress(OSError):
            sync()

    return [(MarkedFile, "_sync", sync)]


def trim_removes_one_segment_too_many() -> list[Patch]:
    right = SegmentLog.forget_before

    def forget_before(self, first_llsn):
        later = [first for first in self._firsts if first > first_llsn]
        right(self, later[0] if later else first_llsn)

    return [(SegmentLog, "forget_before", forget_before)]


# Storage nodes.


def commits_given_to_the_wrong_streams() -> list[Patch]:
    right = StorageNode._commit

    def commit(self, message):
        commits = list(message.commits)
        if len(commits) > 1:
            one, two = commits[:2]
            commits[:2] = structs.replace(one, stream=two.stream), structs.replace(two, stream=one.stream)
        right(self, structs.replace(message, commits=tuple(commits)))

    return [(StorageNode, "_commit", commit)]


def unsettled_appends_called_refused() -> list[Patch]:
    def leave_unsettled(self, effect):
        self._host.fail(effect.waiter, StreamSealed("the log stream is sealed"))

    return [(ReplicaDriver, "_leave_unsettled", leave_unsettled)]


def producers_last_number_not_told() -> list[Patch]:
    right = StorageNode.acknowledge

    def acknowledge(self, effect):
        right(self, structs.replace(effect, last_sequence=0))

    return [(StorageNode, "acknowledge", acknowledge)]


def learner_skips_an_entry() -> list[Patch]:
    right = Syncing._take

    def take(self, driver, parts, item, body):
        if isinstance(item, SyncEntries) and body:
            frames = list(frames_in(body))
            body = b"".join(bytes(frame.data) for frame in frames[:1] + frames[2:])
        right(self, driver, parts, item, body)

    return [(Syncing, "_take", take)]


def reader_misses_commits_that_are_not_written_yet() -> list[Patch]:
    """An answer calls itself complete up to commits that cannot be found in the files yet."""

    def indexed(driver, first=None):
        replica = driver.replica
        return FoundEntries(first, indexed_end(driver), replica.complete_through, replica.revision)

    return [(reading, "indexed", indexed), (push_reads, "indexed", indexed)]


def follower_misses_a_commit_while_it_begins() -> list[Patch]:
    async def start(self, driver, from_glsn):
        self._require_readable(driver)
        reading.require_not_trimmed(driver, from_glsn)
        llsn = await driver.in_reader(lambda: driver.storage.from_glsn(from_glsn))
        return LLSN(indexed_end(driver) + 1) if llsn is None else llsn

    return [(Following, "_start", start)]


def reader_skips_the_first_entry_of_a_segment() -> list[Patch]:
    right = push_reads._read_on

    def read_on(driver, llsn, arguments):
        if llsn in driver.storage._log.firsts[1:]:
            after = driver.storage.entry_at(llsn).last_llsn + 1
            if after <= indexed_end(driver):
                llsn = LLSN(after)
        return right(driver, llsn, arguments)

    return [(push_reads, "_read_on", read_on)]


# Metadata nodes.


def leader_speaks_before_the_store_has_it() -> list[Patch]:
    def begin_write(self, write):
        """Pass decisions on at once, and store them one after another, later."""
        waiting = getattr(self, "_unwritten", None)
        if waiting is None:
            waiting = self._unwritten = []
        waiting.append(write)
        if len(waiting) == 1:
            self._writing = self._loop.create_task(store_all(self, waiting))
        self._loop.call_soon(self._is_stored, write, 0.0)

    async def store_all(self, waiting):
        while waiting:
            with suppress(CutwaterError):
                await self._store.append(waiting[0].leader_epoch, waiting[0].after, waiting[0].decisions)
                del waiting[0]

    return [(Term, "_begin_write", begin_write)]


def cursor_acknowledged_before_it_is_decided() -> list[Patch]:
    right = Term.decide

    async def decide(self, request, origin=None, judged_at=None):
        if isinstance(request, CommitCursorRequest):
            self._loop.create_task(right(self, request, origin, judged_at)).add_done_callback(
                lambda task: task.exception()
            )
            return Done()
        return await right(self, request, origin, judged_at)

    return [(Term, "decide", decide)]
