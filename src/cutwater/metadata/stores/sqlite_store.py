"""Stores decisions in an SQLite database, for a metadata repository of one node.

A worker executes the calls one after the other. A caller stops waiting when its timeout expires; a call that has not
begun by then never begins.

``may_wait``: the event loop may wait for the disk. Then the loop itself appends decisions while the worker is idle
and the disk is quick (``storage.sync_latency``, ADR 0028), since nothing else can be decided meanwhile. Otherwise the
worker appends them and reports the outcome as directly as possible, because every append of a client waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import ParamSpec, TypeVar

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import CutwaterError, DeadlineExceeded, ResourceExhausted, Unavailable
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.metadata.stores.sqlite_engine import SqliteEngine
from cutwater.metadata.stores.store_calls import Calls, Changes
from cutwater.metadata.stores.store_interface import TIMEOUT_MS, TRIM_TIMEOUT_MS, AppendTold, LeaderInfo, LoadedState
from cutwater.runtime import system
from cutwater.runtime.deadline_watch import DeadlineWatch
from cutwater.storage.sync_latency import Pace
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId

CALLS_MAX = 64
"""Maximum number of calls that wait for the worker."""
RETRY_MS = 100

P = ParamSpec("P")
R = TypeVar("R")
Job = Callable[[], Callable[[], object]]
"""A job of the worker. The function that it returns reports the result, once the worker is ready for the next job."""

_log = logging.getLogger(__name__)


class _Jobs:
    """Runs jobs in order, off the event loop."""

    def __init__(self, name: str) -> None:
        self._given = self._begun = 0
        """Numbers of jobs. Only threads that give jobs change ``_given``; only the worker changes ``_begun``."""
        self._worker = system.worker(name, self._step)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, and will be nothing to do until a job is given."""
        return self._worker.is_idle

    def submit(self, call: Callable[[], R]) -> Future[R]:
        future: Future[R] = Future()
        self.give(partial(_settled, future, call))
        return future

    def end(self, call: Callable[[], R]) -> Future[R]:
        """End after all earlier jobs, with this call as the last one."""
        future: Future[R] = Future()
        self._put(partial(_settled, future, call))
        self._worker.stop()
        return future

    def give(self, job: Job) -> None:
        if self._given - self._begun >= CALLS_MAX:
            raise ResourceExhausted(f"{CALLS_MAX} calls wait for the disk of the metadata store", retry_ms=RETRY_MS)
        self._put(job)

    def _put(self, job: Job) -> None:
        self._given += 1
        self._worker.put(job)

    def _step(self, jobs: list[Job]) -> Callable[[], object]:
        """Run the jobs. The result of the last one is reported when the worker is idle."""
        while len(jobs) > 1:
            self._run(jobs.pop(0))()
        return self._run(jobs.pop())

    def _run(self, job: Job) -> Callable[[], object]:
        self._begun += 1
        return job()


def _settled(future: Future[R], call: Callable[[], R]) -> Callable[[], object]:
    if not future.set_running_or_notify_cancel():
        return lambda: None
    try:
        return partial(future.set_result, call())
    except BaseException as error:
        return partial(future.set_exception, error)


class _Begun:
    """An append by the worker. ``told`` is set to None when it is called: when the worker is done, or earlier, when the
    time is up or the store is closed."""

    __slots__ = ("at", "told")

    def __init__(self, at: float, told: AppendTold) -> None:
        self.at = at
        self.told: AppendTold | None = told


