"""How the rules of access control travel to servers, and how servers confirm them (ADR 0052).

A server asks the leader, and says by which revision it acts. The rules may be larger than a header, so they are the
body of the answer. They go to storage nodes and metadata nodes only: they contain hashes of tokens.

While quotas are in force, the question has a body that says what clients use at this server, and the shares that it may
use follow the rules in the body of the answer (ADR 0054).
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.quota_shares import QuotaAnswer, QuotaQuestion
from cutwater.protocol.errors import MalformedFrame
from cutwater.types import Revision

_DECODER = msgspec.msgpack.Decoder(AccessRules)
_QUESTION_DECODER = msgspec.msgpack.Decoder(QuotaQuestion)
_SHARES_DECODER = msgspec.msgpack.Decoder(QuotaAnswer)
Bytes = bytes | bytearray | memoryview


class AccessAsk(Struct, frozen=True):
    """A server asks for the rules. ``revision`` is the one by which it acts now."""

    kind: str
    number: int
    revision: Revision


class AccessNews(Struct, frozen=True):
    """Header of the answer. Without a body: the server has the rules of this revision already. The leader has confirmed
    with its store that it leads, after it was asked. The rules are valid for ``lease_ms`` from when the question was
    sent. ``rules_bytes``: the size of the rules in the body, if shares of quotas follow them."""

    revision: Revision
    lease_ms: int
    rules_bytes: int | UnsetType = UNSET


def encode_rules(rules: AccessRules) -> bytes:
    return msgspec.msgpack.encode(rules)


def decode_rules(body: Bytes) -> AccessRules:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"these are no rules of access control: {error}") from None


def encode_question(question: QuotaQuestion) -> bytes:
    return msgspec.msgpack.encode(question)


def decode_question(body: Bytes) -> QuotaQuestion:
    try:
        return _QUESTION_DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"this does not say what is used of quotas: {error}") from None


def encode_shares(answer: QuotaAnswer) -> bytes:
    return msgspec.msgpack.encode(answer)


def decode_shares(body: Bytes) -> QuotaAnswer:
    try:
        return _SHARES_DECODER.decode(body) if len(body) else QuotaAnswer(0)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"these are no shares of quotas: {error}") from None


def split_answer(news: AccessNews, body: Bytes) -> tuple[bytes, bytes]:
    """Return the rules and the shares in the body of an answer."""
    at = len(body) if news.rules_bytes is UNSET else news.rules_bytes
    return bytes(body[:at]), bytes(body[at:])
