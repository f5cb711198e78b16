"""Who is let in, and what those hear who are not: each failure has an error of its own, and none hangs."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from typing import Any

import pytest
from msgspec import Raw, msgpack
from wire_kit import OF_BYTES

from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from cutwater.protocol.errors import (
    ConnectionLost,
    MalformedFrame,
    Unauthenticated,
    Untrusted,
    WrongCluster,
    WrongVersion,
)
from cutwater.protocol.methods import Method
from cutwater.types import ClusterId
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.codec import encode_frame
from cutwater.wire.connection import Connection
from cutwater.wire.identity.auth import CertificateOrToken, Credentials, PeerIdentity, TokenAuthenticator
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint, judge_hello, judge_welcome
from cutwater.wire.listen import server as wire_server
from cutwater.wire.messages import FrameKind, Hello, PeerLimits
from cutwater.wire.options import ListenerOptions, WireOptions
from cutwater.wire.states import ConnectionState

WHO = Method[None, str]("who", None, str)
QUICK = WireOptions(handshake_ms_max=100, linger_ms_max=50)
CURT = WireOptions(linger_ms_max=50)
LIMITS = PeerLimits(1_000, 1_000, 10, 10_000)

methods = Methods()
methods.answers(WHO)(lambda call: call.connection.peer.identity.name if call.connection.peer else "nobody")


def hello(*, limits: PeerLimits = LIMITS, **changes: Any) -> bytes:
    fields = {"magic": "cutwater", "low": 1, "high": 1, "cluster": 1, "role": "raw", "name": "r", "token": ""} | changes
    return encode_frame(FrameKind.HELLO, 0, msgpack.encode((*fields.values(), limits)))


async def test_another_cluster_is_refused(network: Any) -> None:
    listener = await network.listen(cluster=7)
    with pytest.raises(WrongCluster, match="this is cluster 7, not 8") as caught:
        await network.connect(listener, cluster=8)
    assert (caught.value.expected, caught.value.actual) == (8, 7)


async def test_a_client_that_knows_no_cluster_learns_it(network: Any) -> None:
    listener = await network.listen(cluster=7)
    connection = await network.connect(listener, cluster=ANY_CLUSTER)
    assert connection.peer is not None
    assert connection.peer.cluster == 7


async def test_a_token_is_asked_for(network: Any) -> None:
    tokens = TokenAuthenticator({"open sesame": PeerIdentity("ali"), "other": PeerIdentity("baba")})
    listener = await network.listen(methods, authenticate=tokens)
    with pytest.raises(Unauthenticated, match="a token is needed"):
        await network.connect(listener)
    with pytest.raises(Unauthenticated, match="not known"):
        await network.connect(listener, token="open barley")
    connection = await network.connect(listener, token="open sesame")
    assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "ali"


async def test_an_authenticator_sees_what_the_peer_shows(network: Any) -> None:
    def judge(credentials: Credentials) -> PeerIdentity:
        if credentials.token != "yes":
            raise Unauthenticated("thought about it: no")
        return PeerIdentity(f"{credentials.role} {credentials.name}")

    listener = await network.listen(methods, authenticate=judge)
    with pytest.raises(Unauthenticated, match="thought about it"):
        await network.connect(listener, token="no")
    connection = await network.connect(listener, token="yes")
    assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "client c1"


async def test_an_authenticator_that_breaks_lets_no_peer_in(network: Any, caplog: pytest.LogCaptureFixture) -> None:
    def judge(credentials: Credentials) -> PeerIdentity:
        raise KeyError("a secret")

    listener = await network.listen(methods, authenticate=judge)
    with caplog.at_level(logging.CRITICAL, "cutwater.wire"), pytest.raises(CutwaterError) as caught:
        await network.connect(listener)
    assert "secret" not in str(caught.value)


async def test_no_common_version(network: Any) -> None:
    listener = await network.listen(options=CURT)
    raw = await network.raw(listener)
    raw.send(hello(low=3, high=9))
    error = await raw.farewell()
    assert type(error) is WrongVersion
    assert "upgrade the older side" in str(error)


async def test_a_greeting_of_an_unknown_shape_still_finds_out_about_versions(network: Any) -> None:
    listener = await network.listen(options=CURT)
    raw = await network.raw(listener)
    raw.send(encode_frame(FrameKind.HELLO, 0, msgpack.encode(("cutwater", 3, 9, {"all": "new"}))))
    assert type(await raw.farewell()) is WrongVersion


async def test_a_newer_peer_that_speaks_ours_too_is_welcome(network: Any) -> None:
    listener = await network.listen(options=CURT)
    raw = await network.raw(listener)
    raw.send(hello(high=9))
    await raw.until(lambda frames: frames)
    assert [frame.kind for frame in raw.frames] == [FrameKind.WELCOME]
    assert msgpack.decode(raw.frames[0].header)[:3] == ["cutwater", 2, 2]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "no frame|exceeds the limit", id="a web browser"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), "no frame|exceeds", id="TLS"),
    ],
)
@pytest.mark.parametrize("network", OF_BYTES, indirect=True)
async def test_who_speaks_something_else_hears_what_is_wrong(network: Any, data: bytes, error: str) -> None:
    await check_hears(network, data, error)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        pytest.param(hello(cluster=9), "this is cluster 1, not 9", id="another cluster"),
        pytest.param(hello(magic="kafka"), "does not speak the protocol", id="another magic"),
        pytest.param(encode_frame(FrameKind.HELLO, 0, msgpack.encode(["cutwater"])), "does not greet", id="too short"),
        pytest.param(encode_frame(FrameKind.REQUEST, 1, msgpack.encode(("who", 1, None))), "no place", id="a request"),
        pytest.param(encode_frame(FrameKind.WELCOME, 0, msgpack.encode(1)), "no place", id="a welcome"),
        pytest.param(encode_frame(FrameKind.PING, 0, b""), "no place", id="a ping"),
        pytest.param(hello(token="x" * 20_000), "exceeds the limit of 16384", id="a huge token"),
        pytest.param(hello(name="x" * 300), "longer than any can be", id="a huge name"),
        pytest.param(hello() + hello(), "no place", id="twice"),
        pytest.param(hello(limits=PeerLimits(0, 0, 0, 0)), "at least 512 are needed", id="takes nothing"),
        pytest.param(hello(limits=PeerLimits(600, 700, 1, 1)), "a frame contains its header", id="contradicts itself"),
    ],
)
async def test_strangers_hear_what_is_wrong(network: Any, data: bytes, error: str) -> None:
    await check_hears(network, data, error)


async def check_hears(network: Any, data: bytes, error: str) -> None:
    listener = await network.listen(options=CURT)
    friend = await network.connect(listener)
    raw = await network.raw(listener)
    raw.send(data)
    reason = await raw.farewell()
    assert isinstance(reason, CutwaterError)
    assert re.search(error, str(reason)) is not None
    assert friend.state is ConnectionState.OPEN


async def test_who_says_nothing_is_sent_away(network: Any) -> None:
    listener = await network.listen(options=QUICK)
    raw = await network.raw(listener)
    assert type(await raw.farewell()) is DeadlineExceeded
    async with asyncio.timeout(5):
        # Its own side may be gone a little earlier.
        while listener.gate.snapshot().handshakes:
            await asyncio.sleep(0.002)


async def test_who_greets_byte_by_byte_is_sent_away(network: Any) -> None:
    listener = await network.listen(options=QUICK)
    raw = await network.raw(listener)
    for byte in hello()[:-1]:
        raw.send(bytes([byte]))
        await asyncio.sleep(0.01)
        if raw.gone.done() or raw.frames:
            break
    assert type(await raw.farewell()) is DeadlineExceeded


async def test_a_listener_that_says_nothing_is_not_waited_for(tcp: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for more, why in (({}, ": a process listens there, but does not greet"), ({"tls": _any_tls()}, "$")):
            told = f"127.0.0.1:{port} could not be connected to within 80 ms{why}"
            with pytest.raises(DeadlineExceeded, match=told):
                await connect(Endpoint(ClusterId(1), "client"), "127.0.0.1", port, timeout_ms=80, **more)


async def test_a_listener_that_is_something_else_is_noticed(tcp: Any) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP ready\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(CutwaterError, match=f"127.0.0.1:{port} is no Cutwater server"):
            await connect(Endpoint(ClusterId(1), "client"), "127.0.0.1", port, timeout_ms=2_000)


async def test_where_nobody_listens(tcp: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionLost, match="cannot be reached") as caught:
        await connect(Endpoint(ClusterId(1), "client"), "127.0.0.1", port, timeout_ms=2_000)
    assert not caught.value.outcome_unknown
    assert caught.value.retriable


async def test_where_nobody_listens_in_memory(memory: Any) -> None:
    listener = await memory.listen()
    await listener.close()
    with pytest.raises(ConnectionLost, match="it has no listener"):
        await memory.connect(listener)


async def test_a_full_listener_says_so(network: Any) -> None:
    listener = await network.listen(limits=ListenerOptions(connections_max=2, retry_ms=700))
    first = await network.connect(listener)
    await network.connect(listener)
    with pytest.raises(ResourceExhausted, match="has 2 connections already") as caught:
        await network.connect(listener)
    assert caught.value.retry_ms == 700
    await first.close()
    async with asyncio.timeout(5):
        while listener.gate.snapshot().connections > 1:
            await asyncio.sleep(0.005)
    await network.connect(listener)


# ------------------------------------------------------------------------------------------------------------- TLS


def _any_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def test_a_listener_of_another_authority_is_not_trusted(tls: Any, other_certificates: Any) -> None:
    listener = await tls.listen()
    with pytest.raises(Untrusted, match="certificate verify failed") as caught:
        await tls.connect(listener, tls=other_certificates.client())
    assert not caught.value.retriable


async def test_a_listener_of_another_name_is_not_trusted(tls: Any) -> None:
    listener = await tls.listen()
    with pytest.raises(Untrusted, match=r"[Hh]ostname mismatch"):
        await tls.connect(listener, server_hostname="node7.example.org")


async def test_mutual_tls_says_who_the_client_is(tls: Any, certificates: Any) -> None:
    listener = await tls.listen(methods, tls=certificates.server(mutual=True), authenticate=CertificateOrToken({}))
    connection = await tls.connect(listener, tls=certificates.client(mutual=True))
    assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "client-1"


async def test_mutual_tls_lets_nobody_in_without_a_certificate(
    tls: Any, certificates: Any, other_certificates: Any
) -> None:
    listener = await tls.listen(methods, tls=certificates.server(mutual=True))
    with pytest.raises((Untrusted, ConnectionLost), match="certificate"):
        await tls.connect(listener, tls=certificates.client())
    stranger = certificates.client()
    other_certificates._client.configure_cert(stranger)
    with pytest.raises((Untrusted, ConnectionLost), match="certificate"):
        await tls.connect(listener, tls=stranger)
    old = certificates.client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((Untrusted, ConnectionLost), match="certificate"):
        await tls.connect(listener, tls=old)
    assert listener.gate.snapshot().connections == 0


async def test_tls_without_a_client_certificate_is_no_identity(tls: Any) -> None:
    listener = await tls.listen(methods, authenticate=CertificateOrToken({}))
    with pytest.raises(Unauthenticated, match="client certificate"):
        await tls.connect(listener)


async def test_clear_text_to_a_tls_listener_ends(tls: Any) -> None:
    listener = await tls.listen(options=QUICK)
    with pytest.raises(CutwaterError):
        await connect(Endpoint(ClusterId(1), "client"), "127.0.0.1", listener.port, timeout_ms=3_000)


async def test_tls_to_a_clear_text_listener_ends(tcp: Any, certificates: Any) -> None:
    listener = await tcp.listen()
    with pytest.raises((Untrusted, ConnectionLost)):
        await tcp.connect(listener, tls=certificates.client())


async def test_who_does_not_finish_tls_is_sent_away(tls: Any) -> None:
    listener = await tls.listen(options=QUICK)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    async with asyncio.timeout(5):
        while listener.gate.snapshot().handshakes == 0:
            await asyncio.sleep(0.005)
        assert await reader.read() == b""
        while listener.gate.snapshot().handshakes:
            await asyncio.sleep(0.005)
    writer.close()


# ------------------------------------------------------------------------------------------ off this machine


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.5", "node1.example.org"])
async def test_listening_beyond_this_machine_needs_tls_and_authentication(
    tcp: Any, certificates: Any, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bind(*_: Any) -> Any:
        raise Unavailable("it would listen now")

    monkeypatch.setattr(wire_server, "_bind", bind)
    tokens = TokenAuthenticator({"t": PeerIdentity("x")})
    endpoint = Endpoint(ClusterId(1), "server")
    for refused in ({}, {"authenticate": tokens}, {"tls": certificates.server()}):
        with pytest.raises(InvalidArgument, match=r"would let anyone on the network in.*insecure"):
            await wire_server.listen(endpoint, host, 0, **refused)
    for allowed in (
        {"insecure": True},
        {"tls": certificates.server(), "authenticate": tokens},
        {"tls": certificates.server(mutual=True)},
    ):
        with pytest.raises(Unavailable, match="it would listen now"):
            await wire_server.listen(endpoint, host, 0, **allowed)


async def test_a_token_does_not_travel_in_the_clear(tcp: Any) -> None:
    with pytest.raises(InvalidArgument, match="in the clear"):
        await connect(Endpoint(ClusterId(1), "client"), "node1.example.org", 1, timeout_ms=100, token="secret")


async def test_a_token_that_nobody_would_take_does_not_leave(tcp: Any) -> None:
    listener = await tcp.listen()
    with pytest.raises(InvalidArgument, match="the token has 9000 characters: at most 8192"):
        await tcp.connect(listener, token="x" * 9_000)
    with pytest.raises(InvalidArgument, match="must not exceed the 16384 bytes"):
        await tcp.connect(listener, token="€" * 8_000)


async def test_addresses_that_make_no_sense(tcp: Any) -> None:
    endpoint = Endpoint(ClusterId(1), "client")
    for port in (-1, 65_536):
        with pytest.raises(InvalidArgument, match="a port is a number from 0 to 65535"):
            await wire_server.listen(endpoint, "127.0.0.1", port)
        with pytest.raises(InvalidArgument, match="a port is a number from 0 to 65535"):
            await connect(endpoint, "127.0.0.1", port, timeout_ms=1_000)
    # A name with an empty label has no address anywhere, which is known without asking anyone.
    with pytest.raises(InvalidArgument, match="has no address"):
        await wire_server.listen(endpoint, "no..name", 0, insecure=True)
    with pytest.raises(InvalidArgument, match="is no address"):
        await connect(endpoint, "no..name", 1, timeout_ms=1_000)


async def test_a_connection_that_was_given_up_while_it_was_made(tcp: Any) -> None:
    listener = await tcp.listen()
    connection = Connection(Endpoint(ClusterId(1), "client"), token="")
    connection.abort()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", listener.port)
    assert transport.is_closing()
    assert connection.state is ConnectionState.CLOSED
    async with asyncio.timeout(5):
        while listener.gate.snapshot().handshakes:
            await asyncio.sleep(0.005)


async def test_a_port_that_is_taken(tcp: Any) -> None:
    listener = await tcp.listen()
    with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{listener.port}"):
        await wire_server.listen(Endpoint(ClusterId(1), "server"), "127.0.0.1", listener.port)


async def test_localhost_is_all_its_addresses(tcp: Any) -> None:
    listener = await wire_server.listen(Endpoint(ClusterId(1), "server"), "localhost", 0)
    tcp.listeners.append(listener)
    tcp.connections.append(
        await connect(Endpoint(ClusterId(1), "client"), "localhost", listener.port, timeout_ms=2_000)
    )


# ----------------------------------------------------------------------------------------------------------- pure


def test_both_sides_check_the_cluster() -> None:
    ours = Endpoint(ClusterId(3), "client")
    welcome = ("cutwater", 1, 1, 4, "server", "s", LIMITS)
    with pytest.raises(WrongCluster):
        judge_welcome(ours, b"", Raw(msgpack.encode(welcome)), "there")
    peer, _ = judge_welcome(Endpoint(ANY_CLUSTER, "client"), b"", Raw(msgpack.encode(welcome)), "there")
    assert (peer.cluster, peer.version, peer.address) == (4, 1, "there")
    with pytest.raises(WrongVersion):
        judge_welcome(ours, b"", Raw(msgpack.encode(("cutwater", 3, 3, 3, "server", "s", LIMITS))), "there")
    with pytest.raises(MalformedFrame):
        judge_welcome(ours, b"", Raw(msgpack.encode("what")), "there")


def test_a_greeting_tells_what_this_side_takes() -> None:
    ours = Endpoint(ClusterId(3), "server", "s", Methods(), WireOptions(calls_max=7))
    theirs = Hello("cutwater", 1, 1, 3, "client", "c", "", LIMITS)
    _, welcome, peer = judge_hello(ours, Raw(msgpack.encode(theirs)), "there")
    assert (peer.role, peer.limits) == ("client", LIMITS)
    assert welcome.limits.calls_max == 7
    assert welcome.cluster == 3


def test_an_empty_token_would_let_everyone_in() -> None:
    with pytest.raises(ValueError, match="empty"):
        TokenAuthenticator({"": PeerIdentity("x")})