class SqliteStore:
    """Implements ``MetadataStore``. Create it with ``open``."""

    def __init__(self, path: Path, *, may_wait: bool = False) -> None:
        self._may_wait = may_wait
        self._pace = Pace()
        self._calls = Calls(str(path))
        self._changes = Changes()
        self._jobs = _Jobs(f"metadata store {path}")
        self._opened: SqliteDatabase | None = None
        self._loop = asyncio.get_running_loop()
        self._begun: set[_Begun] = set()
        self._watch = DeadlineWatch(self._loop, self._expire)

    @classmethod
    async def open(
        cls,
        path: Path,
        cluster: ClusterId,
        *,
        timeout_ms: int = TIMEOUT_MS,
        may_wait: bool = False,
        engine: SqliteEngine | None = None,
        is_guest: bool = False,
    ) -> SqliteStore:
        """Open a database, or create it. ``is_guest``: beside the process that has locked it."""
        store = cls(path, may_wait=may_wait)
        try:
            await store._do("open", timeout_ms, store._open, path, cluster, engine, is_guest)
        except BaseException:
            # The worker may still open it after the caller stopped waiting.
            store._jobs.end(store._let_go)
            raise
        return store

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo:
        return await self._do("leader", timeout_ms, self._database.leader)

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        try:
            return (await self._do("acquire", timeout_ms, self._database.acquire, node, address, seen)).epoch
        finally:
            # Watchers read the leader themselves, so waking them is right even if the outcome is unknown.
            self._changes.tell()

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        await self._do("announce", timeout_ms, self._database.announce, node, key)

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        return await self._do("members", timeout_ms, self._database.members)

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState:
        return await self._do("load", timeout_ms, self._database.load)

    async def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        await self._do("append", timeout_ms, self._database.append, epoch, after, decisions)

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        if self._calls.closed:
            return False
        if not self._may_wait or not self._jobs.is_idle or not self._pace.is_quick:
            return self._begin_there(epoch, after, decisions, told)
        begun = system.monotonic()
        try:
            self._database.append(epoch, after, decisions, is_patient=False)
        except Exception:
            # Another program may hold a lock on the database; the worker can wait for it.
            return False
        finally:
            self._pace.observe(begun)
        told(None)
        return True

    def _begin_there(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        begun = _Begun(self._loop.time() + TIMEOUT_MS / 1_000, told)
        try:
            self._jobs.give(partial(self._append_there, begun, epoch, after, decisions))
        except ResourceExhausted:
            return False
        self._begun.add(begun)
        self._watch.note(begun.at)
        return True

    def _tell(self, begun: _Begun, error: Exception | None) -> None:
        self._begun.discard(begun)
        told, begun.told = begun.told, None
        if told is not None:
            told(error)

    def _expire(self, now: float) -> float:
        for begun in [begun for begun in self._begun if begun.at <= now]:
            self._tell(begun, DeadlineExceeded(f"{self._calls.store} did not append within {TIMEOUT_MS} ms"))
        return min((begun.at for begun in self._begun), default=inf)

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        await self._do("trim", timeout_ms, self._database.trim, epoch, snapshot)

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        return self._changes.watch_leader(self._calls, self.leader)

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        if not await self._calls.close():
            return
        self._watch.stop()
        for begun in list(self._begun):
            self._tell(begun, Unavailable(f"{self._calls.store} was closed"))
        self._changes.tell()
        ended = asyncio.wrap_future(self._jobs.end(self._let_go))
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await asyncio.shield(ended)
        except TimeoutError:
            _log.warning("%s is still busy after %d ms and is left to itself", self._calls.store, timeout_ms)
        except CutwaterError as error:
            # Confirmed decisions are already on disk; closing adds nothing to that.
            _log.warning("%s was not closed cleanly: %s", self._calls.store, error)

    async def _do(self, name: str, timeout_ms: int, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        async with self._calls.call(name, timeout_ms):
            return await asyncio.wrap_future(self._jobs.submit(lambda: job(*args, **kwargs)))

    @property
    def _database(self) -> SqliteDatabase:
        assert self._opened is not None
        return self._opened

    # Executed by the worker.

    def _open(self, path: Path, cluster: ClusterId, engine: SqliteEngine | None, is_guest: bool) -> None:
        self._opened = SqliteDatabase(path, cluster, engine, is_guest=is_guest)

    def _append_there(
        self, begun: _Begun, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]
    ) -> Callable[[], object]:
        outcome: Exception | None = None
        if begun.told is not None:
            try:
                self._database.append(epoch, after, decisions)
            except Exception as error:
                outcome = error
        return partial(self._tell_there, begun, outcome)

    def _tell_there(self, begun: _Begun, outcome: Exception | None) -> None:
        with suppress(RuntimeError):  # The event loop is closed.
            self._loop.call_soon_threadsafe(self._tell, begun, outcome)

    def _let_go(self) -> None:
        if self._opened is not None:
            self._opened.close()
