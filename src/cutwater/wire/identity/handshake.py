"""The handshake: each side sends its identity and limits, and checks those of the other. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field
from msgspec.structs import asdict, replace

from cutwater.errors import InvalidArgument, ProtocolViolation
from cutwater.protocol.errors import HEADER_BYTES_MIN, MalformedFrame, Unproven, WrongCluster, WrongVersion
from cutwater.runtime import system
from cutwater.types import ClusterId
from cutwater.wire.addresses import format_address, is_loopback, parse_address
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.identity.auth import ANONYMOUS, Authenticator, Credentials, PeerIdentity
from cutwater.wire.identity.server_certificates import Wants, check_accepted, check_connected, check_wanted
from cutwater.wire.identity.server_keys import (
    NONCE_BYTES,
    ProvenServer,
    ServerKey,
    acceptor_statement,
    connector_statement,
    is_signed,
)
from cutwater.wire.messages import (
    ENCODE,
    MAGIC,
    VERSION_MAX,
    VERSION_MIN,
    FrameKind,
    GatewayHello,
    Hello,
    PeerLimits,
    Prologue,
    Welcome,
    WireFrame,
)
from cutwater.wire.options import WireOptions

S = TypeVar("S", bound=Struct)

NAME_CHARS_MAX = 256
TOKEN_CHARS_MAX = 8_192

ANY_CLUSTER = ClusterId(0)
"""The cluster id that a client sends if it does not know yet which cluster it talks to."""

Expect = Callable[[ProvenServer | None], None]
"""Raises if the connected server is not the expected one. None means that the server has proved nothing."""


Here = tuple[str, int] | None
"""The address at which a connection without TLS was accepted.

None means that a man in the middle would be noticed: TLS checks a certificate for the address, or both sides are in one
process.
"""


class Endpoint(Struct, frozen=True):
    """The identity, methods and limits of this side, for any number of connections.

    Servers have a ``key``, with which they prove which server they are. ``advertised`` is the address that others are
    told to connect to, if it differs from the listen address.
    """

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
    """The other side of a connection.

    ``role`` and ``name`` are its own claims. ``identity`` comes from its token or certificate. ``server`` is set if it
    has proved to hold the private key of a server, see ``server_book``.
    """

    cluster: ClusterId
    role: str
    name: str
    version: int
    limits: PeerLimits
    identity: PeerIdentity = ANONYMOUS
    address: str = ""
    server: ProvenServer | None = None


class Greeting:
    """One side of the handshake of a connection: the connecting side if there is a ``token``, else the accepting one.

    ``hello`` is the first message of the connecting side; the accepting side has none. ``gateway`` is the token of a
    gateway, which connects with the token of its caller. ``authenticate`` judges the
    credentials of a peer that connects, ``expect`` the server that a connection was made to, and ``wants`` the
    certificate of that server, before the token is sent.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: str | None,
        expect: Expect | None,
        dialled: str,
        authenticate: Authenticator | None,
        wants: Wants | None = None,
        gateway: str = "",
    ) -> None:
        self._endpoint, self._expect, self._authenticate, self._wants = endpoint, expect, authenticate, wants
        self.hello = b""
        self._awaited = FrameKind.HELLO
        if token is not None:
            self.hello = encode_hello(
                endpoint, token, is_proof_wanted=expect is not None, dialled=dialled, gateway=gateway
            )
            self._awaited = FrameKind.WELCOME
        self._unproven: tuple[Peer, bytes, bytes] | None = None
        """A server that has not proved its identity yet, with the HELLO and WELCOME that its proof must sign."""

    def begin(self, transport: asyncio.BaseTransport) -> bytes:
        """Return the first message of this side; empty if the other side begins."""
        if self._wants is not None:
            check_wanted(transport, self._wants)
        return self.hello

    def take(
        self, frame: WireFrame, transport: asyncio.BaseTransport, address: str
    ) -> tuple[tuple[FrameKind, bytes] | None, Peer | None]:
        """Take a message of the peer. Returns the kind and header of the answer, if there is one, and the peer, once
        the handshake is done."""
        if frame.kind != self._awaited:
            raise ProtocolViolation(f"a {FrameKind(frame.kind).name} frame has no place while greeting")
        if self._awaited is FrameKind.WELCOME:
            return self._take_welcome(frame.header, transport, address)
        if self._unproven is None:
            return self._take_hello(frame.header, transport, address)
        peer, hello, welcome = self._unproven
        return None, replace(peer, server=judge_proof(hello, welcome, frame.header.signature, address))

    def _take_hello(
        self, header: Raw, transport: asyncio.BaseTransport, address: str
    ) -> tuple[tuple[FrameKind, bytes], Peer | None]:
        """Answer the HELLO. A client is connected now; a peer that claims to be a server must prove which one first."""
        theirs, welcome, peer = judge_hello(self._endpoint, header, address, _accepted_at(transport))
        server = check_accepted(
            transport, self._endpoint.cluster, theirs.role, theirs.name, offers_key=bool(theirs.key)
        )
        if self._authenticate is not None:
            certificate = transport.get_extra_info("peercert") or {}
            shown = Credentials(theirs.role, theirs.name, theirs.token, certificate, address, server, theirs.gateway)
            peer = replace(peer, identity=self._authenticate(shown))
        encoded = ENCODE(welcome)
        if welcome.nonce:
            self._awaited = FrameKind.PROOF
            self._unproven = peer, bytes(header), encoded
            return (FrameKind.WELCOME, encoded), None
        return (FrameKind.WELCOME, encoded), peer

    def _take_welcome(
        self, header: Raw, transport: asyncio.BaseTransport, address: str
    ) -> tuple[tuple[FrameKind, bytes] | None, Peer]:
        peer, is_proof_wanted = judge_welcome(self._endpoint, self.hello, header, address)
        check_connected(transport, peer.cluster, peer.role, peer.name)
        if self._expect is not None:
            self._expect(peer.server)
        key = self._endpoint.key
        if not is_proof_wanted or key is None:
            return None, peer
        return (FrameKind.PROOF, encode_proof(key, self.hello, bytes(header))), peer


