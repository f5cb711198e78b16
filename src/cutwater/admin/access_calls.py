"""Access control as calls: tokens, rules, groups, quotas, principals, certificates and the mode.

Texts are as on the command line: rights by name, resources as ``topic:orders``, ``topic:orders*`` or ``cluster``, and
subjects as the name of a principal or ``group:<name>``. A change is durable when its call returns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.denials import quoted
from cutwater.core.access.principals import (
    DAY_US,
    EXPIRES_US_MAX,
    TOKEN_ID_BYTES,
    TOKEN_SECRET_BYTES,
    CertificateRule,
    PrincipalGroup,
    Scope,
    make_token,
    token_hash,
    token_id,
)
from cutwater.core.access.quotas import Quota, QuotaLimits
from cutwater.core.access.rights import check_rights, parse_pattern, parse_resource, parse_right
from cutwater.core.access.rules import Rule
from cutwater.core.requests import Request
from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied
from cutwater.protocol.errors import ConnectionLost, Unauthenticated
from cutwater.runtime import system
from cutwater.types import CutTime, Revision

A = TypeVar("A")
P = TypeVar("P", q.TokenList, q.RuleList, q.GroupList, q.QuotaList, q.PrincipalList)
T = TypeVar("T")

NEVER = 0
LAST_EXPIRY_US = int(EXPIRES_US_MAX)
"""The latest end that a token may have, in microseconds UTC."""


class Asking(Protocol):
    """Asks the leader of the metadata repository, as ``Repository.ask`` does."""

    def __call__(self, request: Request, expected: type[A], *, idempotent: bool = True) -> Awaitable[A]: ...


class CreatedToken(Struct, frozen=True):
    """A new token. ``token`` is its text, which is known here only: no server has it, and it cannot be shown again."""

    id: str
    principal: str
    expires: int
    token: str
    unconfirmed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Leave out the secret."""
        return f"CreatedToken(id={self.id!r}, principal={self.principal!r})"


