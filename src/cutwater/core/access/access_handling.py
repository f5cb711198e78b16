"""Turns a request about access control into decisions and an answer, after validating it.

The servers have checked that the caller may ask this. What they cannot check is here: while access control is off,
every client may ask everything, so changes are for ``LOCAL_ADMIN`` only; and no change may leave the cluster without an
administrator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from msgspec import UNSET

from cutwater.core.access import access_decisions as a
from cutwater.core.access import access_requests as q
from cutwater.core.access import access_state as s
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.child_tokens import create_child, end_own
from cutwater.core.access.denials import quoted
from cutwater.core.access.principals import (
    DAY_US,
    EXPIRES_US_MAX,
    GROUP_PREFIX,
    LOCAL_ADMIN,
    SCOPES_MAX,
    PrincipalGroup,
    Scope,
    TokenRecord,
    check_certificate_rule,
    check_group,
    check_member,
    check_principal,
    check_subject,
    check_token,
)
from cutwater.core.access.quotas import check_limits
from cutwater.core.access.rights import (
    ResourceKind,
    ResourcePattern,
    check_pattern,
    check_resource,
    check_rights,
    parse_right,
)
from cutwater.core.names import check_topic_name
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused
from cutwater.types import CutTime, Revision

AccessOutcome = tuple[tuple[a.AccessDecision, ...], q.AccessAnswer]
T = TypeVar("T")

ROOM_FOR_RECOVERY = 16
"""Number of tokens and rules above the limits, for a caller that has the key of a metadata node or the store: when all
are taken, an administrator can still be made that removes some."""

Change = (
    q.CreateTokenRequest
    | q.RevokeTokenRequest
    | q.ExpireTokenRequest
    | q.CreateChildTokenRequest
    | q.EndOwnTokenRequest
    | q.AllowRequest
    | q.RemoveRightsRequest
    | q.CreateGroupRequest
    | q.ChangeGroupRequest
    | q.DeleteGroupRequest
    | q.SetCertificateRulesRequest
    | q.SetQuotaRequest
    | q.RemoveQuotaRequest
    | q.SetAccessModeRequest
)
"""Requests that change rights."""


def decide_access(
    request: q.AccessRequest, state: s.AccessState, now: CutTime, origin: RequestOrigin | None
) -> AccessOutcome:
    """Return the decisions, and the answer to give once they are stored. Raise if the request cannot be carried out."""
    if isinstance(request, q.NoteTokenUseRequest):
        return _note_use(request, state, now)
    if isinstance(request, q.WhoAmIRequest):
        return (), _who(origin, state)
    if not isinstance(request, Change):
        return (), _answer(request, state)
    if state.mode is AccessMode.OFF and (origin is None or origin.principal != LOCAL_ADMIN):
        raise Refused(
            "access control is off, and only a caller with the key of a metadata node may change it: run "
            "`cutwater cluster secure` on a metadata node's machine"
        )
    is_local = origin is not None and origin.principal == LOCAL_ADMIN
    decision = _change(request, state, now, origin, room=ROOM_FOR_RECOVERY if is_local else 0)
    if decision is None:
        return (), q.AccessChanged(state.revision)
    after = state.after(decision)
    _check_admin(state, after, decision.expires if isinstance(decision, a.ExpireToken) else now)
    if not is_local:
        _check_size(state, after)
    return (decision,), q.AccessChanged(Revision(state.revision + 1))


def _check_size(state: s.AccessState, after: s.AccessState) -> None:
    size = after.size()
    if size > s.RULES_BYTES_MAX and size > state.size():
        raise Refused(
            f"tokens, rules and groups would take {size} bytes, and {s.RULES_BYTES_MAX // (1024 * 1024)} MiB is the "
            "most: remove those that are not needed, or use prefixes and shorter names"
        )


def _check_admin(state: s.AccessState, after: s.AccessState, now: CutTime) -> None:
    """Refuse a change that leaves access control on without an administrator that can prove its identity."""
    if after.mode is AccessMode.OFF or after.has_admin(now):
        return
    if state.mode is AccessMode.OFF:
        raise Refused(
            "access control cannot be turned on without an administrator: give cluster-admin to a principal (`cutwater "
            "acl allow NAME cluster-admin cluster`), and make a token without scopes for it or map a certificate to it"
        )
    if not state.has_admin(now):
        # The last token has expired meanwhile. What brings an administrator back, step by step, is not refused.
        return
    raise Refused(
        "this would leave the cluster without an administrator that can prove its identity, by a token or a "
        "certificate: make another one first"
    )


def _change(
    request: Change, state: s.AccessState, now: CutTime, origin: RequestOrigin | None, room: int
) -> a.AccessDecision | None:
    """Return the decision that makes the change; None if there is nothing to change. ``room`` is how many tokens and
    rules there may be above the limits."""
    match request:
        case q.CreateTokenRequest():
            return _create_token(request, state, now, room)
        case q.RevokeTokenRequest():
            _token(state, request.id)
            return a.RevokeToken(request.id)
        case q.ExpireTokenRequest():
            return _expire_token(request, state, now)
        case q.CreateChildTokenRequest():
            return create_child(request, state, now, origin)
        case q.EndOwnTokenRequest():
            return end_own(request, state, origin)
        case q.AllowRequest():
            return _allow(request, state, room)
        case q.RemoveRightsRequest():
            return _remove_rights(request, state)
        case q.CreateGroupRequest():
            return _create_group(request, state)
        case q.ChangeGroupRequest():
            return _change_group(request, state)
        case q.DeleteGroupRequest():
            _group(state, request.name)
            return a.DeleteGroup(request.name)
        case q.SetCertificateRulesRequest():
            if len(request.rules) > s.CERTIFICATE_RULES_MAX:
                raise _too_many("rules for certificates", len(request.rules), s.CERTIFICATE_RULES_MAX)
            for rule in request.rules:
                check_certificate_rule(rule)
            return None if request.rules == state.certificate_rules else a.SetCertificateRules(request.rules)
        case q.SetQuotaRequest():
            return _set_quota(request, state)
        case q.RemoveQuotaRequest():
            if request.subject not in state.quotas:
                raise NotFound(f"{request.subject!r} has no quota: `cutwater quota list` shows those that exist")
            return a.RemoveQuota(request.subject)
        case q.SetAccessModeRequest():
            return None if request.mode is state.mode else a.SetAccessMode(request.mode)


# Tokens.


def _create_token(request: q.CreateTokenRequest, state: s.AccessState, now: CutTime, room: int) -> a.CreateToken | None:
    check_token(request.id, request.sha256)
    check_principal(request.principal)
    if len(request.scopes) > SCOPES_MAX:
        raise _too_many("scopes of one token", len(request.scopes), SCOPES_MAX)
    scopes = tuple(_checked_scope(scope) for scope in request.scopes)
    known = state.tokens.get(request.id)
    asked = (request.sha256, request.principal, scopes, request.expires)
    if known is not None:
        if (known.sha256, known.principal, known.scopes, known.expires) == asked:
            return None
        raise AlreadyExists(f"there is a token {request.id} already: make another one, with a random id")
    if request.expires < 0 or 0 < request.expires <= now:
        raise InvalidArgument(
            f"the token would expire at {request.expires}, which is past (now: {now}, microseconds UTC): give a later "
            "time, or 0 for a token that never expires"
        )
    if request.expires > EXPIRES_US_MAX:
        raise InvalidArgument(
            f"the token would expire at {request.expires} (microseconds UTC), after the year 9999: give an earlier "
            "time, or 0 for a token that never expires"
        )
    count = state.count_tokens()
    if count >= s.TOKENS_MAX + room:
        raise Refused(f"there are {count} tokens, which is the most: revoke those that are not needed")
    return a.CreateToken(request.id, *asked)


def _expire_token(request: q.ExpireTokenRequest, state: s.AccessState, now: CutTime) -> a.ExpireToken | None:
    known = _token(state, request.id)
    if request.expires <= now:
        raise InvalidArgument(
            f"token {request.id} would end at {request.expires}, which is past (now: {now}, microseconds UTC): "
            f"`cutwater token revoke {request.id}` ends it at once"
        )
    if request.expires == known.expires:
        return None
    if 0 < known.expires < request.expires:
        raise Refused(
            f"token {request.id} ends at {known.expires} already (microseconds UTC), and a token never gets more time: "
            "make another one"
        )
    return a.ExpireToken(request.id, request.expires)


def _checked_scope(scope: Scope) -> Scope:
    check_pattern(scope.pattern)
    return Scope(tuple(map(str, check_rights(scope.rights, scope.pattern))), scope.pattern)


def _note_use(request: q.NoteTokenUseRequest, state: s.AccessState, now: CutTime) -> AccessOutcome:
    """Note days that are later than the known ones. A server's clock that is ahead counts as today."""
    today = now // DAY_US
    days = {
        token: min(day, today)
        for token, day in request.days.items()
        if token in state.tokens and min(day, today) > state.tokens[token].last_used_day
    }
    return ((a.NoteTokenUse(days),) if days else ()), q.AccessChanged(state.revision)


