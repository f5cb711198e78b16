"""The first words on a connection: each side says who it is and what it takes, and judges the other. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field

from cutwater.errors import InvalidArgument
from cutwater.types import ClusterId
from cutwater.wire.auth import ANONYMOUS, Identity
from cutwater.wire.errors import MalformedFrame, WrongCluster, WrongVersion
from cutwater.wire.frames import MAGIC, VERSION_MAX, VERSION_MIN, Hello, PeerLimits, Prologue, Welcome
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


def hello(ours: Endpoint, token: str) -> Hello:
    return Hello(MAGIC, VERSION_MIN, VERSION_MAX, ours.cluster, ours.role, ours.name, token, ours.limits)


def judge_hello(ours: Endpoint, header: Raw) -> tuple[Hello, Welcome]:
    """What a peer that connected says of itself, and the answer to it, if there is nothing wrong with it."""
    version = _judge_prologue(header)
    theirs = _decode(header, Hello)
    if theirs.cluster not in (ANY_CLUSTER, ours.cluster):
        raise WrongCluster(theirs.cluster, ours.cluster)
    _check_sizes(theirs.role, theirs.name, theirs.token)
    return theirs, Welcome(MAGIC, version, version, ours.cluster, ours.role, ours.name, ours.limits)


def judge_welcome(ours: Endpoint, header: Raw) -> tuple[Welcome, int]:
    """What the peer that was connected to says of itself, and the version that is spoken."""
    version = _judge_prologue(header)
    theirs = _decode(header, Welcome)
    if ours.cluster not in (ANY_CLUSTER, theirs.cluster):
        raise WrongCluster(ours.cluster, theirs.cluster)
    _check_sizes(theirs.role, theirs.name, "")
    return theirs, version


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


def _check_sizes(role: str, name: str, token: str) -> None:
    if len(role) > NAME_CHARS_MAX or len(name) > NAME_CHARS_MAX or len(token) > TOKEN_CHARS_MAX:
        raise MalformedFrame("the greeting has a name or a token that is longer than any can be")
