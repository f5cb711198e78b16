"""Requests to the metadata repository about access control, and its answers. Plain data.

No answer contains the hash of a token. Long lists come in pages: the next one begins after the last name of this one.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import CertificateRule, PrincipalGroup, Scope
from cutwater.core.access.quotas import Quota, QuotaLimits
from cutwater.core.access.rights import Resource, ResourcePattern
from cutwater.core.access.rules import Rule
from cutwater.types import CutTime, Revision

PAGE_MAX = 1_000
PAGE_CHARS_MAX = 256 * 1024
"""A page has at most this many items, and about this many characters, so that it fits into one message."""

# Tokens.


class CreateTokenRequest(Struct, frozen=True, tag=True):
    """Make a token known, which the caller has made and shows once. The same request again changes nothing.

    ``expires`` is 0 if the token never does. Without ``scopes``, the token has all rights of its principal.
    """

    id: str
    sha256: str
    principal: str
    scopes: tuple[Scope, ...] = ()
    expires: CutTime = CutTime(0)


class RevokeTokenRequest(Struct, frozen=True, tag=True):
    id: str


class ExpireTokenRequest(Struct, frozen=True, tag=True):
    """Let a token end at this time. It may only be earlier than the token would have ended."""

    id: str
    expires: CutTime


class CreateChildTokenRequest(Struct, frozen=True, tag=True):
    """Make a child of the token that the caller has shown, with the same principal. Without ``scopes``, it has those of
    its parent, and otherwise no more than these. It ends with its parent, and within 24 hours. The caller has made it,
    as for ``CreateTokenRequest``; the same request again changes nothing."""

    id: str
    sha256: str
    expires: CutTime
    scopes: tuple[Scope, ...] = ()


class EndOwnTokenRequest(Struct, frozen=True, tag=True):
    """End the token that the caller has shown, with its children; or one child of it, if ``id`` names one."""

    id: str = ""


class ListTokensRequest(Struct, frozen=True, tag=True):
    """Ask for tokens by id, of one principal if it is given."""

    principal: str = ""
    after: str = ""


class DescribeTokenRequest(Struct, frozen=True, tag=True):
    id: str


class NoteTokenUseRequest(Struct, frozen=True, tag=True):
    """A server tells which tokens were used on which days, counted from 1970-01-01, each once a day."""

    days: dict[str, int]


# Rules.


class AllowRequest(Struct, frozen=True, tag=True):
    """Give rights on a pattern of resources to a principal or ``group:<name>``."""

    subject: str
    rights: tuple[str, ...]
    pattern: ResourcePattern


class RemoveRightsRequest(Struct, frozen=True, tag=True):
    """Take rights away that a rule gives to this subject on exactly this pattern. Without ``rights``: all of them."""

    subject: str
    pattern: ResourcePattern
    rights: tuple[str, ...] = ()


class ListRulesRequest(Struct, frozen=True, tag=True):
    """Ask for rules, of one subject if it is given. ``after`` is the number of rules to skip."""

    subject: str = ""
    after: int = 0


class CheckAccessRequest(Struct, frozen=True, tag=True):
    """Ask whether a principal has a right on a resource, and which rule says so. Nothing is executed."""

    principal: str
    right: str
    resource: Resource
    token: str = ""


# Groups, certificates, quotas, principals and the mode.


class CreateGroupRequest(Struct, frozen=True, tag=True):
    name: str
    members: tuple[str, ...] = ()


class ChangeGroupRequest(Struct, frozen=True, tag=True):
    name: str
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class DeleteGroupRequest(Struct, frozen=True, tag=True):
    name: str


class ListGroupsRequest(Struct, frozen=True, tag=True):
    """Ask for groups, or for one of them."""

    name: str = ""
    after: str = ""


class SetCertificateRulesRequest(Struct, frozen=True, tag=True):
    """Replace all rules that map certificates to principals."""

    rules: tuple[CertificateRule, ...]


class ListCertificateRulesRequest(Struct, frozen=True, tag=True):
    pass


class SetQuotaRequest(Struct, frozen=True, tag=True):
    """Set all limits of a principal or ``group:<name>``; those not given do not hold."""

    subject: str
    limits: QuotaLimits


class RemoveQuotaRequest(Struct, frozen=True, tag=True):
    subject: str


class ListQuotasRequest(Struct, frozen=True, tag=True):
    """Ask for quotas, of one subject if it is given. ``with_use``: also for what is used of them now."""

    subject: str = ""
    after: str = ""
    with_use: bool = False


class ListPrincipalsRequest(Struct, frozen=True, tag=True):
    """Ask for all principals that a token, a rule, a group, a quota or a certificate rule names."""

    after: str = ""


class DescribePrincipalRequest(Struct, frozen=True, tag=True):
    principal: str


class SetAccessModeRequest(Struct, frozen=True, tag=True):
    mode: AccessMode


class WhoAmIRequest(Struct, frozen=True, tag=True):
    """Ask for which principal the caller counts. Every caller with credentials may ask."""


class ConfirmAccessRequest(Struct, frozen=True, tag=True):
    """Ask which servers of the cluster do not act by this revision or a later one; 0 stands for the present one. The
    answer comes when all do, or after the time that a change waits for them. Nothing is changed."""

    revision: Revision = Revision(0)


AccessRequest = (
    CreateTokenRequest
    | RevokeTokenRequest
    | ExpireTokenRequest
    | CreateChildTokenRequest
    | EndOwnTokenRequest
    | ListTokensRequest
    | DescribeTokenRequest
    | NoteTokenUseRequest
    | AllowRequest
    | RemoveRightsRequest
    | ListRulesRequest
    | CheckAccessRequest
    | CreateGroupRequest
    | ChangeGroupRequest
    | DeleteGroupRequest
    | ListGroupsRequest
    | SetCertificateRulesRequest
    | ListCertificateRulesRequest
    | SetQuotaRequest
    | RemoveQuotaRequest
    | ListQuotasRequest
    | ListPrincipalsRequest
    | DescribePrincipalRequest
    | SetAccessModeRequest
    | WhoAmIRequest
    | ConfirmAccessRequest
)

# Answers. The changes are answered with ``AccessChanged``.


class AccessChanged(Struct, frozen=True, tag=True):
    """The change is decided and stored. Servers that have this revision or a later one act by it. ``unconfirmed`` names
    the servers that have not said in time that they do; without contact to the leader, they refuse clients soon."""

    revision: Revision
    unconfirmed: tuple[str, ...] = ()


class TokenInfo(Struct, frozen=True):
    """A token without its hash, see ``TokenRecord``."""

    id: str
    principal: str
    scopes: tuple[Scope, ...]
    expires: CutTime
    creator: str
    created: CutTime
    last_used_day: int
    parent: str = ""
    """The token of which it is a child, if it is one."""


class TokenList(Struct, frozen=True, tag=True):
    """``more``: there are further ones."""

    tokens: tuple[TokenInfo, ...]
    more: bool = False


class RuleList(Struct, frozen=True, tag=True):
    rules: tuple[Rule, ...]
    more: bool = False


class GroupList(Struct, frozen=True, tag=True):
    groups: tuple[PrincipalGroup, ...]
    more: bool = False


class CertificateRuleList(Struct, frozen=True, tag=True):
    rules: tuple[CertificateRule, ...]


class QuotaUsed(Struct, frozen=True):
    """How much of its limits ``subject`` uses now, in the whole cluster. Rates are averages over some seconds, at
    most two seconds old. Only limits that are set have a number."""

    subject: str
    used: QuotaLimits


class QuotaList(Struct, frozen=True, tag=True):
    """``used``: as many as ``quotas``, if that was asked for and quotas hold: access control is ``enforced``."""

    quotas: tuple[Quota, ...]
    more: bool = False
    used: tuple[QuotaUsed, ...] = ()


class PrincipalList(Struct, frozen=True, tag=True):
    principals: tuple[str, ...]
    more: bool = False


class PrincipalDescription(Struct, frozen=True, tag=True):
    """A principal: its groups, its own rules and those of its groups, the quotas that apply, and its tokens. ``more``:
    there are further rules or tokens, see their lists."""

    principal: str
    groups: tuple[str, ...]
    rules: tuple[Rule, ...]
    quotas: tuple[Quota, ...]
    tokens: tuple[TokenInfo, ...]
    is_admin: bool
    more: bool = False


class Missing(enum.StrEnum):
    """What a caller lacks, if it lacks a right."""

    CREDENTIALS = "credentials"
    TOKEN = "token"
    RULE = "rule"
    SCOPE = "scope"


class AccessVerdict(Struct, frozen=True, tag=True):
    """The answer to a question about a right. ``rule`` is the rule that allows it; None if the answer is no, or if no
    rule is needed. ``missing`` says what is missing if the answer is no, and ``why`` says all of it in words."""

    principal: str
    right: str
    resource: Resource
    is_allowed: bool
    rule: Rule | None = None
    why: str = ""
    token: str = ""
    missing: Missing | None = None


class WhoAmI(Struct, frozen=True, tag=True):
    """The caller, as access control sees it. While that is off, no caller has a principal. ``token`` is the id of the
    token that the caller showed, if any."""

    principal: str
    token: str
    groups: tuple[str, ...]
    mode: AccessMode
    is_admin: bool = False
    scopes: tuple[Scope, ...] = ()
    """What the token is limited to; empty if it has all rights of its principal."""
    expires: CutTime = CutTime(0)
    """When the token ends; 0 if it does not."""
    parent: str = ""
    """The token of which it is a child, if it is one."""


AccessAnswer = (
    AccessChanged
    | TokenList
    | RuleList
    | GroupList
    | CertificateRuleList
    | QuotaList
    | PrincipalList
    | PrincipalDescription
    | AccessVerdict
    | WhoAmI
)


class AccessSummary(Struct, frozen=True):
    """Access control in the description of the cluster."""

    mode: AccessMode = AccessMode.OFF
    revision: Revision = Revision(0)
    tokens: int = 0
    rules: int = 0
    groups: int = 0
    quotas: int = 0