def _token(state: s.AccessState, identifier: str) -> TokenRecord:
    token = state.tokens.get(identifier)
    if token is None:
        # The text is not repeated: a caller may have sent a whole token instead of its id.
        raise NotFound("there is no token with this id: `cutwater token list` shows those that exist")
    return token


# Rules.


def _allow(request: q.AllowRequest, state: s.AccessState, room: int) -> a.AllowRights | None:
    check_subject(request.subject)
    check_pattern(request.pattern)
    if request.pattern.kind == ResourceKind.TOPIC and request.pattern.name:
        # The rule would match nothing. An earlier version may have stored one, and that can be removed.
        check_topic_name(request.pattern.name)
    rights = check_rights(request.rights, request.pattern)
    if request.subject.startswith(GROUP_PREFIX):
        _group(state, request.subject.removeprefix(GROUP_PREFIX))
    rule = state.rules.get((request.subject, request.pattern))
    if rule is None and len(state.rules) >= s.RULES_MAX + room:
        raise Refused(
            f"there are {len(state.rules)} rules, which is the most: use groups and prefixes (topic:orders*), or "
            "remove rules that are not needed"
        )
    new = tuple(str(right) for right in rights if rule is None or right not in rule.rights)
    return a.AllowRights(request.subject, new, request.pattern) if new else None


