"""Random work on a network that splits, delays, stalls, breaks and falls silent.

Whatever happens, every call ends in time and only once, answers belong to their questions, streams and notices are
exact up to where they end, nobody holds more than they may, and afterwards nothing is left.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.runtime.event_loop import new_event_loop
from cutwater.types import ClusterId
from cutwater.wire.calls.handlers import LATER, Later, Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call, Notification
from cutwater.wire.calls.streams import SharedCredit, StreamSender
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.options import WireOptions
from cutwater.wire.states import ConnectionState
from tests.memory_network import Faults, MemoryLink, MemoryNetwork

ECHO = Method[int, int]("echo", int, int)
SLEEP = Method[int, int]("sleep", int, int)
LATE = Method[int, int]("late", int, int)
ITEMS = StreamMethod[tuple[int, int], int]("items", tuple[int, int], int)
NUMBER = Notice[int]("number", int)

OPTIONS = WireOptions(
    frame_bytes_max=100_000,
    header_bytes_max=10_000,
    call_bytes_max=300_000,
    calls_max=40,
    send_high_bytes=30_000,
    send_low_bytes=5_000,
    send_bytes_max=2_000_000,
    ping_ms=80,
    linger_ms_max=30,
)
ROOM_ITEMS, ROOM_BYTES = 8, 20_000


class Side:
    """Answers what it is asked, and asks the other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.methods = methods = Methods()
        self.numbers: list[int] = []
        self.told = 0
        self.running = 0
        methods.answers(ECHO)(lambda call: ReplyWithBody(call.argument, call.body))
        methods.answers(SLEEP)(self.sleep)
        methods.answers(LATE)(self.late)
        methods.streams_to(ITEMS)(self.items)
        methods.hears(NUMBER)(self.number)

    async def sleep(self, call: Call[int]) -> int:
        self.running += 1
        try:
            await asyncio.sleep(call.argument / 1_000)
        finally:
            self.running -= 1
        return call.argument

    def late(self, call: Call[int]) -> Later:
        self.running += 1

        def answer() -> None:
            self.running -= 1
            call.answer(call.argument)

        asyncio.get_running_loop().call_later(0.005, answer)
        return LATER

    async def items(self, call: Call[tuple[int, int]], out: StreamSender[int]) -> None:
        self.running += 1
        seed, count = call.argument
        sizes = random.Random(seed)
        try:
            for i in range(count):
                await out.send(i, bytes(sizes.randrange(6_000)), backlog_items=count - i - 1)
        finally:
            self.running -= 1

    def number(self, notification: Notification[int]) -> None:
        self.numbers.append(notification.argument)

    # What it asks.

    async def act(self, connection: Connection) -> None:
        for _ in range(self.rng.randrange(4, 10)):
            what = self.rng.choice([self.ask_echo, self.ask_sleep, self.ask_late, self.ask_items, self.tell])
            try:
                await what(connection)
            except ConnectionLost:
                return
            except Unavailable:
                pass

    async def ask_echo(self, connection: Connection) -> None:
        number = self.rng.randrange(10**6)
        body = self.rng.randbytes(self.rng.choice([0, 10, 1_000, 20_000, 60_000]))
        received = await connection.call(ECHO, number, body, timeout_ms=3_000)
        assert (received.value, bytes(received.body)) == (number, body)

    async def ask_sleep(self, connection: Connection) -> None:
        duration, timeout_ms = self.rng.randrange(20), self.rng.choice([1, 5, 20, 3_000])
        assert (await connection.call(SLEEP, duration, timeout_ms=timeout_ms)).value == duration

    async def ask_late(self, connection: Connection) -> None:
        task = asyncio.create_task(connection.call(LATE, 5, timeout_ms=3_000))
        await asyncio.sleep(self.rng.random() * 0.01)
        if self.rng.random() < 0.5:
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, CutwaterError | asyncio.CancelledError) or outcome.value == 5  # type: ignore[union-attr]
        if isinstance(outcome, ConnectionLost):
            raise outcome

    async def ask_items(self, connection: Connection) -> None:
        count, seed, enough = self.rng.randrange(30), self.rng.randrange(100), self.rng.randrange(1, 60)
        sizes, room = random.Random(seed), SharedCredit(ROOM_ITEMS, ROOM_BYTES)
        taken = 0
        async with connection.open_stream(ITEMS, (seed, count), credit=room) as stream:
            while (item := await stream.receive(timeout_ms=3_000)) is not None:
                assert (item.value, len(item.body)) == (taken, sizes.randrange(6_000))
                assert stream.queued[0] <= ROOM_ITEMS
                assert stream.queued[1] <= ROOM_BYTES
                taken += 1
                if taken == enough:
                    break
                if self.rng.random() < 0.2:
                    await asyncio.sleep(0.002)
        assert taken == min(count, enough)
        assert (room.pool.free_items, room.pool.free_bytes) == (ROOM_ITEMS, ROOM_BYTES)

    async def tell(self, connection: Connection) -> None:
        for _ in range(self.rng.randrange(20)):
            connection.notify(NUMBER, self.told)
            self.told += 1


