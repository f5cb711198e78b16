"""The one worker that writes to the storage of a replica: group commit off the event loop.

Writes that arrive during a sync go into the next one. Entries are synced as soon as possible, because appends wait for
them. Commit contexts can wait: an append is acknowledged before its commit is on disk, and the metadata repository
keeps the commit until then. They are written when a reader wants them, because readers find records by them; otherwise
together with the next entries, or at the node's tick. Their sync waits for the tick.

Waking a thread and being woken by it costs more than most of its work. So everything given in one turn of the event
loop is handed over once, at the end of the turn, when the loop is about to let other threads run; or the loop itself
writes it (``sync_scheduler`` decides). Only one of the two ever works: the loop writes only while the worker is idle,
because only the loop could give it work.

The queue has no limit of its own. Callers check ``backlog_bytes`` before they give it entries. The number of commit
contexts that are held back is at most the number of entries since the last hand-over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from cutwater.errors import CutwaterError
from cutwater.format.errors import StorageBroken
from cutwater.runtime import system
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storagenode.counters import Histogram
from cutwater.types import LLSN, CommitContext, Entry

_log = logging.getLogger(__name__)

GROUP_ITEMS_MAX = 4096
GROUP_BYTES_MAX = 32 * 1024 * 1024
ENTRY_COST_BYTES = 256
"""Approximate size of an entry in addition to its body."""

Job = Callable[[], None]


class Durable(Struct, frozen=True):
    """What a sync made durable, and the generation of the files in which it was written; None if nothing was."""

    entries_end: LLSN | None
    entries_generation: int
    context: CommitContext | None
    contexts_generation: int


class _Task(Struct, frozen=True):
    """A job to run after everything before it is durable. ``reopens``: the job recovers from an earlier failure."""

    job: Job
    done: Callable[[CutwaterError | None], None]
    reopens: bool


_Write = tuple[Entry | CommitContext, int, int]
"""The item to write, the generation of the files, and its share of the backlog in bytes."""
_Item = _Write | _Task


class Writer:
    """Writes to one replica's storage. ``tell`` runs a function on the event loop's thread; all results go that way.

    After a failure it drops what it is given and refuses tasks, until a task that reopens the files succeeds: items
    given in between do not follow the content of the files.
    """

    def __init__(
        self,
        storage: SegmentStorage,
        tell: Callable[[Job], None],
        on_durable: Callable[[Durable], None],
        on_failure: Callable[[CutwaterError], None],
        name: str,
    ) -> None:
        self.on_readable: Callable[[], None] | None = None
        """Called on the event loop when readers can find newly written commits; None without readers."""
        self.entry_syncs = Histogram()
        self.context_syncs = Histogram()
        self._storage = storage
        self._tell = tell
        self._on_durable = on_durable
        self._on_failure = on_failure
        self.turn: list[_Item] = []
        """Items given since the last hand-over; others may check whether there are any."""
        self._held: list[_Item] = []
        """Commit contexts that wait for the next entries, a reader or the tick."""
        self._given_bytes = 0
        """Changed only by the event loop's thread, and ``_taken_bytes`` only by the writer's: so no lock is needed."""
        self._taken_bytes = 0
        self._entries: list[Entry] = []
        self._entries_bytes = 0
        self._contexts: list[CommitContext] = []
        self._generations = [0, 0]
        self._unsynced: CommitContext | None = None
        """The last commit context that is written but not synced."""
        self._is_here = False
        """Whether the event loop's thread is writing."""
        self._is_asked = False
        """Whether a hand-over was requested meanwhile."""
        self._is_broken = False
        self._is_ended = False
        """Whether all later items are ignored."""
        self._worker = system.worker(name, self._step)

    # Called from the event loop's thread.

    @property
    def backlog_bytes(self) -> int:
        """Bytes of entries that were given and are not durable yet."""
        return self._given_bytes - self._taken_bytes

    def write(self, entry: Entry, generation: int) -> None:
        """Give an entry. The caller must call ``hand_over`` before the end of its turn."""
        if not self._is_ended:
            size = len(entry.batch.body) + ENTRY_COST_BYTES
            self._given_bytes += size
            if self._held:
                self.release()
            self.turn.append((entry, generation, size))

    def write_context(self, context: CommitContext, generation: int) -> None:
        """Give a commit context, which is held back until ``release`` or until something else is given."""
        if not self._is_ended:
            self._held.append((context, generation, 0))

    def release(self) -> None:
        """Release the commit contexts that are held back; the caller must call ``hand_over`` afterwards."""
        if self._held:
            self.turn += self._held
            self._held = []

    def hand_over(self) -> None:
        if self._is_here:
            self._is_asked = True
        elif self.turn:
            turn, self.turn = self.turn, []
            self._worker.put(turn)
            if self._is_ended:
                # Nothing was given since ``end``, so this was the last turn.
                self._worker.stop()

    @property
    def is_idle(self) -> bool:
        """Whether the worker has nothing to do, and will have nothing to do until a hand-over."""
        return self._worker.is_idle

    def write_here(self, then: Callable[[], None]) -> None:
        """Write and sync in this thread instead of ``hand_over``, while the worker is idle, and report the results
        at once. ``then`` is called when entries are durable, before the remaining work, which no caller waits
        for. If a callback hands something over meanwhile, it waits until this thread is done with the files."""
        assert self.is_idle

        failed: list[Exception] = []

        def tell(job: Job) -> None:
            try:
                job()
                then()
            except Exception as error:
                # Finish the work that was begun here before raising an error of a callback.
                failed.append(error)

        turn, self.turn = self.turn, []
        for item in turn:
            # Other kinds of items are handed over at once, so they never get here.
            assert isinstance(item, tuple)
            self._collect(item)
        if self._is_broken:
            self._drop()
            return
        self._is_here = True
        try:
            self._sync(contexts=False, tell=tell)
        finally:
            self._is_here = False
            if self._is_asked:
                self._is_asked = False
                self.hand_over()
        if failed:
            raise failed[0]

    def tick(self) -> None:
        """Write the commits that came since the last tick, and sync them. Called from time to time."""
        if (self._held or self._unsynced is not None) and not self._is_ended:
            self._last(_SYNC)

    def submit(self, job: Job, done: Callable[[CutwaterError | None], None], *, reopens: bool = False) -> None:
        """Run a job after everything given before is durable; ``done`` gets the outcome on the event loop."""
        if self._is_ended:
            self._tell(lambda: done(StorageBroken("nothing is written any more: the replica is no longer here")))
        else:
            self._last(_Task(job, done, reopens))

    def end(self) -> None:
        """Finish everything given so far, then end."""
        if not self._is_ended:
            self._is_ended = True
            self._last(_SYNC)

    def _last(self, task: _Task) -> None:
        self.release()
        self.turn.append(task)
        self.hand_over()

    def join(self, timeout: float) -> bool:
        """Wait for the worker to end. Returns whether it ended in time."""
        return self._worker.join(timeout)

    # Executed by the worker.

    def _step(self, turns: list[list[_Item]]) -> None:
        """Write everything that was handed over, and sync it in groups: a group ends with a task, when it is large, or
        when nothing more is waiting."""
        collected = 0
        for item in _taken(turns):
            if isinstance(item, _Task):
                self._end_group(contexts=True)
                self._do(item)
                collected = 0
                continue
            self._collect(item)
            collected += 1
            if collected >= GROUP_ITEMS_MAX or self._entries_bytes >= GROUP_BYTES_MAX:
                self._end_group(contexts=False)
                collected = 0
        self._end_group(contexts=False)

    def _end_group(self, *, contexts: bool) -> None:
        if self._is_broken:
            self._drop()
        else:
            self._sync(contexts=contexts, tell=self._tell)

    def _collect(self, item: _Write) -> None:
        what, generation, size = item
        if isinstance(what, Entry):
            self._entries.append(what)
            self._entries_bytes += size
            self._generations[0] = generation
        else:
            self._contexts.append(what)
            self._generations[1] = generation

    def _take_entries(self) -> list[Entry]:
        """Return the collected entries, which no longer count as waiting from here on."""
        entries, self._entries = self._entries, []
        self._taken_bytes += self._entries_bytes
        self._entries_bytes = 0
        return entries

    def _sync(self, *, contexts: bool, tell: Callable[[Job], None]) -> None:
        committed, self._contexts = self._contexts, []
        contexts = contexts and (bool(committed) or self._unsynced is not None)
        if not self._entries and not committed and not contexts:
            return
        try:
            # Clients wait for entries, so they come first, unless a reader waits for the commits before them.
            is_urgent = self.on_readable is not None
            if committed and is_urgent:
                self._write_contexts(committed, tell)
            if self._entries:
                self._sync_entries(tell)
            if committed and not is_urgent:
                self._write_contexts(committed, tell)
            self._storage.mark()
            if contexts:
                self._sync_contexts(tell)
        except Exception as error:
            self._fail(_known(error), tell)

    def _sync_entries(self, tell: Callable[[Job], None]) -> None:
        self._storage.write(self._entries)
        started = system.monotonic()
        self._storage.sync(contexts=False, marks=False)
        seconds = system.monotonic() - started
        end = self._take_entries()[-1].last_llsn
        tell(partial(self._on_durable, Durable(end, self._generations[0], None, self._generations[1])))
        self.entry_syncs.observe(seconds)

    def _write_contexts(self, committed: list[CommitContext], tell: Callable[[Job], None]) -> None:
        self._storage.write_contexts(committed)
        self._unsynced = committed[-1]
        on_readable = self.on_readable
        if on_readable is not None:
            tell(on_readable)

    def _sync_contexts(self, tell: Callable[[Job], None]) -> None:
        started = system.monotonic()
        self._storage.sync(entries=False, marks=False)
        self.context_syncs.observe(system.monotonic() - started)
        commits = Durable(None, self._generations[0], self._unsynced, self._generations[1])
        self._unsynced = None
        tell(partial(self._on_durable, commits))

    def _fail(self, error: CutwaterError, tell: Callable[[Job], None]) -> None:
        self._is_broken = True
        self._drop()
        tell(lambda: self._on_failure(error))

    def _drop(self) -> None:
        self._take_entries()
        self._contexts, self._unsynced = [], None

    def _do(self, task: _Task) -> None:
        if task is _SYNC:
            return
        outcome: CutwaterError | None = None
        if self._is_broken and not task.reopens:
            outcome = StorageBroken("an earlier write failed, so the files have to be opened anew first")
        else:
            try:
                task.job()
            except Exception as error:
                outcome = _known(error)
            self._is_broken = outcome is not None
        self._tell(lambda: task.done(outcome))


def _known(error: Exception) -> CutwaterError:
    """Convert any exception: unexpected ones must not kill the thread, because its callers would wait forever."""
    if isinstance(error, CutwaterError):
        return error
    _log.error("unforeseen failure while writing", exc_info=error)
    return StorageBroken(f"unforeseen failure while writing: {error!r}")


def _taken(turns: list[list[_Item]]) -> Iterator[_Item]:
    """Yield all items. Each turn is released as soon as its items are taken."""
    turns.reverse()
    while turns:
        yield from turns.pop()


_SYNC = _Task(lambda: None, lambda outcome: None, reopens=False)
"""A task that does nothing; everything before it becomes durable."""