def _remove_rights(request: q.RemoveRightsRequest, state: s.AccessState) -> a.RemoveRights:
    rule = state.rules.get((request.subject, request.pattern))
    if rule is None:
        raise NotFound(
            f"there is no rule for {request.subject!r} on {request.pattern}: `cutwater acl list` shows those that "
            "exist, and a rule is removed by exactly its own pattern"
        )
    unknown = [right for right in request.rights if right not in rule.rights]
    if unknown:
        raise NotFound(f"the rule '{rule}' does not give the right {unknown[0]!r}; it gives {', '.join(rule.rights)}")
    taken = request.rights or rule.rights
    return a.RemoveRights(request.subject, tuple(right for right in rule.rights if right in taken), request.pattern)


# Groups and quotas.


def _create_group(request: q.CreateGroupRequest, state: s.AccessState) -> a.SetGroup | None:
    group = _checked_group(request.name, request.members)
    known = state.groups.get(request.name)
    if known is not None:
        if known == group:
            return None
        raise AlreadyExists(f"there is a group {request.name!r} already: change it, or choose another name")
    if len(state.groups) >= s.GROUPS_MAX:
        raise Refused(f"there are {len(state.groups)} groups, which is the most: delete those that are not needed")
    return a.SetGroup(group)


def _change_group(request: q.ChangeGroupRequest, state: s.AccessState) -> a.SetGroup | None:
    known = _group(state, request.name)
    missing = sorted(set(request.remove) - set(known.members))
    if missing:
        raise NotFound(f"{missing[0]!r} is no member of group {request.name!r}: nothing was changed")
    both = sorted(set(request.remove) & set(request.add))
    if both:
        raise InvalidArgument(f"{both[0]!r} is to be added and removed: name it once")
    members = (set(known.members) | set(request.add)) - set(request.remove)
    group = _checked_group(request.name, members)
    return None if group == known else a.SetGroup(group)


def _checked_group(name: str, members: Iterable[str]) -> PrincipalGroup:
    check_group(name)
    group = PrincipalGroup(name, tuple(sorted(set(members))))
    if len(group.members) > s.MEMBERS_MAX:
        raise _too_many("members of one group", len(group.members), s.MEMBERS_MAX)
    for member in group.members:
        check_member(member)
    return group


def _group(state: s.AccessState, name: str) -> PrincipalGroup:
    group = state.groups.get(name)
    if group is None:
        raise NotFound(
            f"there is no group {name!r}: create it first with `cutwater group create {quoted(name)}`, or see "
            "`cutwater group list`"
        )
    return group


def _set_quota(request: q.SetQuotaRequest, state: s.AccessState) -> a.SetQuota | None:
    check_subject(request.subject)
    check_limits(request.limits)
    if request.subject.startswith(GROUP_PREFIX):
        _group(state, request.subject.removeprefix(GROUP_PREFIX))
    known = state.quotas.get(request.subject)
    if known is None and len(state.quotas) >= s.QUOTAS_MAX:
        raise Refused(f"there are {len(state.quotas)} quotas, which is the most: use groups, or remove some")
    if known is not None and known.limits == request.limits:
        return None
    return a.SetQuota(request.subject, request.limits)