def _accepted_at(transport: asyncio.BaseTransport) -> Here:
    if transport.get_extra_info("ssl_object") is not None:
        return None
    address = transport.get_extra_info("sockname")
    return (address[0], address[1]) if isinstance(address, tuple) else None


def encode_hello(
    ours: Endpoint, token: str, *, is_proof_wanted: bool = False, dialled: str = "", gateway: str = ""
) -> bytes:
    """Encode the first message of the connecting side.

    ``is_proof_wanted``: the other side must prove which server it is. If not, this side proves nothing either.
    ``dialled`` is the address that this side connects to.
    """
    hello = Hello(MAGIC, VERSION_MIN, VERSION_MAX, ours.cluster, ours.role, ours.name, token, ours.limits)
    if is_proof_wanted:
        key = bytes.fromhex(ours.key.public) if ours.key is not None else b""
        hello = replace(hello, nonce=system.token_bytes(NONCE_BYTES), key=key, dialled=dialled)
    encoded = ENCODE(hello if not gateway else GatewayHello(**asdict(hello), gateway=gateway))
    if max(len(token), len(gateway)) > TOKEN_CHARS_MAX or len(encoded) > ours.options.handshake_bytes_max:
        raise InvalidArgument(
            f"the token has {len(token)} characters: at most {TOKEN_CHARS_MAX} are allowed, and the greeting that "
            f"contains it must not exceed the {ours.options.handshake_bytes_max} bytes of handshake_bytes_max"
        )
    return encoded


