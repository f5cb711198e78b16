"""Access control as folded from decisions: the part of the state of the cluster that ``OrderState.access`` holds."""

from __future__ import annotations

from collections.abc import Container

import msgspec
from msgspec import UNSET, structs

from cutwater.core.access import access_decisions as a
from cutwater.core.access.access_requests import AccessSummary
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_view import AccessView
from cutwater.core.access.principals import GROUP_PREFIX, TokenRecord, can_map_to
from cutwater.core.access.quotas import Quota
from cutwater.core.access.rights import CLUSTER, ResourcePattern, Right
from cutwater.core.access.rules import Rule
from cutwater.types import CutTime, JobEpoch, Revision

TOKENS_MAX = 10_000
CHILDREN_MAX = 5_000
"""Living children of all tokens. They do not count as tokens: clients must not use up what administrators need."""
CHILDREN_BYTES_MAX = 4 * 1024 * 1024
RULES_MAX = 10_000
GROUPS_MAX = 1_000
MEMBERS_MAX = 1_000
CERTIFICATE_RULES_MAX = 100
QUOTAS_MAX = 10_000
RULES_BYTES_MAX = 8 * 1024 * 1024
"""Size without children. With them, the rules fit into one message to a server (16 MiB)."""
"""Size of everything together, so that it fits into one message to a server: without the rules, a server refuses all
clients. The other limits allow more in theory, with long names in large groups, or many scopes."""


def token_size(token: TokenRecord) -> int:
    return len(msgspec.msgpack.encode(token))