def _too_many(what: str, count: int, most: int) -> InvalidArgument:
    return InvalidArgument(f"{count} {what} are too many: {most} is the most")


# Questions.


def _is_listed(token: TokenRecord, principal: str) -> bool:
    """Whether a list has the token. Those of jobs, which come and go, are in that of the job's principal only."""
    return token.principal == principal if principal else token.of_job is UNSET


def _answer(request: q.AccessRequest, state: s.AccessState) -> q.AccessAnswer:
    match request:
        case q.ListTokensRequest():
            wanted = (
                _info(state.tokens[token])
                for token in sorted(state.tokens)
                if token > request.after and _is_listed(state.tokens[token], request.principal)
            )
            return q.TokenList(*_page(wanted))
        case q.DescribeTokenRequest():
            return q.TokenList((_info(_token(state, request.id)),))
        case q.ListRulesRequest():
            rules = [state.rules[key] for key in sorted(state.rules) if request.subject in ("", key[0])]
            return q.RuleList(*_page(rules[max(0, request.after) :]))
        case q.CheckAccessRequest():
            check_resource(request.resource)
            right = parse_right(request.right)
            check_rights((right,), ResourcePattern(request.resource.kind))
            return state.view.decide(request.principal, right, request.resource, request.token)
        case q.ListGroupsRequest():
            if request.name:
                return q.GroupList((_group(state, request.name),))
            return q.GroupList(*_page(state.groups[name] for name in sorted(state.groups) if name > request.after))
        case q.ListCertificateRulesRequest():
            return q.CertificateRuleList(state.certificate_rules)
        case q.ListQuotasRequest():
            subjects = (one for one in sorted(state.quotas) if one > request.after and request.subject in ("", one))
            return q.QuotaList(*_page(state.quotas[subject] for subject in subjects))
        case q.ListPrincipalsRequest():
            return q.PrincipalList(*_page(name for name in sorted(state.principals()) if name > request.after))
        case q.DescribePrincipalRequest():
            return _describe_principal(request.principal, state)
        case q.ConfirmAccessRequest():
            if request.revision > state.revision:
                raise InvalidArgument(
                    f"there is no revision {request.revision} of the access rules: the newest is {state.revision}"
                )
            return q.AccessChanged(request.revision or state.revision)
        case _:
            raise AssertionError(f"{type(request).__name__} is a change")


def _who(origin: RequestOrigin | None, state: s.AccessState) -> q.WhoAmI:
    if origin is None:
        return q.WhoAmI("", "", (), state.mode)
    name = origin.principal
    token = state.tokens.get(origin.token)
    limits = (token.scopes, token.expires, token.parent or "") if token is not None else ((), CutTime(0), "")
    return q.WhoAmI(name, origin.token, state.groups_of(name), state.mode, name in state.admins(), *limits)


def _describe_principal(principal: str, state: s.AccessState) -> q.PrincipalDescription:
    if principal not in state.principals():
        raise NotFound(
            f"nothing names a principal {principal!r}: no token, rule, group, quota or certificate rule. `cutwater "
            "principal list` shows those that are named"
        )
    subjects = state.subjects_of(principal)
    rules, more_rules = _page(state.rules[key] for key in sorted(state.rules) if key[0] in subjects)
    tokens, more_tokens = _page(
        _info(state.tokens[token]) for token in sorted(state.tokens) if state.tokens[token].principal == principal
    )
    return q.PrincipalDescription(
        principal,
        state.groups_of(principal),
        rules,
        tuple(state.quotas[subject] for subject in subjects if subject in state.quotas),
        tokens,
        principal in state.admins(),
        more_rules or more_tokens,
    )


def _info(token: TokenRecord) -> q.TokenInfo:
    return q.TokenInfo(
        *(token.id, token.principal, token.scopes, token.expires, token.creator, token.created, token.last_used_day),
        parent=token.parent or "",
    )


def _page(items: Iterable[T]) -> tuple[tuple[T, ...], bool]:
    """Return as many items as fit into one answer, and whether there are more."""
    found: list[T] = []
    size = 0
    for item in items:
        size += len(repr(item))
        if found and (len(found) >= q.PAGE_MAX or size > q.PAGE_CHARS_MAX):
            return tuple(found), True
        found.append(item)
    return tuple(found), False