def judge_hello(ours: Endpoint, header: Raw, address: str, here: Here = None) -> tuple[GatewayHello, Welcome, Peer]:
    """Check the HELLO of a peer that connected. Returns it, the answer to it, and the peer."""
    version = _judge_prologue(header)
    theirs = _decode(header, GatewayHello)
    if theirs.cluster not in (ANY_CLUSTER, ours.cluster):
        raise WrongCluster(theirs.cluster, ours.cluster)
    peer = _peer(theirs, version, address)
    welcome = Welcome(MAGIC, version, version, ours.cluster, ours.role, ours.name, ours.limits)
    if theirs.nonce and ours.key is not None:
        if here is not None and not _leads_here(theirs.dialled, here, ours.advertised):
            # Both signatures cover the HELLO, so a man in the middle cannot change the address.
            raise Unproven(
                f"{ours.role} {ours.name} listens at {format_address(*here)} and proves nothing to a connection that "
                f"was made to {theirs.dialled or 'an unknown address'}: a man in the middle may pass it on. If "
                "that is a proxy or a forwarded port, give its address with --advertise, or use TLS"
            )
        nonce = system.token_bytes(NONCE_BYTES) if theirs.key else b""
        welcome = replace(welcome, nonce=nonce, key=bytes.fromhex(ours.key.public))
        welcome = replace(welcome, signature=ours.key.sign(acceptor_statement(bytes(header), _said(welcome))))
    return theirs, welcome, peer


def _leads_here(dialled: str, here: tuple[str, int], advertised: str) -> bool:
    """Return whether a connection to ``dialled`` reaches this side directly, and not a man in the middle.

    A host has many names and addresses, so only the ports must be the same. For loopback addresses the hosts must be
    the same as well.
    """
    try:
        host, port = parse_address(dialled)
    except InvalidArgument:
        return False
    if advertised and port == parse_address(advertised)[1]:
        return True
    is_elsewhere = is_loopback(host) and is_loopback(here[0]) and host != "localhost" and not _is_same(host, here[0])
    return port == here[1] and not is_elsewhere


def _is_same(host: str, other: str) -> bool:
    """Compare two addresses, which may be spelled differently."""
    try:
        return ip_address(host) == ip_address(other)
    except ValueError:
        return host == other


def judge_proof(hello: bytes, welcome: bytes, signature: bytes, address: str) -> ProvenServer:
    """Check the signature of a server that connected, and return the server."""
    theirs = msgspec.msgpack.decode(hello, type=Hello)
    if not is_signed(theirs.key, signature, connector_statement(hello, welcome)):
        raise Unproven(f"{address} says that it is {theirs.role} {theirs.name}: its signature is not one of its key")
    return ProvenServer(theirs.role, theirs.name, theirs.key.hex())


def judge_welcome(ours: Endpoint, hello: bytes, header: Raw, address: str) -> tuple[Peer, bool]:
    """Check the WELCOME. Returns the peer, and whether it wants a proof from this side."""
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
    """Encode the PROOF, which the connecting side sends after the WELCOME."""
    return ENCODE((key.sign(connector_statement(hello, welcome)),))


def _said(welcome: Welcome) -> tuple[int | str | bytes, ...]:
    return welcome.version_max, welcome.cluster, welcome.role, welcome.name, welcome.nonce, welcome.key


def _judge_prologue(header: Raw) -> int:
    """Return the newest version that both sides speak."""
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


def _peer(theirs: GatewayHello | Welcome, version: int, address: str) -> Peer:
    """Return the peer as it describes itself. Raises if a value is implausible."""
    limits = theirs.limits
    tokens = (theirs.token, theirs.gateway) if isinstance(theirs, GatewayHello) else ()
    is_long = any(len(token) > TOKEN_CHARS_MAX for token in tokens)
    if len(theirs.role) > NAME_CHARS_MAX or len(theirs.name) > NAME_CHARS_MAX or is_long:
        raise MalformedFrame("the greeting has a name or a token that is longer than any can be")
    if not HEADER_BYTES_MIN <= limits.header_bytes_max <= limits.frame_bytes_max:
        raise MalformedFrame(
            f"the greeting allows headers of {limits.header_bytes_max} bytes in frames of {limits.frame_bytes_max}: "
            f"at least {HEADER_BYTES_MIN} are needed, and a frame contains its header"
        )
    return Peer(ClusterId(theirs.cluster), theirs.role, theirs.name, version, limits, ANONYMOUS, address)
