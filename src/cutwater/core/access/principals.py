"""Principals: tokens, groups, and rules that map certificates to names.

A token is ``cwt_<id>_<secret>``. The client makes it, from 64 random bits for the id and 256 for the secret, and sends
the id and the SHA-256 of the whole text. So no server ever stores or receives the secret, except to check it.
"""

from __future__ import annotations

import hashlib
import hmac

from msgspec import UNSET, Struct, UnsetType

from cutwater.core.access.rights import ResourcePattern
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument
from cutwater.types import CutTime, JobEpoch, JobNumber

LOCAL_ADMIN = "_local"
"""The principal of a caller that has proved to hold the key of a metadata node, from its own disk. It may change
access control while that is off, and has no other right."""
GROUP_PREFIX = "group:"
"""Before the name of a group, where a principal or a group may be named."""
JOB_PREFIX = "job:"
"""Before the name of a job, in the name of the principal as which it runs. Only agents get tokens for it."""

TOKEN_PREFIX = "cwt"
TOKEN_ID_BYTES = 8
TOKEN_SECRET_BYTES = 32
SCOPES_MAX = 32
DAY_US = 86_400_000_000
EXPIRES_US_MAX = CutTime(253_402_300_799_000_000)
"""The last second of the year 9999, in microseconds since 1970: calendars of programs end there."""
_HEX = frozenset("0123456789abcdef")
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_LATER = _LETTERS | frozenset("._-@/+=")
"""Characters that may follow the first character of the name of a principal or group."""


class Scope(Struct, frozen=True):
    """A token with scopes has only those rights of its principal that one of the scopes covers."""

    rights: tuple[str, ...]
    pattern: ResourcePattern

    def __str__(self) -> str:
        return f"{', '.join(self.rights)} {self.pattern}"


class JobOfToken(Struct, frozen=True):
    """The assignment of a job that a token is for. ``epoch`` is 0 if the token is for an errand about the job."""

    job: JobNumber
    epoch: JobEpoch


class TokenRecord(Struct, frozen=True):
    """A token, as stored. ``expires`` is 0 if it never does; ``last_used_day`` counts from 1970-01-01, 0 if never."""

    id: str
    sha256: str
    principal: str
    scopes: tuple[Scope, ...] = ()
    expires: CutTime = CutTime(0)
    creator: str = ""
    created: CutTime = CutTime(0)
    last_used_day: int = 0
    of_job: JobOfToken | UnsetType = UNSET
    """The token is a job's, and ends with its assignment. It is stored only if it is so, as the field is younger than
    the format."""
    parent: str | UnsetType = UNSET
    """The token of which it is a child, and with which it ends."""

    def is_expired(self, now: int) -> bool:
        return 0 < self.expires <= now


class PrincipalGroup(Struct, frozen=True):
    """Principals that share rules and quotas. Groups contain no groups."""

    name: str
    members: tuple[str, ...] = ()


class CertificateNames(Struct, frozen=True):
    """The names in a client's certificate, which TLS has verified. ``alternatives`` are subject alternative names, with
    their kind: ``DNS:app.example``, ``URI:spiffe://example/app``, ``email:ann@example``."""

    common_name: str = ""
    alternatives: tuple[str, ...] = ()


class CertificateRule(Struct, frozen=True):
    """Maps certificates to principals. ``field`` is ``san`` or ``cn``. ``pattern`` matches the whole name; each ``*``
    in it stands for any text. ``principal`` is the resulting name, with ``{1}`` for the text of the first ``*``."""

    field: str
    pattern: str
    principal: str


FIELD_SAN = "san"
FIELD_CN = "cn"
_FIELDS = (FIELD_SAN, FIELD_CN)
STARS_MAX = 8


# Tokens.


def make_token(id_bytes: bytes, secret_bytes: bytes) -> str:
    """Return the text of a token. The caller provides the random bytes, and shows the text once."""
    if (len(id_bytes), len(secret_bytes)) != (TOKEN_ID_BYTES, TOKEN_SECRET_BYTES):
        raise ValueError(f"a token is made of {TOKEN_ID_BYTES} and {TOKEN_SECRET_BYTES} random bytes")
    return f"{TOKEN_PREFIX}_{id_bytes.hex()}_{secret_bytes.hex()}"


def token_id(token: str) -> str | None:
    """Return the id in the text of a token, or None if the text is no token."""
    prefix, _, rest = token.partition("_")
    found, _, secret = rest.partition("_")
    is_token = prefix == TOKEN_PREFIX and _is_hex(found, TOKEN_ID_BYTES) and _is_hex(secret, TOKEN_SECRET_BYTES)
    return found if is_token else None


