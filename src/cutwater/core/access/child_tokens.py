"""Child tokens: short-lived tokens that a principal makes of the token that it shows, for a browser for example.

A child has the principal of its parent, no more scopes, and an end that is not later. It ends with its parent, at once,
whatever ends that. A child has no children, so there is one level.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from cutwater.core.access import access_decisions as a
from cutwater.core.access import access_requests as q
from cutwater.core.access import access_state as s
from cutwater.core.access.principals import DAY_US, SCOPES_MAX, Scope, TokenRecord, check_token
from cutwater.core.access.rights import Resource, ResourcePattern, Right, check_pattern, check_rights, name_matches
from cutwater.core.access.rules import sufficient
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused
from cutwater.types import CutTime

CHILD_US_MAX = DAY_US
"""How long a child lives at most."""
CHILDREN_MAX = 100
"""Living children of one token."""
CHILDREN_BYTES_MAX = 128 * 1024
"""Size of all living children of one principal. Every principal may make children, and all servers keep them."""


def create_child(
    request: q.CreateChildTokenRequest, state: s.AccessState, now: CutTime, origin: RequestOrigin | None
) -> a.CreateToken | None:
    """Return the decision that makes a child of the token that the caller has shown; None if there is this child."""
    check_token(request.id, request.sha256)
    parent = _shown(state, origin)
    if parent.parent is not UNSET:
        raise Refused(
            f"token {parent.id} is a child of token {parent.parent}, and a child has no children: show that token"
        )
    if parent.of_job is not UNSET:
        raise Refused(f"token {parent.id} is a job's and ends with its assignment, so it has no children")
    scopes = _checked_scopes(request.scopes, parent)
    known = state.tokens.get(request.id)
    if known is not None:
        if (known.sha256, known.parent, known.scopes, known.expires) == (
            *(request.sha256, parent.id, scopes, request.expires),
        ):
            return None
        raise AlreadyExists(f"there is a token {request.id} already: make another one, with a random id")
    _check_end(request.expires, parent, now)
    living = [one for one in state.tokens.values() if one.parent is not UNSET and not one.is_expired(now)]
    if sum(one.parent == parent.id for one in living) >= CHILDREN_MAX:
        raise Refused(
            f"token {parent.id} has {CHILDREN_MAX} living children, which is the most: end those that are not needed"
        )
    if len(living) >= s.CHILDREN_MAX:
        raise Refused(f"there are {len(living)} living children of tokens, which is the most: try again later")
    made = a.CreateToken(request.id, request.sha256, parent.principal, scopes, request.expires, parent=parent.id)
    size = len(msgspec.msgpack.encode(made))
    own = size + sum(s.token_size(one) for one in living if one.principal == parent.principal)
    if own > CHILDREN_BYTES_MAX:
        raise Refused(
            f"the living children of all tokens of {parent.principal} would take {own} bytes, and {CHILDREN_BYTES_MAX} "
            "is the most: end those that are not needed, or give them fewer scopes"
        )
    if size + sum(map(s.token_size, living)) > s.CHILDREN_BYTES_MAX:
        raise Refused("the living children of all tokens take too much room: try again later")
    return made


def end_own(request: q.EndOwnTokenRequest, state: s.AccessState, origin: RequestOrigin | None) -> a.RevokeToken:
    """Return the decision that ends the token that the caller has shown, or a child of it."""
    shown = _shown(state, origin)
    if request.id in ("", shown.id):
        return a.RevokeToken(shown.id)
    child = state.tokens.get(request.id)
    if child is None or child.parent != shown.id:
        # Whether another token has this id is not told.
        raise NotFound(f"token {shown.id} has no child with this id: it may have ended already")
    return a.RevokeToken(child.id)


def _shown(state: s.AccessState, origin: RequestOrigin | None) -> TokenRecord:
    shown = state.tokens.get(origin.token) if origin is not None and origin.token else None
    if shown is None:
        raise Refused("this is about the token that the caller shows, and none was shown: connect with a token")
    return shown


def _check_end(expires: CutTime, parent: TokenRecord, now: CutTime) -> None:
    if expires <= now:
        raise InvalidArgument(
            f"the child would end at {expires}, which is past (now: {now}, microseconds UTC): every child has an end, "
            "in the next 24 hours"
        )
    if expires > now + CHILD_US_MAX:
        raise InvalidArgument(
            f"the child would end at {expires}, more than 24 hours from now ({now}, microseconds UTC): give an earlier "
            "end, and make another child when it comes"
        )
    if parent.expires and expires > parent.expires:
        raise InvalidArgument(
            f"the child would end at {expires}, after its parent, token {parent.id}, at {parent.expires} (microseconds "
            "UTC): give an earlier end"
        )


def _checked_scopes(scopes: tuple[Scope, ...], parent: TokenRecord) -> tuple[Scope, ...]:
    """Return the scopes of the child, which are those of its parent if none are given."""
    if len(scopes) > SCOPES_MAX:
        raise InvalidArgument(f"{len(scopes)} scopes of one token are too many: {SCOPES_MAX} is the most")
    checked = []
    for scope in scopes:
        check_pattern(scope.pattern)
        rights = check_rights(scope.rights, scope.pattern)
        for right in rights:
            if parent.scopes and not any(_covers(one, right, scope.pattern) for one in parent.scopes):
                raise Refused(
                    f"token {parent.id} has no scope with {right} on {scope.pattern}, so its child cannot have one; "
                    f"it has: {'; '.join(map(str, parent.scopes))}"
                )
        checked.append(Scope(tuple(map(str, rights)), scope.pattern))
    return tuple(checked) or parent.scopes


def _covers(scope: Scope, right: Right, pattern: ResourcePattern) -> bool:
    """Whether a scope includes a right on everything that the pattern matches."""
    for needed, on in sufficient(right, Resource(pattern.kind, pattern.name)):
        if needed not in scope.rights or on.kind != scope.pattern.kind:
            continue
        if on.kind != pattern.kind or on.name != pattern.name:
            # Another right includes it: that of an administrator on all names, others on one name only.
            if not pattern.is_prefix or needed in (Right.CLUSTER_ADMIN, Right.CLUSTER_OPERATE):
                return True
        elif scope.pattern.is_prefix:
            return name_matches(scope.pattern.name, pattern.name)
        elif not pattern.is_prefix and scope.pattern.name == pattern.name:
            return True
    return False
