"""The first words on a connection: each side says who it is and what it takes, and judges the other. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field

from cutwater.errors import InvalidArgument
from cutwater.types import ClusterId
from cutwater.wire.auth import ANONYMOUS, Identity
from cutwater.wire.errors import HEADER_BYTES_MIN, MalformedFrame, WrongCluster, WrongVersion
from cutwater.wire.frames import ENCODE, MAGIC, VERSION_MAX, VERSION_MIN, Hello, PeerLimits, Prologue, Welcome
from cutwater.wire.methods import Methods
from cutwater.wire.options import WireOptions

S = TypeVar("S", bound=Struct)

NAME_CHARS_MAX = 256
TOKEN_CHARS_MAX = 8_192

ANY_CLUSTER = ClusterId(0)
"""What a client says that does not know yet which cluster it talks to."""


class Endpoint(Struct, frozen=True):
    """What this side is, says of itself, answers and allows, on any number of connections."""

    cluster: ClusterId
    role: str
    name: str = ""
    methods: Methods = field(default_factory=Methods)
    options: WireOptions = WireOptions()

    def __post_init__(self) -> None:
        if len(self.role) > NAME_CHARS_MAX or len(self.name) > NAME_CHARS_MAX or self.cluster < 0:
            raise InvalidArgument(f"a role or name has at most {NAME_CHARS_MAX} characters, and no cluster is below 0")

    @property
    def limits(self) -> PeerLimits:
        options = self.options
        return PeerLimits(options.frame_bytes_max, options.header_bytes_max, options.calls_max, options.call_bytes_max)


class Peer(Struct, frozen=True):
    """What the other side is. ``role`` and ``name`` are what it says; ``identity`` is what it has proved."""

    cluster: ClusterId
    role: str
    name: str
    version: int
    limits: PeerLimits
    identity: Identity = ANONYMOUS
    address: str = ""


def encode_hello(ours: Endpoint, token: str) -> bytes:
    """The first words of the side that connects."""
    hello = Hello(MAGIC, VERSION_MIN, VERSION_MAX, ours.cluster, ours.role, ours.name, token, ours.limits)
    encoded = ENCODE(hello)
    if len(token) > TOKEN_CHARS_MAX or len(encoded) > ours.options.handshake_bytes_max:
        raise InvalidArgument(
            f"the token has {len(token)} characters: at most {TOKEN_CHARS_MAX} are allowed, and the greeting that "
            f"contains it must not exceed the {ours.options.handshake_bytes_max} bytes of handshake_bytes_max"
        )
    return encoded


def judge_hello(ours: Endpoint, header: Raw, address: str) -> tuple[Hello, Welcome, Peer]:
    """What a peer that connected says of itself, the answer to it, and who it is, if there is nothing wrong with it."""
    version = _judge_prologue(header)
    theirs = _decode(header, Hello)
    if theirs.cluster not in (ANY_CLUSTER, ours.cluster):
        raise WrongCluster(theirs.cluster, ours.cluster)
    peer = _peer(theirs, version, address)
    return theirs, Welcome(MAGIC, version, version, ours.cluster, ours.role, ours.name, ours.limits), peer


def judge_welcome(ours: Endpoint, header: Raw, address: str) -> Peer:
    """Who the peer is that was connected to."""
    version = _judge_prologue(header)
    theirs = _decode(header, Welcome)
    if ours.cluster not in (ANY_CLUSTER, theirs.cluster):
        raise WrongCluster(ours.cluster, theirs.cluster)
    return _peer(theirs, version, address)


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
