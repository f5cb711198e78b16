"""Answers questions about rights, from an immutable copy of the rules at one revision.

The leader has a view of its own state; other servers get the rules as ``AccessRules``. A view never changes: a new
revision makes a new view. Answers are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import AccessVerdict, Missing
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.principals import (
    GROUP_PREFIX,
    CertificateNames,
    TokenRecord,
    is_token_of,
    principal_of_certificate,
    token_id,
)
from cutwater.core.access.quotas import Quota
from cutwater.core.access.rights import ANY_NAME, AUDIT_TOPIC, Resource, ResourceKind, Right, name_matches
from cutwater.core.access.rules import GUARDED, Rule, sufficient
from cutwater.core.audit.audit_requests import AUDIT_PRODUCER

ANSWERS_MAX = 65_536
"""Number of answers that are remembered. All are forgotten when there are more."""
NAME_LENGTH_MAX = 255
"""Answers about longer names are not remembered."""
NOBODY = ""
"""The principal of a client without credentials."""
_NO_TOKEN = TokenRecord("", "0" * 64, NOBODY)


class TokenCheck(Struct, frozen=True):
    """``token`` is the record of a valid token; None if it is not valid, and then ``problem`` says why."""

    token: TokenRecord | None
    problem: str = ""


class AccessView:
    """See the module. ``rules`` is what the view was made from."""

    def __init__(self, rules: AccessRules) -> None:
        self.rules = rules
        self.revision = rules.revision
        self.mode = rules.mode
        self._tokens = {token.id: token for token in rules.tokens}
        self.expiring = {token.id: int(token.expires) for token in rules.tokens if token.expires}
        """When tokens end, in microseconds UTC. Looked into for every call."""
        self._groups: dict[str, list[str]] = {}
        for group in rules.groups:
            for member in group.members:
                self._groups.setdefault(member, []).append(GROUP_PREFIX + group.name)
        by_subject: dict[str, list[Rule]] = {}
        for rule in rules.rules:
            by_subject.setdefault(rule.subject, []).append(rule)
        self._grants = {subject: _Grants(its) for subject, its in by_subject.items()}
        self._scopes: dict[str, _Grants] = {}
        self._quotas = {quota.subject: quota for quota in rules.quotas}
        self._answers: dict[tuple[str, str, Resource, str], AccessVerdict] = {}

    # Rights.

    def decide(self, principal: str, right: Right, resource: Resource, token: str = "") -> AccessVerdict:
        """Return whether the rules give the principal this right, whatever the mode is. ``token`` is the id of the
        token with which it proved its identity, if it did so with one."""
        if principal == NOBODY or len(resource.name) > NAME_LENGTH_MAX:
            # A client without credentials could fill the memory with names that it makes up.
            return self._decide(principal, right, resource, token)
        key = (principal, right, resource, token)
        verdict = self._answers.get(key)
        if verdict is None:
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.clear()
            verdict = self._answers[key] = self._decide(principal, right, resource, token)
        return verdict

    def enforces(self, right: Right, resource: Resource) -> bool:
        """Whether a request without this right is refused. While the mode is permissive, only ``cluster-admin`` and
        ``cluster-operate`` are enforced, and what protects the audit: otherwise every client could make itself an
        administrator, add a storage node of its own, or remove the traces of that, before the rules hold."""
        if self.mode is AccessMode.PERMISSIVE:
            if resource.name == AUDIT_TOPIC and resource.kind == ResourceKind.TOPIC:
                return right in GUARDED
            if resource.name == AUDIT_PRODUCER and resource.kind == ResourceKind.PRODUCER:
                return right is Right.PRODUCE_AS
            return right in (Right.CLUSTER_ADMIN, Right.CLUSTER_OPERATE)
        return self.mode is AccessMode.ENFORCED

    def refusals(
        self, principal: str, questions: Iterable[tuple[Right, Resource]], token: str = ""
    ) -> tuple[AccessVerdict, ...]:
        """Return the questions that the rules answer with no, in order. Those whose right is not enforced now are for
        the record; the first of the others is the reason to refuse."""
        verdicts = (self.decide(principal, right, resource, token) for right, resource in questions)
        return tuple(verdict for verdict in verdicts if not verdict.is_allowed)

    def visible(self, principal: str, kind: ResourceKind, names: Iterable[str], token: str = "") -> frozenset[str]:
        """Return those of the names that the principal may describe."""
        return frozenset(
            name for name in names if self.decide(principal, Right.DESCRIBE, Resource(kind, name), token).is_allowed
        )

    def _decide(self, principal: str, right: Right, resource: Resource, token: str) -> AccessVerdict:
        def verdict(why: str, missing: Missing | None = None, rule: Rule | None = None) -> AccessVerdict:
            return AccessVerdict(principal, right, resource, missing is None, rule, why, token, missing)

        if principal == NOBODY:
            return verdict("a client without credentials has no rights", Missing.CREDENTIALS)
        if token and token not in self._tokens:
            return verdict(f"token {token} was revoked, or is not known here yet", Missing.TOKEN)
        is_own = resource.kind == ResourceKind.PRINCIPAL and resource.name == principal
        if right is Right.ACT_AS and is_own:
            return verdict("every principal may act as itself")
        is_self = right is Right.DESCRIBE and is_own
        rule = None if is_self else self._rule(principal, right, resource)
        if rule is None and not is_self:
            return verdict(f"no rule gives {principal} the right {right} on {resource}", Missing.RULE)
        scopes = self._scopes_of(token)
        if scopes is not None and scopes.find(right, resource) is None:
            return verdict(f"the scopes of token {token} do not include the right {right} on {resource}", Missing.SCOPE)
        why = f"the rule '{rule}'" if rule is not None else "every principal may describe itself"
        return verdict(why, rule=rule)

    def _rule(self, principal: str, right: Right, resource: Resource) -> Rule | None:
        for subject in (principal, *self._groups.get(principal, ())):
            grants = self._grants.get(subject)
            found = grants.find(right, resource) if grants is not None else None
            if found is not None:
                return found
        return None

    def _scopes_of(self, token: str) -> _Grants | None:
        """Return the scopes of a token as if they were rules; None if it has none."""
        scopes = self._tokens[token].scopes if token else ()
        if not scopes:
            return None
        if token not in self._scopes:
            self._scopes[token] = _Grants(Rule("", scope.rights, scope.pattern) for scope in scopes)
        return self._scopes[token]

    # Principals.

    def check_token(self, text: str, now: int) -> TokenCheck:
        """Find the token with this text. ``now`` is in microseconds UTC. Takes the same time for an unknown id as for a
        wrong secret, and the answer does not tell which it was."""
        known = self._tokens.get(token_id(text) or "")
        is_right = is_token_of(text, known or _NO_TOKEN)
        if known is None or not is_right:
            return TokenCheck(None, "the token is not known here: check which one is given, and whether it was revoked")
        if known.is_expired(now):
            return TokenCheck(None, f"token {known.id} has expired: ask an administrator for another one")
        return TokenCheck(known)

    def is_current(self, token: str, now: int) -> bool:
        """Whether the token with this id is known and has not expired: for connections that were opened earlier."""
        known = self._tokens.get(token)
        return known is not None and not known.is_expired(now)

    def principal_of(self, names: CertificateNames) -> str | None:
        """Return the principal of a certificate, or None if no rule maps it."""
        return principal_of_certificate(names, self.rules.certificate_rules)

    def quotas_of(self, principal: str) -> tuple[Quota, ...]:
        """Return all quotas that apply to the principal: its own first, then those of its groups."""
        subjects = (principal, *self._groups.get(principal, ()))
        return tuple(self._quotas[subject] for subject in subjects if subject in self._quotas)


class _Grants:
    """Rules of one subject, found by kind and right."""

    __slots__ = ("_literals", "_prefixes", "_some")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._literals: dict[tuple[str, str, str], Rule] = {}
        self._prefixes: dict[tuple[str, str], list[Rule]] = {}
        self._some: dict[tuple[str, str, str], Rule] = {}
        for rule in sorted(rules, key=lambda rule: -len(rule.pattern.name)):
            pattern = rule.pattern
            for right in rule.rights:
                if pattern.kind in (ResourceKind.TOPIC, ResourceKind.JOB):
                    self._some[pattern.kind, right, ANY_NAME] = rule
                if pattern.is_prefix:
                    self._prefixes.setdefault((pattern.kind, right), []).append(rule)
                else:
                    self._literals[pattern.kind, right, pattern.name] = rule

    def find(self, right: Right, resource: Resource) -> Rule | None:
        """Return the rule that gives the right: the most direct one, then the one with the longest pattern."""
        for needed, on in sufficient(right, resource):
            rule = self._literals.get((on.kind, needed, on.name)) or self._some.get((on.kind, needed, on.name))
            if rule is not None:
                return rule
            for rule in self._prefixes.get((on.kind, needed), ()):
                if name_matches(rule.pattern.name, on.name):
                    return rule
        return None
