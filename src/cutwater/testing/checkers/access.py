"""Access control, as two named checks over the history of one run: ``access`` and ``audit``.

``access`` compares what clients could do with a simple model: the rules at each revision, and the time in which servers
may act by that revision. A server may act by it from when the next decision was offered to the store. It must not any
more

- when a change with a later revision was answered, unless the answer names the server as unconfirmed,
- when the lease is over that it may have got before the later revision was stored. Only servers that enforce the rules
  have a lease.

A call that succeeded must be allowed by some such revision, and a call that was denied must be denied by some. None of
the shipped code that judges rights is used here.

``audit`` compares the records in the log with the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, structs

from cutwater.core.access import access_decisions as a
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord
from cutwater.core.order import decisions as d
from cutwater.testing.checkers.violation import Violation

ACCESS, AUDIT = "access", "audit"
GUARDED = ("append", "alter", "delete", "trim")
"""Rights on internal names that administrators do not have by themselves."""
SWEEP_SECONDS = 1.0
"""Servers look once a second for open calls whose lease is over, and connections whose token has expired."""

Needed = tuple[str, str]
"""A right, and a resource as ``topic:orders``."""


class CallTime(NamedTuple):
    """``order`` orders all events of a run; ``seconds`` is the virtual time."""

    order: int
    seconds: float


class AccessCall(Struct):
    """A call of a client. ``servers``: numbers of the storage nodes of which one has carried it out; empty if that is
    not known, or if it was a metadata node. ``is_open``: it was judged again and again while it went on."""

    principal: str
    token: str
    needs: tuple[Needed, ...]
    what: str
    begin: CallTime
    end: CallTime = CallTime(0, 0.0)
    is_done: bool = False
    """Whether it succeeded; otherwise it was denied."""
    servers: frozenset[int] = frozenset()
    is_open: bool = False
    why: str = ""


class Confirmed(Struct):
    """A change of access control that was answered: the revision, the storage nodes that have not confirmed it, and
    whether metadata nodes have not."""

    revision: int
    at: CallTime
    nodes: frozenset[int] = frozenset()
    is_certain: bool = True
    """Whether all metadata nodes have confirmed."""
    what: str = ""
    is_mode: bool = False


class Decided(Struct):
    """A decision about access control: when a leader first offered it to the store, and when the store was known to
    have it."""

    decision: a.AccessDecision
    offered: CallTime
    known: CallTime


class AccessHistory(Struct):
    """What the clients of one run noted. ``secrets``: the tokens that were made, by id."""

    calls: list[AccessCall] = []
    confirmed: list[Confirmed] = []


class ServerClocks(Struct, frozen=True):
    """How servers know the time: their wall clocks began at ``wall_start_us`` with the run, and go at a rate of 1 plus
    or minus ``drift``. A server may stand still for ``stall_seconds``."""

    wall_start_us: int = 0
    drift: float = 0.0
    stall_seconds: float = 0.0

    def may_be_past(self, time_us: int, seconds: float) -> bool:
        """Whether a server may think that this time has passed."""
        return (time_us - self.wall_start_us) / 1e6 <= seconds * (1 + self.drift)

    def must_be_past(self, time_us: int, seconds: float) -> bool:
        """Whether each server thinks so."""
        return (time_us - self.wall_start_us) / 1e6 <= seconds * (1 - self.drift)


class RuleModel:
    """The rules at one revision, as a list of plain facts. ``seconds`` is the virtual time."""

    def __init__(
        self,
        before: RuleModel | None = None,
        decision: a.AccessDecision | None = None,
        clocks: ServerClocks | None = None,
    ) -> None:
        self.clocks: ServerClocks = before.clocks if before else clocks or ServerClocks()
        self.mode: AccessMode = before.mode if before else AccessMode.OFF
        self.tokens: dict[str, a.CreateToken] = dict(before.tokens) if before else {}
        self.rules: dict[tuple[str, str], frozenset[str]] = dict(before.rules) if before else {}
        self.groups: dict[str, frozenset[str]] = dict(before.groups) if before else {}
        match decision:
            case a.CreateToken():
                self.tokens[decision.id] = decision
            case a.RevokeToken():
                del self.tokens[decision.id]
                self.tokens = {key: one for key, one in self.tokens.items() if one.parent != decision.id}
            case a.ExpireToken():
                self.tokens[decision.id] = structs.replace(self.tokens[decision.id], expires=decision.expires)
            case a.AllowRights():
                key = decision.subject, str(decision.pattern)
                self.rules[key] = self.rules.get(key, frozenset()) | set(decision.rights)
            case a.RemoveRights():
                key = decision.subject, str(decision.pattern)
                self.rules[key] = self.rules[key] - set(decision.rights)
            case a.SetGroup():
                self.groups[decision.group.name] = frozenset(decision.group.members)
            case a.DeleteGroup():
                del self.groups[decision.name]
                self.rules = {key: its for key, its in self.rules.items() if key[0] != f"group:{decision.name}"}
            case a.SetAccessMode():
                self.mode = decision.mode

    def knows(self, principal: str, token: str, seconds: float) -> bool:
        """Whether the token may still hold."""
        found = self.tokens.get(token)
        if found is None or found.principal != principal:
            return False
        return not found.expires or not self.clocks.must_be_past(found.expires, seconds)

    def is_over(self, principal: str, token: str, seconds: float) -> bool:
        """Whether the token may not hold any more."""
        found = self.tokens.get(token)
        if found is None or found.principal != principal:
            return True
        return found.expires > 0 and self.clocks.may_be_past(found.expires, seconds)

    def allows(self, principal: str, token: str, needs: Iterable[Needed], seconds: float) -> bool:
        """Whether a client with this token may do what needs these rights, in a call that begins now."""
        return self.mode is not AccessMode.ENFORCED or (
            self.knows(principal, token, seconds) and all(self._has(principal, token, *needed) for needed in needs)
        )

    def denies(self, principal: str, token: str, needs: Iterable[Needed], seconds: float) -> bool:
        """Whether it may be refused until now. Connections with a token that does not hold end in every mode."""
        is_off = self.mode is AccessMode.OFF
        is_over = self.is_over(principal, token, seconds)
        return (is_over and not is_off) or not self.allows(principal, token, needs, seconds)

    def _has(self, principal: str, token: str, right: str, resource: str) -> bool:
        subjects = {principal} | {f"group:{name}" for name, members in self.groups.items() if principal in members}
        rules = [(rights, pattern) for (subject, pattern), rights in self.rules.items() if subject in subjects]
        scopes = [(frozenset(scope.rights), str(scope.pattern)) for scope in self.tokens[token].scopes]
        return _gives(rules, right, resource) and (not scopes or _gives(scopes, right, resource))


def _gives(rules: Iterable[tuple[frozenset[str], str]], right: str, resource: str) -> bool:
    is_internal = resource.partition(":")[2].startswith("_")
    for rights, pattern in rules:
        if matches(pattern, resource) and (right in rights or (right == "describe" and rights)):
            return True
        if pattern == "cluster":
            if "cluster-admin" in rights and not (is_internal and right in GUARDED):
                return True
            if "cluster-operate" in rights and right == "describe":
                return True
            if "audit-read" in rights and resource == "topic:_audit" and right in ("read", "describe"):
                return True
    return False


def matches(pattern: str, resource: str) -> bool:
    if not pattern.endswith("*"):
        return pattern == resource
    prefix = pattern[:-1]
    is_internal = resource.partition(":")[2].startswith("_")
    return resource.startswith(prefix) and (not is_internal or prefix.partition(":")[2].startswith("_"))


class _Revisions:
    """Every revision with its rules, and until when servers may act by it."""

    def __init__(
        self,
        decided: Sequence[Decided],
        confirmed: Sequence[Confirmed],
        lease_seconds: float,
        clocks: ServerClocks | None,
    ) -> None:
        self.changes = [one for one in decided if not isinstance(one.decision, a.NoteTokenUse)]
        self.models = [RuleModel(clocks=clocks)]
        for change in self.changes:
            self.models.append(RuleModel(self.models[-1], change.decision))
        self._confirmed, self._lease_seconds = confirmed, lease_seconds

    def usable(self, call: AccessCall) -> list[RuleModel]:
        """Return the rules by which servers may have judged a call."""
        return [model for revision, model in enumerate(self.models) if self._is_usable(revision, model, call)]

    def _is_usable(self, revision: int, model: RuleModel, call: AccessCall) -> bool:
        if revision > 0 and self.changes[revision - 1].offered > call.end:
            return False
        if revision == len(self.changes):
            return True
        if model.mode is AccessMode.ENFORCED:
            lease = self._lease_seconds + (SWEEP_SECONDS if call.is_open else 0.0)
            if self.changes[revision].known.seconds + lease < call.begin.seconds:
                return False
        return not any(self._ends(one, revision, model, call) for one in self._confirmed)

    def _ends(self, one: Confirmed, revision: int, model: RuleModel, call: AccessCall) -> bool:
        """Whether an answer says that no server that may have carried out the call acts by the revision."""
        if one.revision <= revision or one.at >= call.begin:
            return False
        if model.mode is not AccessMode.ENFORCED and not one.is_mode:
            # A server without contact that does not enforce anything has no lease that ends: the answer to the change
            # of the mode names it, later ones do not.
            return False
        if call.servers:
            return one.is_certain and not (call.servers & one.nodes)
        return one.is_certain and not one.nodes


def check_access(
    history: AccessHistory,
    decided: Sequence[Decided],
    lease_seconds: float,
    clocks: ServerClocks | None = None,
) -> None:
    """Each call that succeeded was allowed, and each that was denied was not, by rules that may have been in force."""
    revisions = _Revisions(decided, history.confirmed, lease_seconds, clocks)
    stall_seconds = clocks.stall_seconds if clocks is not None else 0.0
    for call in history.calls:
        models = revisions.usable(call)
        # The expiry of a token is looked at when a call begins, and once a second while it goes on.
        begin = call.begin.seconds - (SWEEP_SECONDS + stall_seconds if call.is_open else 0.0)
        who = call.principal, call.token, call.needs
        if call.is_done and not any(one.allows(*who, begin) for one in models):
            raise Violation(ACCESS, f"{told(call)} succeeded, and was not allowed: {_rules(models[-1], call)}")
        if not call.is_done and not any(one.denies(*who, call.end.seconds) for one in models):
            raise Violation(ACCESS, f"{told(call)} was denied, and was allowed: {call.why}: {_rules(models[-1], call)}")
    for one in history.confirmed:
        if one.revision > len(revisions.changes):
            raise Violation(ACCESS, f"{one.what} was answered with revision {one.revision}, which nothing decided")


def told(call: AccessCall) -> str:
    began, ended = call.begin.seconds, call.end.seconds
    return f"{call.what} by {call.principal} with token {call.token}, from {began:.3f} to {ended:.3f} s,"


def _rules(model: RuleModel, call: AccessCall) -> str:
    its = {f"{subject} {pattern}": sorted(rights) for (subject, pattern), rights in model.rules.items()}
    return f"needs {call.needs}, mode {model.mode}, token: {model.tokens.get(call.token)}, {its}, {model.groups}"


# The audit.

ALWAYS_AUDITED = (
    d.AddNode
    | d.RemoveNode
    | d.CreateTopic
    | d.ChangeTopic
    | d.DeleteTopic
    | a.CreateToken
    | a.RevokeToken
    | a.ExpireToken
    | a.AllowRights
    | a.RemoveRights
    | a.SetGroup
    | a.DeleteGroup
    | a.SetQuota
    | a.SetAccessMode
)
"""Decisions that the audit has whoever asked for them."""


def check_audit(records: Sequence[AuditRecord], decisions: Sequence[d.Decision]) -> None:
    """The audit has each change exactly once, in the order of the decisions, numbered from 1 on without a gap."""
    changes = [record for record in records if record.outcome is AuditOutcome.DONE]
    for place, record in enumerate(changes, 1):
        if record.number != place:
            raise Violation(AUDIT, f"record {place} of the audit has the number {record.number}: {record}")
    for before, after in pairwise(changes):
        if after.index <= before.index:
            raise Violation(AUDIT, f"the audit has {after} after {before}")
    found: dict[int, AuditRecord] = {int(record.index): record for record in changes}
    is_on = False
    for index, decision in enumerate(decisions, 1):
        noted = found.pop(index, None)
        is_on = is_on or (isinstance(decision, a.SetAccessMode) and decision.mode is not AccessMode.OFF)
        is_wanted = isinstance(decision, ALWAYS_AUDITED) and (is_on or isinstance(decision, a.AccessDecision))
        if noted is None:
            if is_wanted:
                raise Violation(AUDIT, f"decision {index} is not in the audit: {decision}")
            continue
        name = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in type(decision).__name__)
        origin = getattr(decision, "by", None)
        if (noted.operation, noted.principal) != (name[1:], origin.principal if origin else ""):
            raise Violation(AUDIT, f"decision {index} is {decision}, and the audit says {noted}")
    if found:
        raise Violation(AUDIT, f"the audit has records of no decision: {list(found.values())[:3]}")
