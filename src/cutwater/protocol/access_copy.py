"""How the rules of access control travel to servers, and how servers confirm them (ADR 0052).

A server asks the leader, and says by which revision it acts. The rules may be larger than a header, so they are the
body of the answer. They go to storage nodes and metadata nodes only: they contain hashes of tokens.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from cutwater.core.access.access_rules import AccessRules
from cutwater.protocol.errors import MalformedFrame
from cutwater.types import Revision

_DECODER = msgspec.msgpack.Decoder(AccessRules)


class AccessAsk(Struct, frozen=True):
    """A server asks for the rules. ``revision`` is the one by which it acts now."""

    kind: str
    number: int
    revision: Revision


class AccessNews(Struct, frozen=True):
    """Header of the answer. Without a body: the server has the rules of this revision already. The leader has confirmed
    with its store that it leads, after it was asked. The rules are valid for ``lease_ms`` from when the question was
    sent."""

    revision: Revision
    lease_ms: int


def encode_rules(rules: AccessRules) -> bytes:
    return msgspec.msgpack.encode(rules)


def decode_rules(body: bytes | bytearray | memoryview) -> AccessRules:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"these are no rules of access control: {error}") from None
