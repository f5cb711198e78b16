"""The kinds of frames, and their headers.

A frame is 18 fixed bytes (little endian: body length u32, header length u32, call id u64, kind u8, flags u8), then a
MessagePack header, then the body, which is opaque bytes. Headers are arrays; a later version may append elements, which
an earlier one ignores. Either side may make calls. The calls that this side makes and the calls that it serves are
numbered separately, and the kind of a frame says which of the two it belongs to.

=============  =====  ========================  ==================================================================
kind           body   sender                    header
=============  =====  ========================  ==================================================================
HELLO                 connecting side, first    magic, versions, cluster, role, name, token, limits
WELCOME               accepting side            as HELLO, with the one version that is spoken, without a token
PROOF                 connecting side, second   only servers: a signature, see ``server_keys``
REQUEST        yes    the caller                method, milliseconds left, argument
RESPONSE       yes    the callee, last          the value, of a type that the method says
ERROR                 the callee, last          code, message, retriable, fields, history
STREAM_OPEN    yes    the caller                as REQUEST, and the first credit: items, bytes
STREAM_ITEM    yes    the callee                backlog (items, bytes), the value
BLOCKED               the callee                backlog, size of the next item, and the credit that it gives back
CREDIT                the caller                items, bytes
STREAM_END            the callee, last          nothing
CANCEL                the caller, last          nothing
NOTIFY         yes    either                    method, argument; there is no answer
PING, PONG            either                    nothing; the call id comes back
GOAWAY                either                    no more requests will be sent; with an error: nothing more is read
=============  =====  ========================  ==================================================================
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from cutwater.protocol.errors import WireError
from cutwater.protocol.methods import Body

FIXED = struct.Struct("<IIQBB")
FIXED_BYTES = FIXED.size
PACK_FIXED = FIXED.pack

MAGIC = "cutwater"
VERSION_MIN = 1
VERSION_MAX = 2
"""Version 2: servers prove which server they are. Clients of version 1 are served as before."""

Count = Annotated[int, Meta(ge=0, le=2**62)]


class FrameKind(enum.IntEnum):
    """The kind of a frame. The numbers are part of the format."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    RESPONSE = 4
    ERROR = 5
    STREAM_OPEN = 6
    STREAM_ITEM = 7
    BLOCKED = 8
    CREDIT = 9
    STREAM_END = 10
    CANCEL = 11
    NOTIFY = 12
    PING = 13
    PONG = 14
    GOAWAY = 15
    PROOF = 16


WITH_BODY: frozenset[int] = frozenset(
    {FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_OPEN, FrameKind.STREAM_ITEM, FrameKind.NOTIFY}
)


class PeerLimits(Struct, frozen=True, array_like=True):
    """The limits of the sender, which the receiver must keep."""

    frame_bytes_max: Count
    header_bytes_max: Count
    calls_max: Count
    call_bytes_max: Count


class Prologue(Struct, frozen=True, array_like=True):
    """The beginning of every greeting, in all versions, so that two sides without a common version can say so."""

    magic: str
    version_min: Count
    version_max: Count


class Hello(Struct, frozen=True, array_like=True):
    """The first message of the connecting side.

    ``cluster`` 0 means any. With a ``nonce``, the other side must prove which server it is. With a ``key`` as well,
    this side will do the same. ``dialled`` is then the address, HOST:PORT, that this side connected to.
    """

    magic: str
    version_min: Count
    version_max: Count
    cluster: Count
    role: str
    name: str
    token: str
    limits: PeerLimits
    nonce: bytes = b""
    key: bytes = b""
    dialled: str = ""

    def __repr__(self) -> str:
        """Leave out the token."""
        return f"Hello(cluster={self.cluster!r}, role={self.role!r}, name={self.name!r})"


class GatewayHello(Hello, frozen=True, array_like=True):
    """The first message of a gateway, which connects for another caller: ``token`` is that of the caller, and
    ``gateway`` its own. Servers of earlier versions do not read it."""

    gateway: str = ""

    def __repr__(self) -> str:
        """Leave out the tokens."""
        return f"GatewayHello(cluster={self.cluster!r}, role={self.role!r}, name={self.name!r})"


class Welcome(Struct, frozen=True, array_like=True):
    """The answer to a HELLO: the chosen version, twice, and the identity of this side.

    ``nonce``, ``key`` and ``signature`` are set only if the HELLO had a nonce and this side has a key. ``nonce`` also
    needs a key in the HELLO.
    """

    magic: str
    version_min: Count
    version_max: Count
    cluster: Count
    role: str
    name: str
    limits: PeerLimits
    nonce: bytes = b""
    key: bytes = b""
    signature: bytes = b""


class Proof(Struct, frozen=True, array_like=True):
    """The signature with which the connecting side proves which server it is."""

    signature: bytes


class RequestHeader(Struct, frozen=True, array_like=True):
    method: str
    timeout_ms: Count
    argument: Raw


class OpenHeader(Struct, frozen=True, array_like=True):
    """Header of STREAM_OPEN. ``timeout_ms`` 0 means that the stream may last as long as the connection."""

    method: str
    timeout_ms: Count
    argument: Raw
    items: Count
    bytes: Count


class ItemHeader(Struct, frozen=True, array_like=True):
    backlog_items: Count
    backlog_bytes: Count
    value: Raw


class BlockedHeader(Struct, frozen=True, array_like=True):
    """The next item does not fit into the credit. The sender returns all its credit, so that no credit stays unused.

    The backlog includes the item.
    """

    backlog_items: Count
    backlog_bytes: Count
    next_bytes: Count
    returned_items: Count
    returned_bytes: Count


class CreditHeader(Struct, frozen=True, array_like=True):
    items: Count
    bytes: Count


class NotifyHeader(Struct, frozen=True, array_like=True):
    method: str
    argument: Raw


class GoAway(Struct, frozen=True, array_like=True):
    error: WireError | None = None


HEADERS: dict[int, type[Struct] | type[Raw] | None] = {
    FrameKind.HELLO: Raw,  # It may be of another version; ``handshake`` looks at that first.
    FrameKind.WELCOME: Raw,
    FrameKind.REQUEST: RequestHeader,
    FrameKind.RESPONSE: Raw,  # Only the caller knows the type.
    FrameKind.ERROR: WireError,
    FrameKind.STREAM_OPEN: OpenHeader,
    FrameKind.STREAM_ITEM: ItemHeader,
    FrameKind.BLOCKED: BlockedHeader,
    FrameKind.CREDIT: CreditHeader,
    FrameKind.STREAM_END: None,
    FrameKind.CANCEL: None,
    FrameKind.NOTIFY: NotifyHeader,
    FrameKind.PING: None,
    FrameKind.PONG: None,
    FrameKind.GOAWAY: GoAway,
    FrameKind.PROOF: Proof,
}


class WireFrame(Struct, gc=False):
    """One received frame. ``header`` is of the type in ``HEADERS``, if any. ``size`` counts header and body.

    ``skipped``: the frame was discarded while it was received, because the receiver had no room for it.
    """

    kind: int
    flags: int
    call: int
    header: Any
    body: Body
    size: int
    skipped: bool = False


ENCODE = msgspec.msgpack.Encoder().encode
