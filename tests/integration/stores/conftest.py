"""Stores to run the same tests on, and how tests of coroutines run here.

``backend`` is one of memory, SQLite, SQLite on a simulated disk, etcd and the model of etcd. A test that is a coroutine
runs on the event loop of the servers, is bounded in time, and its stores are closed after it, whatever happened.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.local_etcd import MISSING, LocalEtcd
from cutwater.admin.local_etcd import find_etcd
from cutwater.metadata.stores.memory_store import MemoryData, MemoryStore
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.runtime.event_loop import new_event_loop
from cutwater.testing.fault_files import FaultFiles
from cutwater.testing.stores.etcd_model import EtcdModel
from cutwater.types import ClusterId

if TYPE_CHECKING:
    from cutwater.testing.stores.sqlite_disk import DiskSqlite

TEST_SECONDS_MAX = 100
CLUSTER = ClusterId(7)
DATABASE = Path("/disk/metadata.db")

# A killed process loses nothing that it wrote, so tests that kill only processes need no fsync.
ETCD_OPTIONS = ("--unsafe-no-fsync", "--heartbeat-interval", "50", "--election-timeout", "500")

_numbers = itertools.count(1)


class Backend(ABC):
    """Where stores are opened. ``open`` gives what one more metadata node would have; ``stall`` lets it hang."""

    def __init__(self) -> None:
        self.stores: list[MetadataStore] = []

    async def open(self) -> MetadataStore:
        store = await self._open()
        self.stores.append(store)
        return store

    async def reopen(self) -> MetadataStore:
        """As after a restart of everything that can be restarted."""
        await self.close()
        return await self.open()

    async def close(self) -> None:
        self.resume()
        for store in self.stores:
            await store.close()
        self.stores.clear()

    @abstractmethod
    async def _open(self) -> MetadataStore: ...

    @abstractmethod
    def stall(self) -> None: ...

    @abstractmethod
    def resume(self) -> None: ...


class Memory(Backend):
    def __init__(self) -> None:
        super().__init__()
        self._data: MemoryData | None = None

    async def _open(self) -> MetadataStore:
        self._data = self._data or MemoryData()
        return MemoryStore(self._data)

    def stall(self) -> None:
        assert self._data is not None
        self._data.running.clear()

    def resume(self) -> None:
        if self._data is not None:
            self._data.running.set()


class Sqlite(Backend):
    """One process opens the database once: all nodes share that store."""

    def __init__(self, path: Path, *, may_wait: bool = False) -> None:
        super().__init__()
        self.path, self._may_wait = path, may_wait
        self._other: sqlite3.Connection | None = None

    async def _open(self) -> MetadataStore:
        if self.stores:
            return self.stores[0]
        return await open_store(f"sqlite:{self.path}", cluster=CLUSTER, may_wait=self._may_wait)

    def stall(self) -> None:
        """A lock that another program holds: the thread of the store waits in SQLite, as for a slow disk."""
        self._other = sqlite3.connect(self.path, isolation_level=None)
        self._other.execute("BEGIN IMMEDIATE")

    def resume(self) -> None:
        if self._other is not None:
            self._other.close()
            self._other = None


class DiskSqliteStores(Backend):
    """The shipped store on SQLite over a simulated disk, without faults."""

    def __init__(self) -> None:
        super().__init__()
        self.files = FaultFiles()
        self.files.make_dir(DATABASE.parent)
        self._released = threading.Event()
        self.engine: DiskSqlite | None = None

    async def _open(self) -> MetadataStore:
        from cutwater.testing.stores.sqlite_disk import DiskSqlite

        if self.stores:
            return self.stores[0]
        self.engine = DiskSqlite(self.files, Random(1), self._released.wait)
        return await SqliteStore.open(DATABASE, CLUSTER, engine=self.engine)

    def stall(self) -> None:
        assert self.engine is not None
        self._released.clear()
        self.engine.hold(60)

    def resume(self) -> None:
        if self.engine is not None:
            self.engine.hold(0)
            self._released.set()


class Etcd(Backend):
    def __init__(self, etcd: LocalEtcd) -> None:
        super().__init__()
        self.etcd = etcd
        self.url = etcd.url(f"test{next(_numbers)}")

    async def _open(self) -> MetadataStore:
        return await open_store(self.url, cluster=CLUSTER)

    def stall(self) -> None:
        for member in self.etcd.members:
            member.stop()

    def resume(self) -> None:
        for member in self.etcd.members:
            if member.is_running:
                member.go_on()


class Model(Backend):
    """The shipped store on the model of etcd, without faults."""

    def __init__(self) -> None:
        super().__init__()
        self.model: EtcdModel | None = None

    async def _open(self) -> MetadataStore:
        self.model = self.model or EtcdModel(Random(1))
        return self.model.store(CLUSTER)

    def stall(self) -> None:
        assert self.model is not None
        self.model.stop()

    def resume(self) -> None:
        if self.model is not None:
            self.model.go_on()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEtcd]:
    """One server for all tests that leave it whole."""
    if find_etcd() is None:
        pytest.skip(MISSING)
    with LocalEtcd(tmp_path_factory.mktemp("etcd"), options=ETCD_OPTIONS) as started:
        yield started


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalEtcd]:
    """A cluster of three that a test may break."""
    if find_etcd() is None:
        pytest.skip(MISSING)
    with LocalEtcd(tmp_path, members=3, options=ETCD_OPTIONS) as started:
        yield started


@pytest.fixture(params=["memory", "sqlite", "sqlite, by the loop", "sqlite on a simulated disk", "etcd", "etcd model"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    match request.param:
        case "memory":
            return Memory()
        case "sqlite":
            return Sqlite(tmp_path / "metadata.db")
        case "sqlite, by the loop":
            return Sqlite(tmp_path / "metadata.db", may_wait=True)
        case "sqlite on a simulated disk":
            pytest.importorskip("apsw")
            return DiskSqliteStores()
        case "etcd model":
            return Model()
    return Etcd(request.getfixturevalue("etcd"))


@pytest.fixture
def on_etcd(etcd: LocalEtcd) -> Etcd:
    return Etcd(etcd)


@pytest.fixture
def on_three(three: LocalEtcd) -> Etcd:
    return Etcd(three)


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Sqlite:
    return Sqlite(tmp_path / "metadata.db")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def bounded() -> None:
        async with asyncio.timeout(TEST_SECONDS_MAX):
            try:
                await pyfuncitem.obj(**arguments)
            finally:
                for used in arguments.values():
                    if isinstance(used, Backend):
                        await used.close()
        # What was cancelled takes a moment to end.
        async with asyncio.timeout(5):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(bounded())
    return True