class AccessState:
    """See the module. Read it freely; change it with ``apply`` only. ``revision`` grows with every change but notes of
    use."""

    def __init__(self, start: AccessRules | None = None) -> None:
        start = start or AccessRules()
        self.revision, self.mode = start.revision, start.mode
        self.tokens = {token.id: token for token in start.tokens}
        self.rules = {(rule.subject, rule.pattern): rule for rule in start.rules}
        self.groups = {group.name: group for group in start.groups}
        self.certificate_rules = start.certificate_rules
        self.quotas = {quota.subject: quota for quota in start.quotas}
        self.narrowed_at = start.revision
        """The revision at which a right was last taken away, or a state was loaded. What was judged by an older
        one has to be judged again."""
        of_jobs = sorted((token for token in start.tokens if token.of_job), key=lambda token: (token.created, token.id))
        self._of_jobs = {token.id: None for token in of_jobs}
        """Tokens of jobs, in the order in which they were made."""
        self._view: AccessView | None = None

    def snapshot(self) -> AccessRules:
        return AccessRules(
            self.revision,
            self.mode,
            tuple(self.tokens[token] for token in sorted(self.tokens)),
            tuple(self.rules[key] for key in sorted(self.rules)),
            tuple(self.groups[name] for name in sorted(self.groups)),
            self.certificate_rules,
            tuple(self.quotas[subject] for subject in sorted(self.quotas)),
        )

    @property
    def view(self) -> AccessView:
        """The view of this revision."""
        if self._view is None or self._view.revision != self.revision:
            self._view = AccessView(self.snapshot())
        return self._view

    @property
    def is_untouched(self) -> bool:
        """Whether nothing about access control was ever decided."""
        return self.revision == 0

    def size(self) -> int:
        """Return the number of bytes in a message to a server, without children of tokens: what every principal may
        make must not use up the room of administrators."""
        rules = self.snapshot()
        own = tuple(token for token in rules.tokens if token.parent is UNSET)
        return len(msgspec.msgpack.encode(structs.replace(rules, tokens=own)))

    def summary(self) -> AccessSummary:
        counts = (len(self.tokens), len(self.rules), len(self.groups), len(self.quotas))
        return AccessSummary(self.mode, self.revision, *counts)

    def problem(self, decision: a.AccessDecision) -> str:
        """Return why the decision is not valid, or an empty string."""
        match decision:
            case a.CreateToken():
                if decision.parent is not UNSET and decision.parent not in self.tokens:
                    return "its parent is not there"
                return "there is a token with this id" if decision.id in self.tokens else ""
            case a.RevokeToken() | a.ExpireToken():
                return "" if decision.id in self.tokens else "there is no such token"
            case a.RemoveRights():
                rule = self.rules.get((decision.subject, decision.pattern))
                is_there = rule is not None and set(decision.rights) <= set(rule.rights)
                return "" if is_there else "there is no such rule"
            case a.DeleteGroup():
                return "" if decision.name in self.groups else "there is no such group"
            case a.RemoveQuota():
                return "" if decision.subject in self.quotas else "there is no such quota"
        return ""

    def apply(self, decision: a.AccessDecision, cut_time: CutTime) -> None:
        """Fold a decision without a problem. ``cut_time`` is its time if it has none of its own."""
        match decision:
            case a.CreateToken():
                self.tokens[decision.id] = TokenRecord(
                    decision.id,
                    decision.sha256,
                    decision.principal,
                    decision.scopes,
                    decision.expires,
                    decision.by.principal if decision.by else "",
                    decision.at or cut_time,
                    of_job=decision.of_job,
                    parent=decision.parent,
                )
                if decision.of_job:
                    self._renew_job_token(decision.id, decision.at or cut_time)
                if decision.parent is not UNSET:
                    self._forget_expired_children(decision.at or cut_time)
            case a.RevokeToken():
                self._end(decision.id)
            case a.ExpireToken():
                for token in (decision.id, *self.children_of(decision.id)):
                    known = self.tokens[token]
                    ends = min(known.expires or decision.expires, decision.expires)
                    self.tokens[token] = structs.replace(known, expires=ends)
            case a.NoteTokenUse():
                self._note_use(decision)
                return
            case a.AllowRights():
                self._set_rule(decision.subject, decision.pattern, self._rights(decision) | set(decision.rights))
            case a.RemoveRights():
                self._set_rule(decision.subject, decision.pattern, self._rights(decision) - set(decision.rights))
            case a.SetGroup():
                self.groups[decision.group.name] = decision.group
            case a.DeleteGroup():
                subject = GROUP_PREFIX + decision.name
                del self.groups[decision.name]
                self.rules = {key: rule for key, rule in self.rules.items() if rule.subject != subject}
                self.quotas.pop(subject, None)
            case a.SetCertificateRules():
                self.certificate_rules = decision.rules
            case a.SetQuota():
                self.quotas[decision.subject] = Quota(decision.subject, decision.limits)
            case a.RemoveQuota():
                del self.quotas[decision.subject]
            case a.SetAccessMode():
                self.mode = decision.mode
        self.revision = Revision(self.revision + 1)
        if not isinstance(decision, a.WIDENING):
            self.narrowed_at = self.revision

    def end_job_tokens(self, epochs: Container[JobEpoch]) -> None:
        """End the tokens of assignments that are over; ``epochs`` are those of the others."""
        over = [
            token.id
            for token in map(self.tokens.__getitem__, self._of_jobs)
            if token.of_job and token.of_job.epoch and token.of_job.epoch not in epochs
        ]
        for token in over:
            del self.tokens[token], self._of_jobs[token]
        if over:
            self.revision = self.narrowed_at = Revision(self.revision + 1)

    def _renew_job_token(self, token: str, now: CutTime) -> None:
        """A token of a job has come: the one before stays for the processes that have it; earlier ones go, and so do
        all that have expired. Tokens of errands, which have no epoch, are for one process each, and expire soon."""
        self._of_jobs[token] = None
        made = self.tokens[token]
        use = (made.of_job, made.principal)
        others = [other for other in self._of_jobs if other != token]
        same = [other for other in others if (self.tokens[other].of_job, self.tokens[other].principal) == use]
        if not made.of_job or not made.of_job.epoch:
            same = []
        same.sort(key=lambda other: (self.tokens[other].created, other))
        expired = [other for other in others if self.tokens[other].is_expired(now)]
        for other in dict.fromkeys((*same[:-1], *expired)):
            del self.tokens[other], self._of_jobs[other]

    def after(self, decision: a.AccessDecision) -> AccessState:
        """Return what the state would be after a decision."""
        changed = AccessState(self.snapshot())
        changed.apply(decision, CutTime(0))
        return changed

    def groups_of(self, principal: str) -> tuple[str, ...]:
        return tuple(name for name in sorted(self.groups) if principal in self.groups[name].members)

    def subjects_of(self, principal: str) -> tuple[str, ...]:
        """Return the principal and its groups, as rules and quotas name them."""
        return (principal, *(GROUP_PREFIX + name for name in self.groups_of(principal)))

    def admins(self) -> set[str]:
        """Return the principals that a rule makes administrators, directly or through a group."""
        found: set[str] = set()
        for rule in self.rules.values():
            if Right.CLUSTER_ADMIN in rule.rights and rule.pattern.matches(CLUSTER):
                is_group = rule.subject.startswith(GROUP_PREFIX)
                group = self.groups.get(rule.subject.removeprefix(GROUP_PREFIX)) if is_group else None
                found.update((group.members if group else ()) if is_group else (rule.subject,))
        return found

    def has_admin(self, now: CutTime) -> bool:
        """Whether an administrator can prove its identity: with a token that has not expired and is not limited to
        something else, or with a certificate."""
        admins = self.admins()
        for token in self.tokens.values():
            may_admin = not token.scopes or any(
                Right.CLUSTER_ADMIN in scope.rights and scope.pattern.matches(CLUSTER) for scope in token.scopes
            )
            if token.principal in admins and may_admin and not token.is_expired(now):
                return True
        return any(can_map_to(rule, admin) for rule in self.certificate_rules for admin in admins)

    def principals(self) -> set[str]:
        """Return all principals that something names."""
        named = {token.principal for token in self.tokens.values()}
        for group in self.groups.values():
            named.update(group.members)
        subjects = [rule.subject for rule in self.rules.values()] + list(self.quotas)
        named.update(subject for subject in subjects if not subject.startswith(GROUP_PREFIX))
        named.update(rule.principal for rule in self.certificate_rules if "{" not in rule.principal)
        return named

    def count_tokens(self) -> int:
        """Return the number of tokens that are no children of others."""
        return sum(token.parent is UNSET for token in self.tokens.values())

    def _end(self, token: str) -> None:
        for one in (token, *self.children_of(token)):
            del self.tokens[one]
            self._of_jobs.pop(one, None)

    def children_of(self, token: str) -> list[str]:
        return [one.id for one in self.tokens.values() if one.parent == token]

    def _forget_expired_children(self, now: CutTime) -> None:
        expired = [one.id for one in self.tokens.values() if one.parent is not UNSET and one.is_expired(now)]
        for token in expired:
            del self.tokens[token]

    def _note_use(self, decision: a.NoteTokenUse) -> None:
        for token, day in decision.days.items():
            known = self.tokens.get(token)
            parent = self.tokens.get(known.parent) if known is not None and known.parent is not UNSET else None
            for used in (known, parent):
                if used is not None and day > used.last_used_day:
                    self.tokens[used.id] = structs.replace(used, last_used_day=day)

    def _rights(self, decision: a.AllowRights | a.RemoveRights) -> set[str]:
        rule = self.rules.get((decision.subject, decision.pattern))
        return set(rule.rights) if rule is not None else set()

    def _set_rule(self, subject: str, pattern: ResourcePattern, rights: set[str]) -> None:
        if not rights:
            self.rules.pop((subject, pattern), None)
            return
        # Rights that a later version knows come last.
        ordered = (*(right for right in Right if right in rights), *sorted(rights - set(Right)))
        self.rules[subject, pattern] = Rule(subject, tuple(map(str, ordered)), pattern)
