"""Which connections a listener lets in, and which it drops, by address. Memory in place of sockets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest

from cutwater.errors import CutwaterError, InvalidArgument, ResourceExhausted
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime.event_loop import run
from cutwater.types import ClusterId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.listen.gate import IN_PROCESS, Gate, address_key
from cutwater.wire.options import ListenerOptions
from cutwater.wire.states import ConnectionState
from tests.memory_network import MemoryNetwork

SERVER = Endpoint(ClusterId(1), "metadata repository")
CLIENT = Endpoint(ClusterId(1), "client")
NODE = Endpoint(ClusterId(1), "storage node", "1")
TIMEOUT_MS = 5_000


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run_it() -> None:
        run(test())

    # Otherwise pytest would find a coroutine function behind it.
    del run_it.__wrapped__  # type: ignore[attr-defined]
    return run_it


class Silent(asyncio.BufferedProtocol):
    """Says nothing."""

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(4_096)


class House:
    def __init__(self, **limits: Any) -> None:
        self.network = MemoryNetwork()
        self.listener = self.network.listen(SERVER, "here", options=ListenerOptions(retry_ms=70, **limits))
        self.gate: Gate = self.listener.gate

    async def stranger(self, source: str) -> Connection:
        before = set(self.gate._waiting)
        await self.network.attach_raw("here", Silent(), source=source)
        (connection,) = set(self.gate._waiting) - before
        return connection

    async def connect(self, source: str, endpoint: Endpoint = CLIENT) -> Connection:
        return await self.network.connect(endpoint, "here", timeout_ms=TIMEOUT_MS, source=source)

    def dropped(self, *connections: Connection) -> list[bool]:
        return [connection.state in (ConnectionState.FAILED, ConnectionState.CLOSED) for connection in connections]


@on_a_loop
async def test_the_oldest_of_the_greediest_address_makes_room() -> None:
    house = House(handshakes_max=5)
    lone = await house.stranger("10.0.0.1")
    greedy = [await house.stranger("10.0.0.2") for _ in range(4)]
    other = await house.stranger("10.0.0.3")
    assert house.dropped(lone, *greedy, other) == [False, True, False, False, False, False]
    assert isinstance(greedy[0].error, ResourceExhausted)
    assert greedy[0].error.retry_ms == 70
    assert (await house.connect("10.0.0.4")).state is ConnectionState.OPEN
    assert house.dropped(lone, *greedy, other) == [False, True, True, False, False, False]
    await house.listener.close()


@on_a_loop
async def test_an_address_drops_its_own_connections_first() -> None:
    house = House(handshakes_per_address_max=2)
    others = [await house.stranger(f"10.0.1.{number}") for number in range(20)]
    mine = [await house.stranger("10.0.0.1") for _ in range(4)]
    assert house.dropped(*mine) == [True, True, False, False]
    assert not any(house.dropped(*others))
    assert (await house.connect("10.0.0.1")).state is ConnectionState.OPEN, "its honest client gets in"
    await house.listener.close()


@on_a_loop
async def test_a_connection_that_was_refused_and_lingers_makes_room_before_older_ones() -> None:
    house = House(handshakes_per_address_max=3)
    first, refused, third = [await house.stranger("10.0.0.1") for _ in range(3)]
    refused.fail(Unauthenticated("who is that?"))
    assert refused in house.gate._waiting, "until its peer has read why, or its time is up"
    last = await house.stranger("10.0.0.1")
    assert house.dropped(first, third, last) == [False] * 3
    assert refused not in house.gate._waiting
    await house.listener.close()


@on_a_loop
async def test_a_host_with_many_clients_gets_in_and_leaves_room_for_others() -> None:
    house = House(connections_max=10, connections_per_address_max=3, other_connections_reserved=2)
    for _ in range(8):
        await house.connect("10.0.0.1")
    with pytest.raises(
        ResourceExhausted, match=r"8 connections from 10\.0\.0\.1 already, and keeps the last 2"
    ) as caught:
        await house.connect("10.0.0.1")
    assert caught.value.retry_ms == 70
    for _ in range(2):
        await house.connect("10.0.0.2")
    with pytest.raises(ResourceExhausted, match="has 10 connections already"):
        await house.connect("10.0.0.3")
    assert house.gate.snapshot().refused_total == 2
    await house.listener.close()


@on_a_loop
async def test_servers_find_room_when_clients_do_not() -> None:
    house = House(connections_max=2, server_connections_reserved=2)
    house.gate._is_server = lambda peer: peer.role == NODE.role
    clients = [await house.connect("10.0.0.1") for _ in range(2)]
    servers = [await house.connect("10.0.0.1", NODE) for _ in range(2)]
    with pytest.raises(ResourceExhausted, match="2 connections already, and 2 from servers"):
        await house.connect("10.0.0.1", NODE)
    await clients[0].close()
    servers.append(await house.connect("10.0.0.1", NODE))
    with pytest.raises(ResourceExhausted, match="has 2 connections already"):
        await house.connect("10.0.0.1")
    for connection in (*servers, clients[1]):
        await connection.close()
    assert (house.gate._clients, house.gate._servers, dict(house.gate._clients_from)) == (0, 0, {})
    await house.listener.close()


@on_a_loop
async def test_a_client_that_only_says_it_is_a_server_gets_no_room_of_servers() -> None:
    house = House(connections_max=1, server_connections_reserved=5)
    client = await house.connect("10.0.0.1")
    with pytest.raises(ResourceExhausted, match="keeps the rest for servers of the cluster"):
        await house.connect("10.0.0.2", NODE)
    async with asyncio.timeout(5):
        while house.gate.snapshot().connections > 1:
            await asyncio.sleep(0.01)
    assert client.state is ConnectionState.OPEN
    await house.listener.close()


@on_a_loop
async def test_a_client_that_only_says_it_is_a_server_leaves_room_for_other_addresses() -> None:
    house = House(connections_max=6, connections_per_address_max=2, other_connections_reserved=2)
    house.gate._is_server = lambda peer: False
    for _ in range(4):
        await house.connect("10.0.0.1", NODE)
    with suppress(CutwaterError):
        connection = await house.connect("10.0.0.1", NODE)
        await asyncio.wait_for(connection.closed, 5)
    for _ in range(2):
        assert (await house.connect("10.0.0.2")).state is ConnectionState.OPEN
    await house.listener.close()


@on_a_loop
async def test_connections_of_this_process_are_never_dropped() -> None:
    house = House(handshakes_max=2, handshakes_per_address_max=1)
    mine = [await house.stranger(IN_PROCESS) for _ in range(5)]
    for number in range(5):
        await house.stranger(f"10.0.0.{number}")
    assert not any(house.dropped(*mine))
    await house.listener.close()


@on_a_loop
async def test_only_connections_of_this_process_need_no_credential() -> None:
    def refuse(credentials: object) -> Any:
        raise Unauthenticated("no")

    network = MemoryNetwork()
    listener = network.listen(SERVER, "here", authenticate=refuse)
    listener.gate._trusts_process = True
    connection = await network.connect(CLIENT, "here", timeout_ms=TIMEOUT_MS, source=IN_PROCESS)
    assert connection.state is ConnectionState.OPEN
    with pytest.raises(Unauthenticated):
        await network.connect(CLIENT, "here", timeout_ms=TIMEOUT_MS, source="127.0.0.1")
    await listener.close()


@on_a_loop
async def test_a_waiting_connection_gives_its_descriptor_back() -> None:
    house = House()
    first, second = await house.stranger("10.0.0.1"), await house.stranger("10.0.0.1")
    house.gate.relieve()
    await asyncio.sleep(0)
    assert house.dropped(first, second) == [True, False]
    house.gate.relieve()
    house.gate.relieve()
    await house.listener.close()


def test_what_counts_as_one_address() -> None:
    assert address_key("10.0.0.1") == "10.0.0.1"
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:1") != address_key("2001:db8:0:1::1")
    assert address_key("::ffff:10.0.0.1") == "10.0.0.1"
    assert address_key("fe80::1%eth0") == address_key("fe80::2")
    assert address_key("not an address") == "not an address"


@pytest.mark.parametrize("name", ListenerOptions.__struct_fields__)
def test_limits_are_checked(name: str) -> None:
    least = 0 if name.endswith("_reserved") else 1
    ListenerOptions(**{name: least})
    with pytest.raises(InvalidArgument, match=f"{name} must be at least {least}, not {least - 1}"):
        ListenerOptions(**{name: least - 1})


def test_a_server_may_use_all_descriptors_that_the_system_allows() -> None:
    """In a process of its own, which begins with a low soft limit."""
    script = (
        "import resource; from cutwater.runtime.event_loop import allow_descriptors\n"
        "hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); allow_descriptors()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, env=dict(os.environ))


def test_refusals_are_errors_that_may_be_tried_again() -> None:
    error: CutwaterError = ResourceExhausted("x", retry_ms=5)
    assert error.retriable
