"""The shipped SQLite store under virtual time: its worker, deadlines and disk are those of a simulated process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from cutwater.errors import DeadlineExceeded, Unavailable
from cutwater.format.errors import DiskFull
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.fault_files import FaultFiles
from cutwater.testing.virtual.loop import VirtualLoop
from cutwater.testing.virtual.processes import SimProcess
from cutwater.testing.virtual.system import run_simulated
from cutwater.testing.virtual.trace import Trace
from cutwater.types import LeaderEpoch
from tests.integration.stores.conftest import CLUSTER, DATABASE
from tests.integration.stores.store_kit import HERE, ONE, START, Begun, History

E0, E1 = LeaderEpoch(0), LeaderEpoch(1)

Work = Callable[[VirtualLoop, FaultFiles, Any], Coroutine[Any, Any, None]]


def run(work: Work, *, lives: int = 1) -> None:
    """Run the work in as many processes, one after the other, on one disk. The power goes at the end of each."""

    def simulate(loop: VirtualLoop) -> None:
        files = FaultFiles(Random(1), clock=lambda: loop.now)
        files.make_dir(DATABASE.parent)
        for number in range(lives):
            _live(loop, files, work, number)
        assert not loop.complaints

    run_simulated(simulate, Random(1), Trace())


def _live(loop: VirtualLoop, files: FaultFiles, work: Work, number: int) -> None:
    sqlite_disk = pytest.importorskip("cutwater.testing.stores.sqlite_disk")
    process = SimProcess(f"mr.{number}", "127.0.0.1", Random(number), started=loop.now)
    process.disk = files

    def charge(seconds: float) -> None:
        files.charged_seconds += seconds

    engine = sqlite_disk.DiskSqlite(files, Random(number), charge)

    async def live() -> None:
        await loop.spawn(process, work(loop, files, engine))

    loop.run_until_complete(live())
    process.kill()
    engine.kill()
    files.crash(Random(number))


@pytest.mark.parametrize("may_wait", [False, True])
def test_a_slow_sync_takes_virtual_time(may_wait: bool) -> None:
    async def work(loop: VirtualLoop, files: FaultFiles, engine: Any) -> None:
        store, history = await SqliteStore.open(DATABASE, CLUSTER, engine=engine, may_wait=may_wait), History()
        await store.acquire(ONE, HERE, E0)
        files.faults.add(DiskFaultRule(DiskFault.SLOW_SYNC, 1.0, seconds=(1.0, 1.0)))
        begun = loop.now
        await store.append(E1, START, history.next())
        assert 1.0 <= loop.now - begun < 1.1
        append = Begun(store, E1, history.state.index, history.next())
        await append.finish()
        assert loop.now - begun >= 2.0
        files.faults.clear()
        assert (await store.load()).decisions == tuple(history.made)
        await store.close()

    run(work)


def test_a_hung_disk_ends_calls_at_their_deadline() -> None:
    async def work(loop: VirtualLoop, files: FaultFiles, engine: Any) -> None:
        store, history = await SqliteStore.open(DATABASE, CLUSTER, engine=engine), History()
        await store.acquire(ONE, HERE, E0)
        files.faults.add(DiskFaultRule(DiskFault.HUNG_SYNC, 1.0, seconds=(100.0, 100.0)))
        begun, decisions = loop.now, history.next()
        with pytest.raises(DeadlineExceeded):
            await store.append(E1, START, decisions)
        assert 5.0 <= loop.now - begun < 5.1
        files.faults.clear()
        # The outcome was unknown; the same append settles it when the disk answers.
        await store.append(E1, START, decisions, timeout_ms=200_000)
        assert loop.now - begun >= 100.0
        assert (await store.load()).decisions == decisions
        await store.close()

    run(work)


def test_a_lock_of_another_program_is_waited_for() -> None:
    async def work(loop: VirtualLoop, files: FaultFiles, engine: Any) -> None:
        store, history = await SqliteStore.open(DATABASE, CLUSTER, engine=engine), History()
        await store.acquire(ONE, HERE, E0)
        begun = loop.now
        engine.hold(1.5)
        await store.append(E1, START, history.next())
        assert 1.5 <= loop.now - begun < 1.6
        engine.hold(60.0)
        with pytest.raises(Unavailable, match="another program holds a lock"):
            await store.append(E1, history.state.index, history.next())
        engine.hold(0.0)
        await store.append(E1, START, tuple(history.made[:1]))
        await store.close()

    run(work)


def test_what_was_confirmed_outlives_power_cuts() -> None:
    histories = [History()]

    async def work(loop: VirtualLoop, files: FaultFiles, engine: Any) -> None:
        store, history = await SqliteStore.open(DATABASE, CLUSTER, engine=engine), histories[0]
        loaded = await store.load()
        assert loaded.decisions == tuple(history.made)
        epoch = await store.acquire(ONE, HERE, loaded.leader.epoch)
        for _ in range(20):
            await store.append(epoch, history.state.index, history.next())

    run(work, lives=4)
    assert len(histories[0].made) == 80


def test_a_disk_that_is_full_at_the_start_is_called_full() -> None:
    async def work(loop: VirtualLoop, files: FaultFiles, engine: Any) -> None:
        log = DATABASE.with_name(DATABASE.name + "-wal")
        if files.exists(log):
            files.faults.add(DiskFaultRule(DiskFault.FULL, 1.0, str(log)))
            with pytest.raises(DiskFull, match="make room"):
                await SqliteStore.open(DATABASE, CLUSTER, engine=engine)
            files.faults.clear()
        store = await SqliteStore.open(DATABASE, CLUSTER, engine=engine)
        await store.acquire(ONE, HERE, (await store.leader()).epoch)
        assert files.exists(log)

    run(work, lives=2)
