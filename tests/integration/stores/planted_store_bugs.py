"""Bugs to plant in the stores, as patches (ADR 0008): each returns what to replace, and by what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio

from cutwater.core.order.decisions import Decision
from cutwater.errors import LeaderFenced
from cutwater.format.errors import DiskFull
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.client import TXN
from cutwater.metadata.stores import etcd_store, sqlite_database
from cutwater.metadata.stores.encoding import encode_batch
from cutwater.metadata.stores.etcd_store import EtcdHead, EtcdStore, get, is_equal, number, put, value
from cutwater.metadata.stores.sqlite_database import SqliteDatabase
from cutwater.metadata.stores.store_rules import elsewhere, require_leader
from cutwater.testing.stores.etcd_model import ModelConnection
from cutwater.types import DecisionIndex, LeaderEpoch, MetadataNodeId
from tests.integration.stores.sqlite_faults import ALL_ERRORS, FAILED_SYNCS, FULL_DISKS, SqliteProfile

Patches = list[tuple[object, str, Any]]

STALE_SECONDS = 1.0


def _append_that(*, checks_epoch: bool = True, checks_place: bool = True, recognizes: bool = True) -> Any:
    async def append(
        self: EtcdStore, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]
    ) -> None:
        keys, end = self._keys, DecisionIndex(after + len(decisions))
        key, data = keys.batch(after + 1), encode_batch(epoch, DecisionIndex(after + 1), decisions)
        compare = [is_equal(keys.epoch, number(epoch))] if checks_epoch else []
        compare += [is_equal(keys.last, number(after))] if checks_place else []
        txn = pb.Txn(
            compare=compare,
            success=[put(key, data), put(keys.last, number(end))],
            failure=[get(keys.leader), get(keys.last), get(key)],
        )
        answer = await self._client.call(TXN, txn)
        if not answer.succeeded:
            require_leader(self._leader_in(value(answer, 0)), epoch)
            last = DecisionIndex(self._number_in(value(answer, 1), "last"))
            if not recognizes or last != end or value(answer, 2) != data:
                raise elsewhere(last, after)

    return append


# etcd.


def unknown_outcome_is_failure() -> Patches:
    """An append whose first answer was lost is refused when it is sent again."""
    return [(EtcdStore, "_append", _append_that(recognizes=False))]


def epoch_is_not_checked() -> Patches:
    """A deposed leader can still append."""
    return [(EtcdStore, "_append", _append_that(checks_epoch=False))]


def place_is_not_checked() -> Patches:
    """An append that arrives twice is executed twice, also after later ones."""
    return [(EtcdStore, "_append", _append_that(checks_place=False))]


def unknown_outcome_is_success() -> Patches:
    """A transaction that was not answered in time counts as executed."""
    ask = ModelConnection.ask

    async def hopeful(self: ModelConnection, rpc: Any, request: Any, timeout_seconds: float) -> Any:
        try:
            return await ask(self, rpc, request, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if rpc is TXN and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return pb.TxnAnswer(succeeded=True)
            raise

    return [(ModelConnection, "ask", hopeful)]


def stale_leader_is_read() -> Patches:
    """The leader and the last decision come from a cache for a second."""
    head = EtcdStore._head

    async def cached(self: Any) -> EtcdHead:
        now = asyncio.get_running_loop().time()
        if now - getattr(self, "cached_at", -STALE_SECONDS) >= STALE_SECONDS:
            self.cached, self.cached_at = await head(self), now
        return self.cached

    return [(EtcdStore, "_head", cached)]


def any_leader_of_the_epoch_is_me() -> Patches:
    """A takeover that another node won counts as an earlier attempt of one's own."""
    acquire = EtcdStore.acquire

    async def bold(self: EtcdStore, node: MetadataNodeId, address: str, seen: LeaderEpoch, **options: Any) -> Any:
        try:
            return await acquire(self, node, address, seen, **options)
        except LeaderFenced:
            if (await self.leader(**options)).epoch == seen + 1:
                return LeaderEpoch(seen + 1)
            raise

    return [(EtcdStore, "acquire", bold)]


def trim_removes_a_batch_too_many() -> Patches:
    """The batch in which a snapshot ends goes, with the decisions after it."""

    async def after(self: EtcdStore, index: DecisionIndex) -> bytes:
        return self._keys.batch(index + 3)

    return [(EtcdStore, "_batch_with", after)]


def load_reads_several_revisions() -> Patches:
    """A load reads every page as of another revision."""
    scan = EtcdStore._scan

    def unpinned(self: EtcdStore, start: bytes, end: bytes, revision: int, limit: int) -> Any:
        return scan(self, start, end, 0, limit)

    return [(EtcdStore, "_scan", unpinned), (etcd_store, "PAGE_KEYS", 1)]


# SQLite.


def commits_are_not_synced() -> Patches:
    settings = tuple(text.replace("synchronous = FULL", "synchronous = NORMAL") for text in sqlite_database._SETTINGS)
    return [(sqlite_database, "_SETTINGS", settings)]


def log_is_believed_as_it_is() -> Patches:
    """Opening does not write the log again, which an earlier failed sync may have lost."""
    return [(SqliteDatabase, "_write_log_again", lambda self: None)]


def names_are_left_to_sqlite() -> Patches:
    """Opening does not sync the names of the database and its log. SQLite does, but goes on when it fails."""
    return [(SqliteDatabase, "_sync_names", lambda self: None)]


def broken_store_goes_on() -> Patches:
    """After a failed sync the store says that nothing was written, and takes the next append."""
    return [(SqliteDatabase, "_breaks", lambda self, what: DiskFull(f"{self.path}: {what}"))]


def failed_commit_is_taken_for_done() -> Patches:
    """A failed commit counts as done."""
    append = SqliteDatabase.append

    def careless(self: SqliteDatabase, *args: Any, **options: Any) -> None:
        with suppress(DiskFull):
            append(self, *args, **options)

    return [(SqliteDatabase, "append", careless)]


ETCD_BUGS: tuple[Callable[[], Patches], ...] = (
    unknown_outcome_is_failure,
    epoch_is_not_checked,
    place_is_not_checked,
    unknown_outcome_is_success,
    stale_leader_is_read,
    any_leader_of_the_epoch_is_me,
    trim_removes_a_batch_too_many,
    load_reads_several_revisions,
)
SQLITE_BUGS: tuple[tuple[Callable[[], Patches], SqliteProfile], ...] = (
    (commits_are_not_synced, ALL_ERRORS),
    (broken_store_goes_on, FAILED_SYNCS),
    (log_is_believed_as_it_is, FAILED_SYNCS),
    (names_are_left_to_sqlite, FAILED_SYNCS),
    (failed_commit_is_taken_for_done, FULL_DISKS),
)


@contextmanager
def planted(bug: Callable[[], Patches]) -> Iterator[None]:
    with ExitStack() as stack:
        for target, name, replacement in bug():
            stack.enter_context(patch.object(target, name, replacement))
        yield
