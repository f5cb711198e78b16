"""The first words on a connection: each side says who it is and what it takes, and judges the other. Pure."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from ipaddress import ip_address
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import replace

from cutwater.errors import InvalidArgument
from cutwater.protocol.errors import HEADER_BYTES_MIN, MalformedFrame, Unproven, WrongCluster, WrongVersion
from cutwater.types import ClusterId
from cutwater.wire.addresses import format_address, is_loopback, parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.identity.auth import ANONYMOUS, Identity
from cutwater.wire.identity.server_keys import (
    NONCE_BYTES,
    ProvenServer,
    ServerKey,
    acceptor_statement,
    connector_statement,
    is_signed,
)
from cutwater.wire.messages import ENCODE, MAGIC, VERSION_MAX, VERSION_MIN, Hello, PeerLimits, Prologue, Welcome
from cutwater.wire.options import WireOptions

S = TypeVar("S", bound=Struct)

NAME_CHARS_MAX = 256
TOKEN_CHARS_MAX = 8_192

ANY_CLUSTER = ClusterId(0)
"""What a client says that does not know yet which cluster it talks to."""

Expect = Callable[[ProvenServer | None], None]
"""Raises if a server that was connected to is not the one that is wanted; None: it has proved nothing."""


Here = tuple[str, int] | None
"""The address at which a connection without TLS was accepted. None: nobody can be in between without being noticed, as
TLS shows a certificate for the address, or both sides are in one process."""


class Endpoint(Struct, frozen=True):
    """The identity, methods and limits of this side, for any number of connections. Servers have a ``key``, and prove
    with it which server they are. ``advertised``: where others are told to connect, if not where it listens."""

    cluster: ClusterId
    role: str
    name: str = ""
    methods: Methods = field(default_factory=Methods)
    options: WireOptions = WireOptions()
    key: ServerKey | None = None
    advertised: str = ""

    def __post_init__(self) -> None:
        if len(self.role) > NAME_CHARS_MAX or len(self.name) > NAME_CHARS_MAX or self.cluster < 0:
            raise InvalidArgument(f"a role or name has at most {NAME_CHARS_MAX} characters, and no cluster is below 0")

    @property
    def limits(self) -> PeerLimits:
        options = self.options
        return PeerLimits(options.frame_bytes_max, options.header_bytes_max, options.calls_max, options.call_bytes_max)


class Peer(Struct, frozen=True):
    """The other side. ``role`` and ``name`` are what it says; ``identity`` is what its token or certificate
    says. ``server``: it has proved to hold the private key of a server, see ``server_book``."""

    cluster: ClusterId
    role: str
    name: str
    version: int
    limits: PeerLimits
    identity: Identity = ANONYMOUS
    address: str = ""
    server: ProvenServer | None = None


def encode_hello(ours: Endpoint, token: str, *, is_proof_wanted: bool = False, dialled: str = "") -> bytes:
    """The first words of the side that connects. ``is_proof_wanted``: the other side has to prove which server it is.
    This side proves nothing to one that need not. ``dialled``: the address that it connects to."""
    hello = Hello(MAGIC, VERSION_MIN, VERSION_MAX, ours.cluster, ours.role, ours.name, token, ours.limits)
    if is_proof_wanted:
        key = bytes.fromhex(ours.key.public) if ours.key is not None else b""
        hello = replace(hello, nonce=secrets.token_bytes(NONCE_BYTES), key=key, dialled=dialled)
    encoded = ENCODE(hello)
    if len(token) > TOKEN_CHARS_MAX or len(encoded) > ours.options.handshake_bytes_max:
        raise InvalidArgument(
            f"the token has {len(token)} characters: at most {TOKEN_CHARS_MAX} are allowed, and the greeting that "
            f"contains it must not exceed the {ours.options.handshake_bytes_max} bytes of handshake_bytes_max"
        )
    return encoded


def accepted_at(transport: asyncio.BaseTransport) -> Here:
    if transport.get_extra_info("ssl_object") is not None:
        return None
    address = transport.get_extra_info("sockname")
    return (address[0], address[1]) if isinstance(address, tuple) else None


def judge_hello(ours: Endpoint, header: Raw, address: str, here: Here = None) -> tuple[Hello, Welcome, Peer]:
    """What a peer that connected says of itself, the answer to it, and who it is, if there is nothing wrong with it."""
    version = _judge_prologue(header)
    theirs = _decode(header, Hello)
    if theirs.cluster not in (ANY_CLUSTER, ours.cluster):
        raise WrongCluster(theirs.cluster, ours.cluster)
    peer = _peer(theirs, version, address)
    welcome = Welcome(MAGIC, version, version, ours.cluster, ours.role, ours.name, ours.limits)
    if theirs.nonce and ours.key is not None:
        if here is not None and not _leads_here(theirs.dialled, here, ours.advertised):
            # Both signatures are about the HELLO, so somebody in between cannot say another address.
            raise Unproven(
                f"{ours.role} {ours.name} listens at {format_address(*here)} and proves nothing to a connection that "
                f"was made to {theirs.dialled or 'an unknown address'}: somebody in between may pass it on. If "
                "that is a proxy or a forwarded port, give its address with --advertise, or use TLS"
            )
        nonce = secrets.token_bytes(NONCE_BYTES) if theirs.key else b""
        welcome = replace(welcome, nonce=nonce, key=bytes.fromhex(ours.key.public))
        welcome = replace(welcome, signature=ours.key.sign(acceptor_statement(bytes(header), _said(welcome))))
    return theirs, welcome, peer


def _leads_here(dialled: str, here: tuple[str, int], advertised: str) -> bool:
    """Whether a connection to that address reaches this side, with nobody in between that passes on what is said. A
    host has many names and addresses, so ports have to be the same, and of loopback addresses the hosts as well."""
    try:
        host, port = parse_address(dialled)
    except InvalidArgument:
        return False
    if advertised and port == parse_address(advertised)[1]:
        return True
    is_elsewhere = is_loopback(host) and is_loopback(here[0]) and host != "localhost" and not _is_same(host, here[0])
    return port == here[1] and not is_elsewhere


def _is_same(host: str, other: str) -> bool:
    """Addresses have several spellings."""
    try:
        return ip_address(host) == ip_address(other)
    except ValueError:
        return host == other


def judge_proof(hello: bytes, welcome: bytes, signature: bytes, address: str) -> ProvenServer:
    """Which server it is that connected, once it has signed."""
    theirs = msgspec.msgpack.decode(hello, type=Hello)
    if not is_signed(theirs.key, signature, connector_statement(hello, welcome)):
        raise Unproven(f"{address} says that it is {theirs.role} {theirs.name}: its signature is not one of its key")
    return ProvenServer(theirs.role, theirs.name, theirs.key.hex())


def judge_welcome(ours: Endpoint, hello: bytes, header: Raw, address: str) -> tuple[Peer, bool]:
    """The peer that answered, and whether it wants a proof of this side."""
    version = _judge_prologue(header)
    theirs = _decode(header, Welcome)
    if ours.cluster not in (ANY_CLUSTER, theirs.cluster):
        raise WrongCluster(ours.cluster, theirs.cluster)
    peer = _peer(theirs, version, address)
    if not theirs.signature:
        return peer, False
    if not is_signed(theirs.key, theirs.signature, acceptor_statement(hello, _said(theirs))):
        raise Unproven(f"{address} says that it is {theirs.role} {theirs.name}: its signature is not one of its key")
    return replace(peer, server=ProvenServer(theirs.role, theirs.name, theirs.key.hex())), bool(theirs.nonce)


def encode_proof(key: ServerKey, hello: bytes, welcome: bytes) -> bytes:
    """The PROOF, which the connecting side sends after the WELCOME."""
    return ENCODE((key.sign(connector_statement(hello, welcome)),))


def _said(welcome: Welcome) -> tuple[int | str | bytes, ...]:
    return welcome.version_max, welcome.cluster, welcome.role, welcome.name, welcome.nonce, welcome.key


def _judge_prologue(header: Raw) -> int:
    """The newest version that both sides speak."""
    theirs = _decode(header, Prologue)
    if theirs.magic != MAGIC:
        raise MalformedFrame("the peer does not speak the protocol of Cutwater")
    version = min(VERSION_MAX, theirs.version_max)
    if version < max(VERSION_MIN, theirs.version_min):
        raise WrongVersion(
            f"this side speaks protocol versions {VERSION_MIN} to {VERSION_MAX}, "
            f"the peer {theirs.version_min} to {theirs.version_max}: upgrade the older side"
        )
    return version


def _decode(header: Raw, cls: type[S]) -> S:
    try:
        return msgspec.msgpack.decode(header, type=cls)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"the peer does not greet as Cutwater does: {error}") from None


def _peer(theirs: Hello | Welcome, version: int, address: str) -> Peer:
    """The peer, as it says; what makes no sense is refused."""
    token, limits = theirs.token if isinstance(theirs, Hello) else "", theirs.limits
    if len(theirs.role) > NAME_CHARS_MAX or len(theirs.name) > NAME_CHARS_MAX or len(token) > TOKEN_CHARS_MAX:
        raise MalformedFrame("the greeting has a name or a token that is longer than any can be")
    if not HEADER_BYTES_MIN <= limits.header_bytes_max <= limits.frame_bytes_max:
        raise MalformedFrame(
            f"the greeting allows headers of {limits.header_bytes_max} bytes in frames of {limits.frame_bytes_max}: "
            f"at least {HEADER_BYTES_MIN} are needed, and a frame contains its header"
        )
    return Peer(ClusterId(theirs.cluster), theirs.role, theirs.name, version, limits, ANONYMOUS, address)