class AccessCalls:
    """See the module. ``Admin.control`` has these calls for the cluster that it administers."""

    def __init__(self, ask: Asking) -> None:
        self._ask = ask

    # Tokens.

    async def create_token(
        self, principal: str, *, scopes: Sequence[str] = (), expires_us: int = NEVER, text: str = ""
    ) -> CreatedToken:
        """Make a token for a principal. A scope is written ``append,describe topic:orders``; with scopes, the token has
        only those rights of its principal that one of them covers. ``expires_us``: microseconds since 1970, UTC.
        ``text``: that of ``new_token``, which the caller has kept already, so that it can repeat this."""
        return await self._create_token(principal, tuple(parse_scope(scope) for scope in scopes), expires_us, text)

    async def _create_token(
        self, principal: str, scopes: tuple[Scope, ...], expires_us: int, kept: str = ""
    ) -> CreatedToken:
        text = kept or new_token()
        identifier = id_of_token(text)
        request = q.CreateTokenRequest(identifier, hash_of_token(text), principal, scopes, CutTime(expires_us))
        try:
            changed = await self._ask(request, q.AccessChanged)
        except AlreadyExists:
            # It was made before, with an end that was counted from another moment.
            known = await self.token(identifier) if kept else None
            if known is None or (known.principal, known.scopes) != (principal, scopes):
                raise
            return CreatedToken(identifier, principal, known.expires, text, ())
        return CreatedToken(identifier, principal, expires_us, text, changed.unconfirmed)

    async def revoke_token(self, identifier: str) -> q.AccessChanged:
        """Revoke a token. Returns when every server that is in contact acts by it; ``unconfirmed`` names the others. If
        it is the caller's own, its connection ends with it, so it is not known which these are."""
        request = q.RevokeTokenRequest(checked_id(identifier))
        is_own = (await self.who_am_i()).token == identifier
        try:
            return await self._ask(request, q.AccessChanged, idempotent=False)
        except (ConnectionLost, Unauthenticated):
            if not is_own or await self._is_shown(identifier):
                raise
        return q.AccessChanged(Revision(0))

    async def _is_shown(self, identifier: str) -> bool:
        """Return whether the token still proves the identity of the caller, which shows it."""
        try:
            return (await self.who_am_i()).token == identifier
        except Unauthenticated:
            return False

    async def expire_token(self, identifier: str, expires_us: int) -> q.AccessChanged:
        """Let a token end at this time, in microseconds since 1970, UTC; earlier than it would have."""
        return await self._ask(q.ExpireTokenRequest(checked_id(identifier), CutTime(expires_us)), q.AccessChanged)

    async def rotate_token(
        self, identifier: str, old_ends_us: int, *, expires_us: int = NEVER, text: str = ""
    ) -> CreatedToken:
        """Make a token that takes the place of this one: with its principal and scopes, and a new id and secret. The
        old one works until ``old_ends_us``, or until it would have ended. If this is interrupted, both work. For
        ``text`` see ``create_token``."""
        old = await self.token(identifier)
        if old.parent:
            raise InvalidArgument(
                f"token {identifier} is a child of token {old.parent} and ends soon: make another child instead"
            )
        made = await self._create_token(old.principal, old.scopes, expires_us, text)
        if old.expires and old.expires <= old_ends_us:
            return made
        changed = await self.expire_token(identifier, old_ends_us)
        left = tuple(sorted({*made.unconfirmed, *changed.unconfirmed}))
        return CreatedToken(made.id, made.principal, made.expires, made.token, left)

    async def create_child_token(self, expires_us: int, *, scopes: Sequence[str] = ()) -> CreatedToken:
        """Make a child of the token that the caller shows, for a browser for example: with the same principal, no more
        scopes, and an end within 24 hours. Ending the token ends its children, at once."""
        text = new_token()
        identifier = id_of_token(text)
        parsed = tuple(parse_scope(scope) for scope in scopes)
        request = q.CreateChildTokenRequest(identifier, hash_of_token(text), CutTime(expires_us), parsed)
        changed = await self._ask(request, q.AccessChanged)
        principal = (await self.who_am_i()).principal
        return CreatedToken(identifier, principal, expires_us, text, changed.unconfirmed)

    async def end_own_token(self, identifier: str = "") -> q.AccessChanged:
        """End the token that the caller shows, with its children; or one of its children. As for ``revoke_token``, it
        is not known which servers have confirmed the end of the caller's own."""
        request = q.EndOwnTokenRequest(checked_id(identifier) if identifier else "")
        own = (await self.who_am_i()).token
        try:
            return await self._ask(request, q.AccessChanged, idempotent=False)
        except (ConnectionLost, Unauthenticated):
            if identifier not in ("", own) or await self._is_shown(own):
                raise
        return q.AccessChanged(Revision(0))

    async def tokens(self, principal: str = "") -> tuple[q.TokenInfo, ...]:
        """Return all tokens, or those of one principal."""
        return await self._all(
            lambda after: q.ListTokensRequest(principal, after), q.TokenList, lambda page: page.tokens, lambda t: t.id
        )

    async def token(self, identifier: str) -> q.TokenInfo:
        return (await self._ask(q.DescribeTokenRequest(checked_id(identifier)), q.TokenList)).tokens[0]

    # Rules.

    async def allow(self, subject: str, rights: Sequence[str], resource: str) -> q.AccessChanged:
        """Give rights on a resource, or a pattern of resources, to a principal or a group."""
        pattern = parse_pattern(resource)
        checked = tuple(map(str, check_rights(tuple(rights), pattern)))
        return await self._ask(q.AllowRequest(subject, checked, pattern), q.AccessChanged)

    async def remove(self, subject: str, resource: str, rights: Sequence[str] = ()) -> q.AccessChanged:
        """Take rights away that a rule gives on exactly this pattern; all of them if none is named."""
        request = q.RemoveRightsRequest(
            subject, parse_pattern(resource), tuple(str(parse_right(right)) for right in rights)
        )
        return await self._ask(request, q.AccessChanged, idempotent=False)

    async def rules(self, subject: str = "") -> tuple[Rule, ...]:
        """Return all rules, or those of one principal or group."""
        found: list[Rule] = []
        while True:
            page = await self._ask(q.ListRulesRequest(subject, len(found)), q.RuleList)
            found += page.rules
            if not page.more:
                return tuple(found)

    async def check(self, principal: str, right: str, resource: str, *, token: str = "") -> q.AccessVerdict:
        """Ask whether a principal has a right, and which rule says so. Nothing is executed."""
        request = q.CheckAccessRequest(principal, str(parse_right(right)), parse_resource(resource), token)
        return await self._ask(request, q.AccessVerdict)

    # Groups.

    async def create_group(self, name: str, members: Sequence[str] = ()) -> q.AccessChanged:
        return await self._ask(q.CreateGroupRequest(name, tuple(members)), q.AccessChanged)

    async def change_group(self, name: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> q.AccessChanged:
        request = q.ChangeGroupRequest(name, tuple(add), tuple(remove))
        return await self._ask(request, q.AccessChanged, idempotent=not remove)

    async def delete_group(self, name: str) -> q.AccessChanged:
        """Delete a group, and the rules and the quota that name it."""
        return await self._ask(q.DeleteGroupRequest(name), q.AccessChanged, idempotent=False)

    async def groups(self, name: str = "") -> tuple[PrincipalGroup, ...]:
        return await self._all(
            lambda after: q.ListGroupsRequest(name, after), q.GroupList, lambda page: page.groups, lambda g: g.name
        )

    # Quotas.

    async def set_quota(self, subject: str, **limits: int | None) -> q.AccessChanged:
        """Set all limits of a principal or group, by the names of the fields of ``QuotaLimits``. Those that are left
        out do not hold."""
        return await self._ask(q.SetQuotaRequest(subject, QuotaLimits(**limits)), q.AccessChanged)

    async def remove_quota(self, subject: str) -> q.AccessChanged:
        return await self._ask(q.RemoveQuotaRequest(subject), q.AccessChanged, idempotent=False)

    async def quotas(self, subject: str = "") -> tuple[Quota, ...]:
        return await self._all(
            lambda after: q.ListQuotasRequest(subject, after),
            q.QuotaList,
            lambda page: page.quotas,
            lambda s: s.subject,
        )

    async def quota(self, subject: str) -> Quota:
        return (await self.quota_use(subject))[0]

    async def quota_use(self, subject: str) -> tuple[Quota, q.QuotaUsed | None]:
        """Return the quota of a principal or group, and what is used of it now in the whole cluster. The latter is
        None while quotas do not hold, which is unless access control is ``enforced``."""
        found = await self._ask(q.ListQuotasRequest(subject, with_use=True), q.QuotaList)
        if not found.quotas:
            raise NotFound(f"{subject!r} has no quota of its own: `cutwater quota list` shows those that exist")
        return found.quotas[0], found.used[0] if found.used else None

    # Principals and certificates.

    async def principals(self) -> tuple[str, ...]:
        return await self._all(
            q.ListPrincipalsRequest, q.PrincipalList, lambda page: page.principals, lambda name: name
        )

    async def principal(self, name: str) -> q.PrincipalDescription:
        return await self._ask(q.DescribePrincipalRequest(name), q.PrincipalDescription)

    async def set_certificate_rules(self, rules: Sequence[CertificateRule]) -> q.AccessChanged:
        """Replace all rules that map certificates to principals. The first that matches decides."""
        return await self._ask(q.SetCertificateRulesRequest(tuple(rules)), q.AccessChanged)

    async def certificate_rules(self) -> tuple[CertificateRule, ...]:
        return (await self._ask(q.ListCertificateRulesRequest(), q.CertificateRuleList)).rules

    # The mode, and the caller.

    async def set_mode(self, mode: str) -> q.AccessChanged:
        return await self._ask(q.SetAccessModeRequest(parse_mode(mode)), q.AccessChanged)

    async def unconfirmed(self, changed: q.AccessChanged | None = None) -> tuple[str, ...]:
        """Wait until every server acts by this change, or by all changes, for as long as a change waits for that. Names
        the servers that do not."""
        revision = changed.revision if changed is not None else Revision(0)
        return (await self._ask(q.ConfirmAccessRequest(revision), q.AccessChanged)).unconfirmed

    async def who_am_i(self) -> q.WhoAmI:
        return await self._ask(q.WhoAmIRequest(), q.WhoAmI)

    async def _all(
        self,
        request: Callable[[str], Request],
        expected: type[P],
        items: Callable[[P], tuple[T, ...]],
        key: Callable[[T], str],
    ) -> tuple[T, ...]:
        """Ask for all pages of a list."""
        found: list[T] = []
        while True:
            page = await self._ask(request(key(found[-1]) if found else ""), expected)
            found += items(page)
            if not page.more:
                return tuple(found)


def new_token() -> str:
    """Make the text of a token, from random bytes."""
    return make_token(system.token_bytes(TOKEN_ID_BYTES), system.token_bytes(TOKEN_SECRET_BYTES))


def id_of_token(text: str) -> str:
    found = token_id(text)
    assert found is not None
    return found


def hash_of_token(text: str) -> str:
    """Return what the cluster stores of a token."""
    return token_hash(text)


def checked_id(text: str) -> str:
    """Return the id of a token. A whole token is refused, and not repeated in the message."""
    if token_id(text) is not None:
        raise InvalidArgument(
            "this is a whole token, with its secret, and its id is wanted: the 16 digits after 'cwt_'. Others may have "
            "seen it on the command line, so make another one and revoke it"
        )
    return text


def parse_scope(text: str) -> Scope:
    """Parse ``RIGHT[,RIGHT…] RESOURCE``."""
    words = text.split()
    if len(words) != 2:
        raise InvalidArgument(
            f"{text!r} is no scope: write rights and a resource, such as 'append,describe topic:orders'"
        )
    pattern = parse_pattern(words[1])
    return Scope(tuple(map(str, check_rights(parse_rights(words[0]), pattern))), pattern)


def parse_rights(text: str) -> tuple[str, ...]:
    """Parse rights with commas between."""
    return tuple(str(parse_right(word)) for word in text.split(",") if word)


def parse_mode(text: str) -> AccessMode:
    try:
        return AccessMode(text)
    except ValueError:
        raise InvalidArgument(f"there is no mode {text!r} of access control; modes: {', '.join(AccessMode)}") from None


def under_parents(tokens: Iterable[q.TokenInfo]) -> list[q.TokenInfo]:
    """Return tokens in the order of their ids, and each child after its parent."""
    return sorted(tokens, key=lambda token: (token.parent or token.id, token.parent != "", token.id))


def is_unused(token: q.TokenInfo) -> bool:
    return token.last_used_day == 0 and not token.parent


def last_used_us(token: q.TokenInfo) -> int:
    """Return the day on which a token was last used, as microseconds since 1970; 0 if never."""
    return token.last_used_day * DAY_US


async def denied_with(control: AccessCalls, *, denied: PermissionDenied, other: str) -> PermissionDenied:
    """Return a denial that also names the ``other`` right that what was denied needs on the same resource, if the
    principal lacks that, too: an administrator then gives both at once."""
    principal, resource = denied.principal, denied.resource
    if not principal:
        return denied
    verdict = await control.check(principal, other, resource)
    if verdict.missing is not q.Missing.RULE:
        return denied
    command = f"cutwater acl allow {quoted(principal)} {denied.right},{other} {quoted(resource)}"
    return PermissionDenied(
        f"{principal} lacks the rights {denied.right} and {other} on {resource}: no rule gives them; an administrator "
        f"can, with `{command}`",
        principal=principal,
        right=denied.right,
        resource=resource,
    )