def token_hash(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_token_of(token: str, record: TokenRecord) -> bool:
    """Whether this is the text of the token. The comparison takes the same time wherever the two differ."""
    return hmac.compare_digest(token_hash(token), record.sha256)


def check_token(identifier: str, sha256: str) -> None:
    if not _is_hex(identifier, TOKEN_ID_BYTES):
        raise InvalidArgument(
            f"{identifier[:40]!r} cannot be the id of a token: it has {2 * TOKEN_ID_BYTES} hexadecimal digits (0-9, "
            "a-f), made at random"
        )
    if not _is_hex(sha256, 32):
        # The text is not repeated: a caller may have sent the token itself by mistake.
        raise InvalidArgument("the SHA-256 of a token has 64 hexadecimal digits (0-9, a-f): send that, never the token")


def _is_hex(text: str, size_bytes: int) -> bool:
    return len(text) == 2 * size_bytes and _HEX.issuperset(text)


# Names.


def check_principal(name: str) -> None:
    _check_simple("principal", name)


def check_group(name: str) -> None:
    _check_simple("group", name)


def check_subject(subject: str) -> None:
    """Check the name of a principal, of a job after ``job:``, or of a group after ``group:``."""
    if subject.startswith(GROUP_PREFIX):
        check_group(subject.removeprefix(GROUP_PREFIX))
    else:
        check_member(subject)


def check_member(name: str) -> None:
    """Check the name of a principal, or of a job after ``job:``."""
    if name.startswith(JOB_PREFIX):
        _check_simple("job", name.removeprefix(JOB_PREFIX))
    else:
        check_principal(name)


def _check_simple(kind: str, name: str) -> None:
    check_name(kind, name)
    if name[0] not in _LETTERS or not _LATER.issuperset(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a {kind}: it has letters from A to Z, digits and any of '._-@/+=', and "
            "begins with a letter or a digit"
        )


# Certificates.


def check_certificate_rule(rule: CertificateRule) -> None:
    if rule.field not in _FIELDS:
        raise InvalidArgument(
            f"{rule.field!r} is no part of a certificate that can be mapped: use 'san' (subject alternative name, as "
            "DNS:app.example) or 'cn' (common name)"
        )
    check_name("certificate pattern", rule.pattern)
    stars = rule.pattern.count("*")
    if stars > STARS_MAX:
        raise InvalidArgument(f"a pattern has at most {STARS_MAX} '*', not {stars}: {rule.pattern!r}")
    check_principal(_filled(rule.principal, ("x",) * stars))


def principal_of_certificate(names: CertificateNames, rules: tuple[CertificateRule, ...]) -> str | None:
    """Return the principal that a certificate stands for, or None. The first rule that matches decides, even if the
    name that results is not allowed: then the certificate stands for no principal."""
    for rule in rules:
        for name in (names.common_name,) if rule.field == FIELD_CN else names.alternatives:
            found = captured(rule.pattern, name)
            if found is not None and name:
                try:
                    principal = _filled(rule.principal, found)
                    check_principal(principal)
                except InvalidArgument:
                    return None
                return principal
    return None


def can_map_to(rule: CertificateRule, principal: str) -> bool:
    """Whether some certificate could become this principal by the rule."""
    template = rule.principal
    for place in range(1, rule.pattern.count("*") + 1):
        template = template.replace(f"{{{place}}}", "*")
    return captured(template, principal) is not None


def captured(pattern: str, text: str) -> tuple[str, ...] | None:
    """Return the texts that the ``*`` of the pattern stand for, or None if the whole text does not match. Each but the
    last takes as little as possible."""
    first, *rest = pattern.split("*")
    if not rest:
        return () if text == pattern else None
    *middle, last = rest
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return None
    at, end, found = len(first), len(text) - len(last), []
    for piece in middle:
        place = text.find(piece, at, end)
        if place < 0:
            return None
        found.append(text[at:place])
        at = place + len(piece)
    return (*found, text[at:end])


def _filled(template: str, texts: tuple[str, ...]) -> str:
    """Replace ``{1}``, ``{2}`` and so on, in one pass: a text that contains ``{2}`` stays as it is."""
    pieces = template.split("{")
    filled = pieces[0]
    for piece in pieces[1:]:
        place, brace, after = piece.partition("}")
        if not brace or not place.isascii() or not place.isdigit() or not 1 <= int(place) <= len(texts):
            raise InvalidArgument(
                f"{template!r} cannot be the name that a certificate maps to: {{1}} to {{{len(texts)}}} stand for the "
                "texts of the '*' in the pattern"
                if texts
                else f"{template!r} cannot be the name that a certificate maps to: the pattern has no '*' that "
                "{...} could stand for"
            )
        filled += texts[int(place) - 1] + after
    return filled
