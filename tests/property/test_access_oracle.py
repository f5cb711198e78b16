"""The view of access control against a dumb model: random principals, groups, rules, tokens, revocations and questions.

The model keeps a list of what was asked and knows nothing of the code it checks: it walks over all rules for every
question, and writes out which rights follow from which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cutwater.core.access import access_requests as q
from cutwater.core.access.access_handling import decide_access
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.access_view import AccessView
from cutwater.core.access.principals import LOCAL_ADMIN, Scope, make_token, token_hash, token_id
from cutwater.core.access.rights import Resource, ResourcePattern, Right
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import OrderState
from cutwater.errors import CutwaterError
from cutwater.types import CutTime

PRINCIPALS = ("ann", "bob", "w")
GROUPS = ("w", "x")
NAMES = ("a", "ab", "abc", "b", "_audit", "_a")
MORE_NAMES = {"topic": ("_programs", "_job_logs"), "run": ("program:a", "program:")}
"""Names with a meaning of their own, by kind."""
RIGHTS = {
    "topic": ["read", "append", "describe", "create", "alter", "delete", "trim"],
    "cursor": ["cursor", "describe"],
    "run": ["publish", "delete", "describe"],
    "job": ["job-submit", "job-operate", "describe"],
    "principal": ["act-as", "describe"],
    "cluster": ["cluster-operate", "cluster-admin", "audit-read", "run-jobs", "describe"],
}
NOW = CutTime(1_000)


@dataclass
class Model:
    """What a careful clerk would write down."""

    groups: dict[str, set[str]] = field(default_factory=dict)
    rules: set[tuple[str, str, str]] = field(default_factory=set)
    """Subject, right, pattern: ``("group:w", "read", "topic:a*")``."""
    tokens: dict[int, tuple[str, list[tuple[str, str]], int]] = field(default_factory=dict)
    """By number: the principal, the scopes as pairs of right and pattern, and when it expires."""
    parents: dict[int, int] = field(default_factory=dict)
    """Of tokens that are children."""

    def end(self, number: int) -> None:
        self.tokens.pop(number, None)
        self.parents.pop(number, None)
        for child in [one for one, parent in self.parents.items() if parent == number]:
            self.end(child)

    def allows(self, principal: str, right: str, what: str, token: int | None) -> bool:
        subjects = {principal} | {f"group:{name}" for name, members in self.groups.items() if principal in members}
        given = [(their_right, pattern) for subject, their_right, pattern in self.rules if subject in subjects]
        if right == "act-as" and what == f"principal:{principal}":
            return token is None or token in self.tokens
        is_self = right == "describe" and what == f"principal:{principal}"
        if not (is_self or self.follows(given, right, what)):
            return False
        if token is None:
            return True
        if token not in self.tokens:
            return False
        shown = [token, self.parents[token]] if token in self.parents else [token]
        return all(not self.tokens[one][1] or self.follows(self.tokens[one][1], right, what) for one in shown)

    def follows(self, given: list[tuple[str, str]], right: str, what: str) -> bool:
        name = what.partition(":")[2]
        on_it = {their_right for their_right, pattern in given if self.matches(pattern, what)}
        on_cluster = {their_right for their_right, pattern in given if pattern == "cluster"}
        if right in on_it:
            return True
        if right == "describe" and (on_it or "cluster-operate" in on_cluster):
            return True
        if what == "topic:_audit" and right in ("read", "describe") and "audit-read" in on_cluster:
            return True
        if "run-jobs" in on_cluster and (
            (right == "describe" and what.startswith("job:"))
            or (right in ("read", "describe") and what == "topic:_programs")
            or (right in ("append", "describe") and what == "topic:_job_logs")
        ):
            return True
        is_storing = (right in ("append", "describe") and what == "topic:_programs") or (
            right in ("publish", "describe") and what.startswith("run:program:")
        )
        submits = any(their_right == "job-submit" for their_right, _ in given)
        if is_storing and (submits or "cluster-admin" in on_cluster):
            return True
        if "cluster-admin" not in on_cluster:
            return False
        return not (name[:1] == "_" and right in ("append", "alter", "delete", "trim"))

    @staticmethod
    def matches(pattern: str, what: str) -> bool:
        if not pattern.endswith("*"):
            return pattern == what
        kind, _, start = pattern[:-1].partition(":")
        other_kind, _, name = what.partition(":")
        if kind != other_kind or name[: len(start)] != start:
            return False
        return name[:1] != "_" or start[:1] == "_"


# What can happen.

kinds = st.sampled_from(sorted(RIGHTS))
principals = st.sampled_from(PRINCIPALS)
subjects = principals | st.sampled_from(GROUPS).map("group:{}".format)


@st.composite
def resources(draw: st.DrawFn) -> str:
    kind = draw(kinds)
    if kind == "cluster":
        return kind
    return f"{kind}:{draw(principals if kind == 'principal' else st.sampled_from(names_of(kind)))}"


def names_of(kind: str) -> tuple[str, ...]:
    return (*NAMES, *MORE_NAMES.get(kind, ()))


@st.composite
def patterns(draw: st.DrawFn) -> str:
    kind = draw(kinds)
    if kind == "cluster":
        return kind
    name = draw(st.sampled_from((*names_of(kind), *PRINCIPALS)))
    is_prefix = draw(st.booleans())
    return f"{kind}:{name[: draw(st.integers(0, len(name)))]}*" if is_prefix else f"{kind}:{name}"


@st.composite
def grants(draw: st.DrawFn) -> tuple[list[str], str]:
    pattern = draw(patterns())
    rights = RIGHTS[pattern.partition(":")[0]]
    return draw(st.lists(st.sampled_from(rights), min_size=1, max_size=3, unique=True)), pattern


numbers = st.integers(1, 4)
allow_one = st.tuples(st.just("allow"), principals, grants())
create_token = st.tuples(
    st.just("token"), numbers, principals, st.lists(grants(), max_size=2), st.sampled_from((0, 2_000))
)
steps = st.one_of(
    st.tuples(st.just("allow"), subjects, grants()),
    st.tuples(st.just("remove"), subjects, grants()),
    st.tuples(st.just("remove any"), st.integers(0, 1_000)),
    st.tuples(st.just("group"), st.sampled_from(GROUPS), st.sets(principals)),
    st.tuples(st.just("delete group"), st.sampled_from(GROUPS)),
    create_token,
    st.tuples(st.just("revoke"), numbers),
    st.tuples(
        st.just("child"), numbers, numbers, st.lists(grants(), max_size=1), st.sampled_from((1_500, 2_000, 2_500))
    ),
    st.tuples(st.just("end own"), numbers, st.none() | numbers),
)
questions = st.tuples(principals, resources(), st.none() | numbers)


def pattern_of(text: str) -> ResourcePattern:
    kind, _, name = text.partition(":")
    return ResourcePattern(kind, name.rstrip("*"), name.endswith("*"))


def text_of(number: int) -> str:
    return make_token(bytes([number]) * 8, bytes([number]) * 32)


class Real:
    """The state machine that is checked, and its copies."""

    def __init__(self) -> None:
        self.state = AccessState()
        self.log = OrderState()

    def ask(self, request: q.AccessRequest, origin: RequestOrigin | None = None) -> bool:
        """Whether the request was carried out."""
        try:
            decisions, _ = decide_access(request, self.state, NOW, origin or RequestOrigin(LOCAL_ADMIN))
        except CutwaterError:
            return False
        for decision in decisions:
            self.state.apply(decision, CutTime(0))
            self.log.apply(decision)
        return True

    def view(self) -> AccessView:
        """A view as a storage node has it: of the rules after a replay and a snapshot, through the bytes."""
        assert self.log.access.snapshot() == self.state.snapshot()
        sent = msgspec.msgpack.encode(OrderState(self.log.snapshot()).access.snapshot())
        return AccessView(msgspec.msgpack.decode(sent, type=AccessRules))


def carry_out(step: tuple, model: Model, real: Real) -> None:  # type: ignore[type-arg]
    match step:
        case "allow", subject, (rights, pattern):
            is_known = not subject.startswith("group:") or subject[6:] in model.groups
            assert real.ask(q.AllowRequest(subject, tuple(rights), pattern_of(pattern))) == is_known
            if is_known:
                model.rules |= {(subject, right, pattern) for right in rights}
        case "remove", subject, (rights, pattern):
            taken = {(subject, right, pattern) for right in rights}
            assert real.ask(q.RemoveRightsRequest(subject, pattern_of(pattern), tuple(rights))) == (
                taken <= model.rules
            )
            if taken <= model.rules:
                model.rules -= taken
        case "remove any", number if model.rules:
            subject, right, pattern = sorted(model.rules)[number % len(model.rules)]
            assert real.ask(q.RemoveRightsRequest(subject, pattern_of(pattern), (right,)))
            model.rules.remove((subject, right, pattern))
        case "group", name, members:
            known = model.groups.get(name)
            if known is None:
                assert real.ask(q.CreateGroupRequest(name, tuple(members)))
            else:
                change = q.ChangeGroupRequest(name, tuple(members - known), tuple(known - members))
                assert real.ask(change)
            model.groups[name] = set(members)
        case "delete group", name:
            assert real.ask(q.DeleteGroupRequest(name)) == (name in model.groups)
            model.groups.pop(name, None)
            model.rules = {rule for rule in model.rules if rule[0] != f"group:{name}"}
        case "token", number, principal, scopes, expires:
            text = text_of(number)
            made = tuple(Scope(tuple(rights), pattern_of(pattern)) for rights, pattern in scopes)
            request = q.CreateTokenRequest(token_id(text) or "", token_hash(text), principal, made, CutTime(expires))
            flat = [(right, pattern) for rights, pattern in scopes for right in rights]
            if real.ask(request) and number not in model.tokens:
                model.tokens[number] = (principal, flat, expires)
            assert number in model.tokens
        case "revoke", number:
            identifier = token_id(text_of(number)) or ""
            assert real.ask(q.RevokeTokenRequest(identifier)) == (number in model.tokens)
            model.end(number)
        case "child", number, parent, scopes, expires:
            text, made = text_of(number), tuple(Scope(tuple(rights), pattern_of(pattern)) for rights, pattern in scopes)
            child = q.CreateChildTokenRequest(token_id(text) or "", token_hash(text), CutTime(expires), made)
            is_made = real.ask(child, shown(parent))
            shows = model.tokens.get(parent)
            if number in model.tokens:
                # The same request again changes nothing.
                assert not is_made or model.parents.get(number) == parent
                return
            may = shows is not None and parent not in model.parents and not 0 < shows[2] < expires
            # A child whose scopes are not covered is refused; that those that are made give no more, questions show.
            assert is_made == may or (may and bool(shows and shows[1]) and bool(made))
            if is_made and shows is not None:
                flat = [(right, pattern) for rights, pattern in scopes for right in rights]
                model.tokens[number] = shows[0], flat or shows[1], expires
                model.parents[number] = parent
        case "end own", by, number:
            ended = by if number is None else number
            may = by in model.tokens and (ended == by or model.parents.get(ended) == by)
            identifier = "" if number is None else token_id(text_of(number)) or ""
            assert real.ask(q.EndOwnTokenRequest(identifier), shown(by)) == may
            if may:
                model.end(ended)


def shown(number: int) -> RequestOrigin:
    """A caller that shows this token. While access control is off, requests of other principals are refused; the token
    decides here."""
    return RequestOrigin(LOCAL_ADMIN, "", token_id(text_of(number)) or "")


def compare(principal: str, what: str, number: int | None, model: Model, view: AccessView) -> bool:
    """Compare all rights on a resource, and return whether there is any."""
    kind, _, name = what.partition(":")
    identifier = "" if number is None else token_id(text_of(number)) or ""
    is_any = False
    for right in RIGHTS[kind]:
        expected = model.allows(principal, right, what, number)
        for _ in range(2):  # the second time from memory
            verdict = view.decide(principal, Right(right), Resource(kind, name), identifier)
            is_any = is_any or (verdict.is_allowed and what != f"principal:{principal}")
            assert verdict.is_allowed == expected, (principal, right, what, number, verdict, model)
        if verdict.rule is not None:
            named = {(verdict.rule.subject, one, str(verdict.rule.pattern)) for one in verdict.rule.rights}
            assert named <= model.rules, "the rule that decides exists"
    if number is not None:
        for now in (NOW, CutTime(2_000)):
            known = model.tokens.get(number)
            is_valid = known is not None and (known[2] == 0 or now < known[2])
            found = view.check_token(text_of(number), now).token
            assert (found is not None) == is_valid
            assert known is None or found is None or found.principal == known[0]
    return is_any


EVERYTHING = ["cluster", *(f"{kind}:{name}" for kind in RIGHTS if kind != "cluster" for name in (*NAMES, *PRINCIPALS))]


@settings(max_examples=50)
@given(
    st.lists(allow_one, min_size=2, max_size=6),
    st.lists(create_token, min_size=1, max_size=3),
    st.lists(st.tuples(steps, st.lists(questions, max_size=2)), max_size=20),
)
def test_the_view_answers_as_the_model_does(
    rules: list[tuple],  # type: ignore[type-arg]
    tokens: list[tuple],  # type: ignore[type-arg]
    history: list[tuple[tuple, list[tuple[str, str, int | None]]]],  # type: ignore[type-arg]
) -> None:
    model, real = Model(), Real()
    for step, asked in [*((one, []) for one in (*rules, *tokens)), *history]:
        carry_out(step, model, real)
        for principal, what, number in asked:
            compare(principal, what, number, model, real.state.view)
    view = real.view()
    for token in (None, *sorted({1, *model.tokens})[:2]):
        allowed = [compare(principal, what, token, model, view) for principal in PRINCIPALS for what in EVERYTHING]
        event(f"{'some' if any(allowed) else 'nothing'} allowed{'' if token is None else ' with a token'}")
