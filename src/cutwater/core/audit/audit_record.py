"""Audit records, as they are stored in the topic ``_audit``: each is one JSON object. docs/audit.md describes them.

A record contains names, numbers and words. It never contains values of records, secrets, or hashes of secrets.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec import Struct

from cutwater.core.access.principals import TOKEN_PREFIX

TEXT_MAX = 2_000
"""Maximum number of characters of a text in a record. Longer texts are cut off."""
_SECRET_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TOKEN = f"{TOKEN_PREFIX}_"


class AuditOutcome(enum.StrEnum):
    DONE = "done"
    DENIED = "denied"
    WOULD_BE_DENIED = "would-be-denied"
    """Executed, because access control is permissive."""


class AuditRecord(Struct, frozen=True, omit_defaults=True):
    """A change, or a number of equal denials.

    ``time`` is in microseconds UTC. ``principal`` is empty for the cluster itself and for clients without credentials.
    Changes have the ``index`` of their decision, and a ``number``: they are numbered without gaps. Denials have an
    ``id``: a denial that is there twice has the same one. ``count``: how often it happened in that second.
    ``suppressed``: how many other denials of that second are not recorded. ``via`` is the principal of the gateway that
    asked for the principal, if one did.
    """

    time: int
    operation: str
    outcome: AuditOutcome
    principal: str = ""
    resource: str = ""
    detail: str = ""
    token: str = ""
    request: str = ""
    index: int = 0
    number: int = 0
    id: str = ""
    right: str = ""
    address: str = ""
    server: str = ""
    count: int = 1
    suppressed: int = 0
    via: str = ""


_ENCODE = msgspec.json.Encoder(order="deterministic").encode
_DECODE = msgspec.json.Decoder(AuditRecord).decode


def encode_audit(record: AuditRecord) -> bytes:
    return _ENCODE(record)


def decode_audit(value: bytes) -> AuditRecord | None:
    """Return the record; None if it is none, since a principal may have the right to append to the topic."""
    try:
        return _DECODE(value)
    except msgspec.MsgspecError:
        return None


def audit_text(text: str) -> str:
    """Return a text as it may be in a record: not too long, and without the secrets of tokens that clients may have
    given as a name."""
    first, *others = text.split(_TOKEN)
    text = _TOKEN.join((first, *map(_without_secret, others)))
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


def _without_secret(text: str) -> str:
    """Remove the secret from a text that goes on after the beginning of a token: the id, ``_`` and the secret."""
    identifier, mark, rest = text.partition("_")
    if not mark or not identifier.isalnum():
        return text
    secret = len(rest) - len(rest.lstrip(_SECRET_CHARACTERS))
    return f"{identifier}_…{rest[secret:]}"
