"""Three real storage nodes under load, killed and stopped at random moments: nothing acknowledged is ever missing.

Each round draws what happens from its seed, which is printed. ``CUTWATER_KILL_SEED`` repeats those draws; the moments
of the machine itself do not repeat. ``CUTWATER_KILL_ROUNDS`` makes it more than the few rounds of the suite.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from random import Random

import pytest
from msgspec import Struct, field

from cutwater.core.requests import AddNodeRequest
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded
from cutwater.protocol import storage_api as api
from cutwater.protocol.errors import ConnectionLost, InternalError
from cutwater.types import ReplicaState, StorageNodeId
from cutwater.wire.connection import Connection
from tests.integration.node_cluster import CLUSTER, STREAM, Client, batch, body_of
from tests.integration.order_double import OrderDouble
from tests.integration.sn_process import NodeProcess
from tests.soak import rounds

NODES = (1, 2, 3)
WRITERS = 3
ROUNDS = int(os.environ.get("CUTWATER_KILL_ROUNDS", rounds(5, 100)))
SEED = int(os.environ.get("CUTWATER_KILL_SEED", secrets.randbelow(1 << 32)))


class Outcomes(Struct):
    """What the writers were told of each body."""

    acknowledged: dict[bytes, int] = field(default_factory=dict)
    """Body → GLSN of its first record."""
    failed: set[bytes] = field(default_factory=set)
    """Will never appear."""
    unknown: set[bytes] = field(default_factory=set)


class Rig(Client):
    def __init__(self, directory: Path, rng: Random) -> None:
        super().__init__(OrderDouble(CLUSTER))
        self.directory, self.rng = directory, rng
        self.outcomes = Outcomes()
        self.nodes: dict[int, NodeProcess] = {}
        self._appended = 0

    async def set_up(self) -> None:
        metadata = await self.order.start()
        for number in NODES:
            volume = self.directory / f"volume{number}"
            volume.mkdir()
            await self.order.ask(AddNodeRequest(StorageNodeId(number)))
            flags = ("--reserve-mib", "0", "--log-level", "info")
            self.nodes[number] = NodeProcess(number, [volume], metadata, self.directory / f"log{number}", *flags)
        await self.start(NODES)
        await self.create_topic(len(NODES))

    async def tear_down(self) -> None:
        for node in self.nodes.values():
            node.kill()
        await self.order.stop()

    async def start(self, numbers: tuple[int, ...]) -> None:
        await asyncio.gather(*(asyncio.to_thread(self.nodes[number].start) for number in numbers))
        for number in numbers:
            self.ports[number] = self.nodes[number].port

    # Load.

    async def write(self, stop: asyncio.Event) -> None:
        """One writer: a batch at a time, to whoever leads the chain, over a connection that it keeps."""
        rng = Random(self.rng.random())
        kept: dict[int, Connection] = {}
        try:
            while not stop.is_set():
                stream = self.order.state.streams[STREAM]
                if not stream.members:
                    await asyncio.sleep(0.01)
                    continue
                self._appended += 1
                body = (b"record %d " % self._appended).ljust(rng.choice((20, 200, 20_000)), b".")
                await self._append_once(kept, stream.members[0], stream.epoch, body, rng.randint(1, 3))
        finally:
            for connection in kept.values():
                connection.abort()

    async def _append_once(self, kept: dict[int, Connection], head: int, epoch: int, body: bytes, count: int) -> None:
        try:
            if head not in kept or kept[head].closed.done():
                kept[head] = await self.connect(head)
            whole = body_of(body, count, self._appended)
            arguments = api.AppendArguments(STREAM, epoch, batch(whole, count, self._appended))  # type: ignore[arg-type]
            received = await kept[head].call(api.APPEND, arguments, whole, timeout_ms=2_000)
        except CutwaterError as error:
            is_unknown = isinstance(error, AppendUnknown | InternalError | DeadlineExceeded)
            is_unknown = is_unknown or (isinstance(error, ConnectionLost) and error.outcome_unknown)
            (self.outcomes.unknown if is_unknown else self.outcomes.failed).add(body)
            await asyncio.sleep(0.01)
        else:
            self.outcomes.acknowledged[body] = received.value.ack.glsn

    # Misfortune.

    async def misfortune(self) -> str:
        rng = self.rng
        victims = tuple(rng.sample(NODES, rng.choice((1, 1, 2, 3))))
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        if rng.random() < 0.3:
            seconds = rng.choice((0.2, 1.0, 2.5))
            for number in victims:
                self.nodes[number].signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            for number in victims:
                self.nodes[number].signal(signal.SIGCONT)
            return f"{victims} were stopped for {seconds} s"
        for number in victims:
            self.nodes[number].kill()
        torn = [number for number in victims if rng.random() < 0.5 and self.tear(number)]
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        if rng.random() < 0.3:
            # Killed once more, in the middle of the start.
            self.nodes[victims[0]].begin()
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            self.nodes[victims[0]].kill()
        await self.start(victims)
        return f"{victims} were killed, with a torn tail on {torn}"

    def tear(self, number: int) -> bool:
        """Leave half a frame at the end of the last segment, as a machine that died while writing would."""
        segments = sorted((self.directory / f"volume{number}").glob("cid=1/snid=*/lsid=1/*.entries"))
        if not segments:
            return False
        data = segments[-1].read_bytes()
        start = data.rfind(b"CWFR")
        if start < 0:
            return False
        frame = data[start : start + 60]
        with segments[-1].open("ab") as file:
            file.write(frame + self.rng.randbytes(self.rng.randrange(200)))
        return True

    # What must hold.

    async def check(self) -> None:
        outcomes = self.outcomes
        end = max((ack for ack in outcomes.acknowledged.values()), default=0)
        await self.until_all_run()
        await self.until(self._all_agree, "all replicas report the same committed end")
        found = {number: await self.read_all(number) for number in NODES}
        frames = {data for _, data in found.values()}
        assert len(frames) == 1, "replicas differ"
        records = found[1][0]
        glsns = [glsn for glsn, _ in records]
        assert glsns == sorted(set(glsns))
        assert end <= max(glsns, default=0)
        bodies = [body for _, body in records]
        assert len(bodies) == len(set(bodies)), "something is there twice"
        place = {body: glsn for glsn, body in records}
        assert {body: place.get(body) for body in outcomes.acknowledged} == outcomes.acknowledged
        assert not outcomes.failed & set(bodies), "a definite failure appeared"
        assert set(bodies) <= set(outcomes.acknowledged) | outcomes.unknown
        for number in NODES:
            assert await self.verify(number) == ()

    def _all_agree(self) -> bool:
        ends = {
            (ur.committed_end, ur.durable_end)
            for report in self.order.reports.values()
            for ur in report.uncommit_reports
        }
        return len(ends) == 1 and next(iter(ends))[0] == self.order.state.streams[STREAM].committed_end

    def check_starts(self) -> None:
        """Every start begins in SEALING, as its first report says."""
        for (number, incarnation), report in self.order.first_reports.items():
            states = {ur.state for ur in report.uncommit_reports}
            assert states <= {ReplicaState.SEALING}, (number, incarnation, report)


@pytest.mark.timeout(120 + 30 * ROUNDS)
def test_nothing_acknowledged_is_missing_after_kills_and_stops(tmp_path: Path) -> None:
    print(f"replay: CUTWATER_KILL_SEED={SEED} CUTWATER_KILL_ROUNDS={ROUNDS} pytest tests/integration/test_sn_kill.py")

    async def test() -> None:
        rig = Rig(tmp_path, Random(SEED))
        try:
            await rig.set_up()
            for number in range(ROUNDS):
                await run_round(rig, number)
            rig.check_starts()
            assert rig.order.alarms == []
            assert rig.outcomes.acknowledged
        finally:
            await rig.tear_down()

    async def run_round(rig: Rig, number: int) -> None:
        stop = asyncio.Event()
        writers = [asyncio.create_task(rig.write(stop)) for _ in range(WRITERS)]
        try:
            what = await rig.misfortune()
            # The stream takes appends again.
            before = len(rig.outcomes.acknowledged)
            await rig.until(lambda: len(rig.outcomes.acknowledged) > before + 20, f"appends go on after {what}")
        finally:
            stop.set()
            await asyncio.gather(*writers)
        counts = [len(kind) for kind in (rig.outcomes.acknowledged, rig.outcomes.failed, rig.outcomes.unknown)]
        print(f"round {number}: {what}; acknowledged, failed, unknown: {counts}")
        await rig.check()

    asyncio.run(test())