async def trouble(rng: random.Random, link: MemoryLink) -> None:
    """What happens to the network meanwhile."""
    for _ in range(rng.randrange(5)):
        await asyncio.sleep(rng.random() * 0.03)
        link.stall()
        await asyncio.sleep(rng.random() * 0.02)
        link.go_on()
    fate = rng.random()
    if fate < 0.3:
        link.cut()
    elif fate < 0.5:
        link.go_silent()


async def run(seed: int, faults: Faults) -> None:
    rng = random.Random(seed)
    ours, theirs = Side(random.Random(seed + 1)), Side(random.Random(seed + 2))
    network, accepted = MemoryNetwork(), []
    server = Endpoint(ClusterId(1), "server", "s", theirs.methods, OPTIONS)
    listener = network.listen(server, "there", on_open=accepted.append)
    client = Endpoint(ClusterId(1), "client", "c", ours.methods, OPTIONS)
    connection = await network.connect(client, "there", timeout_ms=5_000, faults=faults)
    both = [(ours, connection), (theirs, accepted[0])]
    work = [asyncio.create_task(side.act(end)) for side, end in both for _ in range(5)]
    nemesis = asyncio.create_task(trouble(rng, network.links[0]))
    while not all(task.done() for task in work):
        for _, end in both:
            snapshot = end.snapshot()
            assert snapshot.served <= OPTIONS.calls_max
            assert snapshot.served_bytes <= OPTIONS.call_bytes_max
            assert snapshot.receive_bytes <= OPTIONS.frame_bytes_max + 2 * 65_536
            assert snapshot.send_bytes <= OPTIONS.send_bytes_max
        await asyncio.sleep(0.001)
    for task in work:
        task.result()
    await nemesis
    await asyncio.sleep(0.01)
    is_whole = connection.state is ConnectionState.OPEN and accepted[0].state is ConnectionState.OPEN
    if is_whole and not network.links[0].is_silent:
        # A last call on each side comes after all notices.
        for _, end in both:
            await end.call(SLEEP, 0, timeout_ms=3_000)
        assert theirs.numbers == list(range(ours.told))
        assert ours.numbers == list(range(theirs.told))
    await connection.close(timeout_ms=1_000)
    await listener.close(timeout_ms=1_000)
    await check_nothing_is_left(both, listener)
    for side, other in ((ours, theirs), (theirs, ours)):
        assert side.numbers == list(range(len(side.numbers)))
        assert len(side.numbers) <= other.told


async def bounded(seed: int, faults: Faults) -> None:
    async with asyncio.timeout(30):
        await run(seed, faults)


async def check_nothing_is_left(both: list[tuple[Side, Connection]], listener: Any) -> None:
    async with asyncio.timeout(3):
        while any(side.running for side, _ in both) or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.002)
    for _, end in both:
        snapshot = end.snapshot()
        assert snapshot.state is ConnectionState.CLOSED
        assert (snapshot.calls, snapshot.call_bytes, snapshot.served, snapshot.served_bytes) == (0, 0, 0, 0)
        assert snapshot.send_bytes == 0
    assert listener.gate.snapshot().bytes == 0


@given(
    seed=st.integers(0, 10**9),
    chunk=st.sampled_from([0, 25, 300, 5_000, 70_000]),
    delay=st.sampled_from([0, 0, 1]),
    capacity=st.sampled_from([1_000, 20_000, 256 * 1024]),
    late=st.booleans(),
)
@settings(max_examples=25)
def test_whatever_happens_everything_ends_as_it_should(
    seed: int, chunk: int, delay: int, capacity: int, late: bool
) -> None:
    # Pieces that are both small and late would take for ever.
    delay = delay if chunk == 0 else 0
    faults = Faults(seed=seed, chunk_bytes_max=chunk, delay_ms_max=delay, capacity_bytes=capacity, pauses_late=late)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(bounded(seed, faults))


def one_of_each() -> Methods:
    return Side(random.Random(0)).methods


async def test_a_half_open_connection_is_found_by_both_sides(memory: Any) -> None:
    options = WireOptions(ping_ms=40)
    listener = await memory.listen(one_of_each(), options=options)
    connection = await memory.connect(listener, options=options)
    held = asyncio.create_task(connection.call(SLEEP, 60_000, timeout_ms=60_000))
    await asyncio.sleep(0.01)
    (served,) = listener.gate.connections
    memory.net.links[-1].go_silent()
    with pytest.raises(ConnectionLost, match="has not been heard of") as caught:
        await held
    assert caught.value.outcome_unknown
    await asyncio.wait_for(served.closed, 5)
    assert listener.gate.snapshot().connections == 0


async def test_a_stalled_network_goes_on_where_it_was(memory: Any) -> None:
    listener = await memory.listen(one_of_each())
    connection = await memory.connect(listener)
    link = memory.net.links[-1]
    link.stall()
    task = asyncio.create_task(connection.call(ECHO, 1, bytes(500_000), timeout_ms=5_000))
    await asyncio.sleep(0.05)
    assert not task.done()
    link.go_on()
    assert len((await task).body) == 500_000


async def test_a_connection_that_breaks_in_a_message(memory: Any) -> None:
    memory.faults = Faults(break_after_bytes=300_000)
    listener = await memory.listen(one_of_each())
    connection = await memory.connect(listener)
    with pytest.raises(ConnectionLost, match="was lost"):
        await connection.call(ECHO, 1, bytes(500_000), timeout_ms=5_000)
