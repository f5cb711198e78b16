"""Servers prove which ones they are: what a proof shows, and what is none."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw, msgpack, structs

from cutwater.errors import InvalidArgument, WrongIdentity
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unproven
from cutwater.protocol.methods import Method
from cutwater.testing.fault_proxy import FaultProxy
from cutwater.types import ClusterId
from cutwater.wire.addresses import parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import (
    Endpoint,
    encode_hello,
    encode_proof,
    judge_hello,
    judge_proof,
    judge_welcome,
)
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.identity.server_keys import ProvenServer, ServerKey, load_or_make
from cutwater.wire.listen.server import listen
from cutwater.wire.messages import ENCODE, MAGIC, FrameKind, Hello, PeerLimits, Welcome
from cutwater.wire.options import WireOptions
from tests.memory_network import MemoryNetwork

CLUSTER = ClusterId(1)
WHO = Method[None, str]("who", None, str)
LIMITS = PeerLimits(1_000, 1_000, 10, 10_000)
Expect = Callable[[ProvenServer | None], None]

A, B = ServerKey.generate(), ServerKey.generate()


def server(name: str, key: ServerKey | None, kind: str = STORAGE_NODE) -> Endpoint:
    methods = Methods()
    methods.answers(WHO)(lambda call: str(call.connection.peer.server) if call.connection.peer else "nobody")
    return Endpoint(CLUSTER, kind, name, methods, WireOptions(linger_ms_max=50), key)


def wants(key: ServerKey) -> Expect:
    def expect(found: ProvenServer | None) -> None:
        if found is None or found.key != key.public:
            raise Unproven("another server than the one that is wanted")

    return expect


async def opened(network: MemoryNetwork, endpoint: Endpoint, expect: Expect | None) -> Connection:
    return await network.connect(endpoint, "there", timeout_ms=2_000, expect=expect)


def test_both_sides_know_whom_they_talk_to_before_anything_is_asked() -> None:
    async def main() -> None:
        network, seen = MemoryNetwork(), []
        network.listen(server("1", A), "there", on_open=seen.append)
        connection = await opened(network, server("2", B), wants(A))
        assert connection.peer is not None
        assert connection.peer.server == ProvenServer(STORAGE_NODE, "1", A.public)
        assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "storage node 2"
        assert [one.peer.server for one in seen if one.peer] == [ProvenServer(STORAGE_NODE, "2", B.public)]

    asyncio.run(main())


def test_a_client_proves_nothing_and_needs_no_more_messages_than_ever() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.listen(server("1", A), "there")
        connection = await opened(network, Endpoint(CLUSTER, "client"), None)
        assert connection.peer is not None
        assert connection.peer.server is None
        assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "None"
        assert connection.snapshot().frames == 2  # WELCOME and the answer

    asyncio.run(main())


def test_a_role_that_is_only_claimed_is_no_proof() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        network.listen(server("1", A), "there")
        connection = await opened(network, server("2", None), None)
        assert (await connection.call(WHO, None, timeout_ms=1_000)).value == "None"

    asyncio.run(main())


def test_nothing_is_proved_to_a_server_that_is_not_the_one_wanted() -> None:
    """A stranger in between could otherwise pass the proof on to the server that it pretends to be."""

    async def main() -> None:
        network, seen = MemoryNetwork(), []
        network.listen(server("1", B), "there", on_open=seen.append)
        with pytest.raises(Unproven, match="another server"):
            await opened(network, server("2", A), wants(A))
        with pytest.raises(Unproven, match="another server"):
            await opened(network, Endpoint(CLUSTER, "client"), wants(A))
        assert [one.peer.server for one in seen if one.peer] == [None], "only the one that never claimed to be a server"

    asyncio.run(main())


def test_a_server_without_a_key_does_not_pass_for_one() -> None:
    """As one of an earlier version."""

    async def main() -> None:
        network = MemoryNetwork()
        network.listen(server("1", None), "there")
        with pytest.raises(Unproven):
            await opened(network, server("2", B), wants(A))

    asyncio.run(main())


def test_a_key_of_which_the_peer_has_only_the_public_half() -> None:
    """Whoever knows a public key can claim it, and not sign with it."""

    async def main() -> None:

        class Thief(ServerKey):
            __slots__ = ()

        thief = Thief(ServerKey.generate()._private)
        thief.public = B.public
        network, seen = MemoryNetwork(), []
        network.listen(server("1", A), "there", on_open=seen.append)
        connection = await opened(network, server("2", thief), wants(A))
        async with asyncio.timeout(5):
            await connection.closed
        assert isinstance(connection.error, Unproven)
        assert seen == []
        network.listen(server("9", thief), "elsewhere")
        with pytest.raises(Unproven, match="signature"):
            await network.connect(server("2", B), "elsewhere", timeout_ms=2_000, expect=wants(B))

    asyncio.run(main())


def test_a_server_that_does_not_sign_is_not_let_in() -> None:
    async def main() -> None:
        network, seen = MemoryNetwork(), []
        options = WireOptions(handshake_ms_max=100, linger_ms_max=50)
        network.listen(structs.replace(server("1", A), options=options), "there", on_open=seen.append)
        silent = server("2", B)
        connection = Connection(silent, token="", expect=wants(A))
        connection._on[FrameKind.WELCOME] = lambda frame: None
        await network.attach_raw("there", connection)
        async with asyncio.timeout(5):
            await connection.closed
        assert connection.error is not None
        assert "no handshake within" in connection.error.message
        assert seen == []

    asyncio.run(main())


def exchange(hello: bytes) -> tuple[Hello, Welcome, bytes]:
    theirs, welcome, _ = judge_hello(server("1", A), Raw(hello), "there")
    return theirs, welcome, ENCODE(welcome)


def test_a_proof_is_about_this_connection_alone() -> None:
    connecting = server("2", B)
    hello, other = (encode_hello(connecting, "", is_proof_wanted=True) for _ in range(2))
    _, _, welcome = exchange(hello)
    _, _, another = exchange(hello)
    signature = msgpack.decode(encode_proof(B, hello, welcome))[0]
    assert judge_proof(hello, welcome, signature, "x") == ProvenServer(STORAGE_NODE, "2", B.public)
    for changed in ((hello, another), (other, welcome)):
        with pytest.raises(Unproven):
            judge_proof(*changed, signature, "x")
    # Neither does one side's signature pass for the other's.
    _, said, _ = exchange(hello)
    with pytest.raises(Unproven):
        judge_proof(hello, welcome, said.signature, "x")


@pytest.mark.parametrize(
    "change",
    [{"name": "3"}, {"role": METADATA_NODE}, {"cluster": 0}, {"nonce": b"n" * 32}, {"key": bytes(32)}, {"key": b""}],
)
def test_a_welcome_that_was_changed_on_the_way(change: dict[str, Any]) -> None:
    connecting = Endpoint(ClusterId(0), "client")
    hello = encode_hello(connecting, "", is_proof_wanted=True)
    _, welcome, _ = exchange(hello)
    peer, _ = judge_welcome(connecting, hello, Raw(ENCODE(welcome)), "there")
    assert peer.server == ProvenServer(STORAGE_NODE, "1", A.public)
    with pytest.raises(Unproven):
        judge_welcome(connecting, hello, Raw(ENCODE(structs.replace(welcome, **change))), "there")


def test_a_welcome_proves_nothing_to_another_greeting() -> None:
    """A recorded one would otherwise pass for ever, and one for another address would pass here."""
    connecting = Endpoint(CLUSTER, "client")
    hello = encode_hello(connecting, "", is_proof_wanted=True, dialled="127.0.0.1:7001")
    _, _, welcome = exchange(hello)
    later = encode_hello(connecting, "", is_proof_wanted=True, dialled="127.0.0.1:7001")
    elsewhere = ENCODE(structs.replace(msgpack.decode(hello, type=Hello), dialled="127.0.0.1:7002"))
    for other in (later, elsewhere):
        with pytest.raises(Unproven, match="signature"):
            judge_welcome(connecting, other, Raw(welcome), "there")


@pytest.mark.parametrize(
    ("dialled", "here", "advertised", "is_accepted"),
    [
        ("[0:0:0:0:0:0:0:1]:9000", ("::1", 9000), "", True),
        ("127.0.0.1:7001", ("127.0.0.1", 7001), "", True),
        ("localhost:7001", ("127.0.0.1", 7001), "", True),
        ("[::1]:7001", ("::1", 7001), "", True),
        ("node.example:7001", ("10.0.0.1", 7001), "", True),
        ("10.0.0.1:7001", ("172.17.0.2", 7001), "", True),
        ("127.0.0.1:7001", ("172.17.0.2", 7001), "", True),
        ("127.0.0.1:9000", ("127.0.0.1", 7001), "127.0.0.1:9000", True),
        ("node.example:9000", ("127.0.0.1", 7001), "node:9000", True),
        ("127.0.0.1:7001", ("127.0.0.1", 7001), "127.0.0.1:9000", True),
        ("127.0.0.1:7002", ("127.0.0.1", 7001), "", False),
        ("127.0.0.2:7001", ("127.0.0.1", 7001), "", False),
        ("node.example:7002", ("10.0.0.1", 7001), "node:9000", False),
        ("", ("127.0.0.1", 7001), "", False),
        ("nowhere", ("127.0.0.1", 7001), "", False),
        ("127.0.0.1:7002", None, "", True),
    ],
)
def test_a_proof_is_about_the_address_that_was_dialled(
    dialled: str, here: tuple[str, int] | None, advertised: str, is_accepted: bool
) -> None:
    """Otherwise somebody at the address of a server that is down could pass the proof on to another server."""
    accepting = structs.replace(server("1", A), advertised=advertised)
    for connecting in (server("2", B), server("2", None)):
        hello = encode_hello(connecting, "", is_proof_wanted=True, dialled=dialled)
        if is_accepted:
            assert judge_hello(accepting, Raw(hello), "there", here)[1].signature
        else:
            with pytest.raises(Unproven, match="give its address with --advertise"):
                judge_hello(accepting, Raw(hello), "there", here)
    client = encode_hello(server("2", None), "", dialled=dialled)
    assert not judge_hello(accepting, Raw(client), "there", here)[1].signature


def test_nobody_passes_a_proof_on_over_loopback() -> None:
    """A server that is down has its port taken by somebody that passes everything on to a server that lives."""

    async def main() -> None:
        seen: list[Connection] = []
        listener = await listen(server("1", A), "127.0.0.1", 0, on_open=seen.append)
        try:
            async with FaultProxy("127.0.0.1", listener.port) as relay:
                with pytest.raises(Unproven, match=f"was made to {relay.address}"):
                    await connect(server("2", B), *parse_address(relay.address), timeout_ms=5_000, expect=wants(A))
                assert seen == []
                # Clients prove nothing, so proxies do not concern them.
                client = await connect(server("", None, "client"), *parse_address(relay.address), timeout_ms=5_000)
                client.abort()
            direct = await connect(server("2", B), "127.0.0.1", listener.port, timeout_ms=5_000, expect=wants(A))
            direct.abort()
        finally:
            await listener.close(timeout_ms=100)

    asyncio.run(main())


def test_greetings_of_version_1_are_understood() -> None:
    old = msgpack.encode((MAGIC, 1, 1, 1, STORAGE_NODE, "1", "", LIMITS))
    _, welcome, peer = judge_hello(server("1", A), Raw(old), "there")
    assert (welcome.version_max, welcome.signature, peer.version, peer.server) == (1, b"", 1, None)


def test_a_book_knows_a_key_only_as_that_of_one_server() -> None:
    book = ServerBook()
    book.note(STORAGE_NODE, {1: A.public, 2: ""})
    assert book.is_known(ProvenServer(STORAGE_NODE, "1", A.public))
    for other in (
        ProvenServer(STORAGE_NODE, "1", B.public),
        ProvenServer(STORAGE_NODE, "2", A.public),
        ProvenServer(STORAGE_NODE, "2", ""),
        ProvenServer(STORAGE_NODE, "3", ""),
        ProvenServer(METADATA_NODE, "1", A.public),
        ProvenServer("client", "1", A.public),
        ProvenServer(STORAGE_NODE, "01", A.public),
    ):
        assert not book.is_known(other)
    book.note(STORAGE_NODE, {2: B.public})
    assert book.keys(STORAGE_NODE) == {1: A.public, 2: B.public}
    book.note(STORAGE_NODE, {2: B.public}, is_all=True)
    assert book.keys(STORAGE_NODE) == {2: B.public}


# Where a private key is kept.


def test_a_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made = load_or_make([one])
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert load_or_make([one, two]).public == made.public
    assert one.read_bytes() == two.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_make([path])
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match=r"mode 0640.*chmod 600"):
        load_or_make([path])


def test_files_that_hold_no_key_or_several(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    load_or_make([one])
    load_or_make([two])
    with pytest.raises(WrongIdentity, match="different private keys"):
        load_or_make([one, two])
    two.write_bytes(b"nothing of the sort")
    with pytest.raises(InvalidArgument, match="is not the private key"):
        load_or_make([two])
    with pytest.raises(InvalidArgument, match="cannot be kept in"):
        load_or_make([tmp_path / "missing" / "key"])


def test_a_damaged_key_file_never_gives_another_key(tmp_path: Path) -> None:
    """Nearly every 32 bytes are a valid private key, so damage would give one that no other server knows."""
    path = tmp_path / "key"
    made = load_or_make([path])
    sound = path.read_bytes()
    found = []
    for place in range(len(sound)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged = bytearray(sound)
            damaged[place] ^= mask
            found.append(key_or_error(bytes(damaged), path))
    found += [key_or_error(sound[:length], path) for length in range(len(sound))]
    refused = [each for each in found if each != made.public]
    for each in refused:
        assert str(path) in each
        assert "damaged" in each
        assert "restore the file from a backup" in each
    assert any("does not belong" in each for each in refused)


def key_or_error(data: bytes, path: Path) -> str:
    try:
        return ServerKey.from_pem(data, path).public
    except InvalidArgument as error:
        return error.message


def test_a_damaged_key_file_is_written_again_from_another_volume(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made = load_or_make([one, two])
    other = ServerKey.generate().to_pem().splitlines()
    two.write_bytes(b"\n".join(other[:3] + one.read_bytes().splitlines()[3:]))
    with pytest.raises(InvalidArgument, match=f"{two}, the private key of this server, is damaged.*remove this one"):
        load_or_make([one, two])
    two.unlink()
    assert load_or_make([one, two]).public == made.public
    assert one.read_bytes() == two.read_bytes()


def test_a_key_file_of_before_has_no_public_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    private, _, public = A.to_pem().partition(b"-----BEGIN PUBLIC KEY-----")
    assert public
    path.write_bytes(private)
    path.chmod(0o600)
    assert load_or_make([path]).public == A.public
    assert path.read_bytes() == private
