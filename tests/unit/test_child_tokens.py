"""Short-lived children of tokens: what they may be, and that they end with their parent."""

from __future__ import annotations

import msgspec
import pytest

from cutwater.core.access import access_decisions as a
from cutwater.core.access import access_requests as q
from cutwater.core.access import access_state
from cutwater.core.access import child_tokens as c
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_handling import decide_access
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.access_text import tell_access
from cutwater.core.access.principals import (
    DAY_US,
    LOCAL_ADMIN,
    JobOfToken,
    Scope,
    TokenRecord,
    make_token,
    token_hash,
    token_id,
)
from cutwater.core.access.rights import THE_CLUSTER, Resource, Right, parse_pattern
from cutwater.core.order.decisions import attributed
from cutwater.core.order.origin import RequestOrigin
from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument, NotFound, Refused
from cutwater.types import CutTime, JobEpoch, JobNumber

NOW = CutTime(20_000 * DAY_US)
HOUR_US = DAY_US // 24
ORDERS = Resource("topic", "orders")
LOCAL = RequestOrigin(LOCAL_ADMIN)


def text_of(number: int) -> str:
    return make_token(number.to_bytes(8), number.to_bytes(32))


def id_of(number: int) -> str:
    return token_id(text_of(number)) or ""


def scope(rights: str, pattern: str) -> Scope:
    return Scope(tuple(rights.split(",")), parse_pattern(pattern))


class Cluster:
    def __init__(self) -> None:
        self.state = AccessState()
        self.ask(q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER), LOCAL)
        self.ask(q.AllowRequest("ann", ("read", "append"), parse_pattern("topic:*")), LOCAL)
        self.make(1, "root")
        self.make(2, "ann")
        self.ask(q.SetAccessModeRequest(AccessMode.ENFORCED), LOCAL)

    def ask(self, request: q.AccessRequest, origin: RequestOrigin | None, now: CutTime = NOW) -> q.AccessAnswer:
        decisions, answer = decide_access(request, self.state, now, origin)
        for decision in decisions:
            made = attributed(msgspec.structs.replace(decision, at=now), origin)
            assert isinstance(made, a.AccessDecision)
            assert self.state.problem(made) == ""
            assert tell_access(made)
            self.state.apply(made, CutTime(0))
        return answer

    def make(self, number: int, principal: str, *scopes: Scope, expires: int = 0) -> None:
        text = text_of(number)
        request = q.CreateTokenRequest(id_of(number), token_hash(text), principal, scopes, CutTime(expires))
        self.ask(request, LOCAL)

    def child(
        self, number: int, *scopes: Scope, of: int = 2, expires: int = NOW + HOUR_US, now: CutTime = NOW
    ) -> TokenRecord:
        request = q.CreateChildTokenRequest(id_of(number), token_hash(text_of(number)), CutTime(expires), scopes)
        principal = self.state.tokens[id_of(of)].principal
        self.ask(request, RequestOrigin(principal, "request", id_of(of)), now)
        return self.state.tokens[id_of(number)]

    def end(self, number: int, *, by: int) -> None:
        token = self.state.tokens[id_of(by)]
        identifier = id_of(number) if number else ""
        self.ask(q.EndOwnTokenRequest(identifier), RequestOrigin(token.principal, "request", token.id))

    def may(self, number: int, right: str = "read", resource: Resource = ORDERS) -> bool:
        return self.state.view.decide("ann", Right(right), resource, id_of(number)).is_allowed


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_child_acts_for_the_principal_of_its_parent(cluster: Cluster) -> None:
    made = cluster.child(3)
    assert (made.principal, made.parent, made.scopes, made.creator) == ("ann", id_of(2), (), "ann")
    assert cluster.may(3)
    assert cluster.state.view.check_token(text_of(3), NOW).token == made
    assert cluster.state.view.check_token(text_of(3), NOW + HOUR_US).token is None, "it has expired"
    revision = cluster.state.revision
    cluster.child(3)
    assert cluster.state.revision == revision, "the same request again changes nothing"
    with pytest.raises(AlreadyExists):
        cluster.child(3, expires=NOW + 2 * HOUR_US)
    (info,) = cluster.ask(q.DescribeTokenRequest(id_of(3)), LOCAL).tokens  # type: ignore[union-attr]
    assert info.parent == id_of(2)
    who = cluster.ask(q.WhoAmIRequest(), RequestOrigin("ann", "", id_of(3)))
    assert isinstance(who, q.WhoAmI)
    assert (who.parent, who.expires) == (id_of(2), NOW + HOUR_US)


@pytest.mark.parametrize(
    ("expires", "said"),
    [
        (0, "every child has an end"),
        (NOW, "which is past"),
        (NOW + DAY_US + 1, "more than 24 hours"),
        (NOW + 2 * HOUR_US + 1, "after its parent"),
    ],
)
def test_a_child_ends_soon_and_before_its_parent(cluster: Cluster, expires: int, said: str) -> None:
    cluster.make(4, "ann", expires=NOW + 2 * HOUR_US)
    with pytest.raises(InvalidArgument, match=said):
        cluster.child(5, of=4, expires=expires)
    cluster.child(5, of=4, expires=NOW + 2 * HOUR_US)
    cluster.child(6, of=2, expires=NOW + DAY_US)


def test_a_child_has_no_children_and_needs_a_token_that_is_shown(cluster: Cluster) -> None:
    cluster.child(3)
    with pytest.raises(Refused, match="a child has no children"):
        cluster.child(4, of=3)
    request = q.CreateChildTokenRequest(id_of(4), token_hash(text_of(4)), CutTime(NOW + 1))
    for origin in (RequestOrigin("ann"), RequestOrigin("ann", "", id_of(9)), LOCAL):
        with pytest.raises(Refused, match="connect with a token"):
            cluster.ask(request, origin)
        with pytest.raises(Refused, match="connect with a token"):
            cluster.ask(q.EndOwnTokenRequest(), origin)


@pytest.mark.parametrize(
    ("parent", "child", "is_covered"),
    [
        ("append topic:orders", "append topic:orders", True),
        ("append topic:orders", "describe topic:orders", True),
        ("append topic:orders", "read topic:orders", False),
        ("append topic:orders", "append topic:orders*", False),
        ("append topic:orders", "append topic:other", False),
        ("append topic:o*", "append topic:orders*", True),
        ("append topic:orders*", "append topic:o*", False),
        ("read topic:*", "read topic:_audit", False),
        ("read topic:_*", "read topic:_audit", True),
        ("read topic:*", "cursor cursor:c", False),
        ("cluster-admin cluster", "read topic:*", True),
        ("cluster-admin cluster", "append topic:_audit", False),
        ("cluster-operate cluster", "describe topic:*", True),
        ("cluster-operate cluster", "read topic:*", False),
        ("audit-read cluster", "read topic:_audit", True),
        ("audit-read cluster", "read topic:_audit*", False),
    ],
)
def test_the_scopes_of_a_child_are_no_wider(cluster: Cluster, parent: str, child: str, *, is_covered: bool) -> None:
    cluster.make(4, "ann", scope(*parent.split()))
    inherited = cluster.child(5, of=4)
    assert inherited.scopes == (scope(*parent.split()),)
    if is_covered:
        assert cluster.child(6, scope(*child.split()), of=4).scopes == (scope(*child.split()),)
    else:
        with pytest.raises(Refused, match="has no scope with"):
            cluster.child(6, scope(*child.split()), of=4)


def test_a_child_ends_with_its_parent(cluster: Cluster) -> None:
    cluster.make(4, "ann")
    for number, parent in ((5, 4), (6, 4), (7, 2)):
        cluster.child(number, of=parent)
    cluster.ask(q.ExpireTokenRequest(id_of(4), CutTime(NOW + 10)), LOCAL)
    ends = {number: cluster.state.tokens[id_of(number)].expires for number in (4, 5, 7)}
    assert ends == {4: NOW + 10, 5: NOW + 10, 7: NOW + HOUR_US}
    cluster.ask(q.RevokeTokenRequest(id_of(4)), LOCAL)
    assert [cluster.may(number) for number in (4, 5, 6, 7)] == [False, False, False, True]
    assert cluster.state.narrowed_at == cluster.state.revision


def test_a_token_ends_itself_and_its_children_only(cluster: Cluster) -> None:
    for number in (3, 4):
        cluster.child(number)
    cluster.make(5, "ann")
    for number, by in ((4, 3), (2, 3), (5, 2), (3, 5), (9, 2)):
        with pytest.raises(NotFound, match="has no child with this id"):
            cluster.end(number, by=by)
    cluster.end(3, by=2)
    assert [cluster.may(number) for number in (2, 3, 4)] == [True, False, True]
    cluster.end(0, by=4)
    assert not cluster.may(4)
    cluster.child(6)
    cluster.end(2, by=2)
    assert [cluster.may(number) for number in (2, 5, 6)] == [False, True, False]
    with pytest.raises(Refused, match="without an administrator"):
        cluster.end(0, by=1)


def test_children_are_limited_and_expired_ones_are_forgotten(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "CHILDREN_MAX", 3)
    for number in (11, 12, 13):
        cluster.child(number, expires=NOW + number)
    with pytest.raises(Refused, match="3 living children"):
        cluster.child(14)
    later = CutTime(NOW + 12)
    cluster.child(14, now=later)
    assert sorted(cluster.state.children_of(id_of(2))) == [id_of(13), id_of(14)]
    monkeypatch.setattr(access_state, "CHILDREN_MAX", 2)
    with pytest.raises(Refused, match="try again later"):
        cluster.child(15, of=1, now=later)
    monkeypatch.setattr(access_state, "TOKENS_MAX", 3)
    cluster.make(16, "bob")
    with pytest.raises(Refused, match="there are 3 tokens"):
        cluster.ask(q.CreateTokenRequest(id_of(17), token_hash(text_of(17)), "bob"), RequestOrigin("root"))


def test_children_leave_room_for_others_and_for_administrators(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every principal may make children, and all servers keep them: one with many long scopes must not fill them."""
    many = [Scope(("read",), parse_pattern(f"topic:{number}{'x' * 200}")) for number in range(32)]

    def fill(first: int, last: int) -> None:
        for number in range(first, last):
            cluster.child(number, *many)

    fill(100, 105)
    with pytest.raises(Refused, match="children of all tokens of ann would take"):
        fill(105, 130)
    size = cluster.state.size()
    cluster.child(20, of=1)
    assert cluster.state.size() == size, "children do not count for the limit of administrators"
    monkeypatch.setattr(access_state, "CHILDREN_BYTES_MAX", 100_000)
    with pytest.raises(Refused, match="take too much room"):
        cluster.child(21, of=1)


def test_the_use_of_a_child_counts_as_use_of_its_parent(cluster: Cluster) -> None:
    cluster.child(3)
    cluster.ask(q.NoteTokenUseRequest({id_of(3): 20_000}), LOCAL)
    assert [cluster.state.tokens[id_of(number)].last_used_day for number in (2, 3)] == [20_000, 20_000]


def test_children_are_in_snapshots_and_other_tokens_are_as_before(cluster: Cluster) -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(cluster.state.snapshot()))
    assert all("parent" not in token for token in plain["tokens"])
    cluster.child(3)
    sent = msgspec.msgpack.encode(cluster.state.snapshot())
    copy = AccessState(msgspec.msgpack.decode(sent, type=AccessRules))
    assert copy.tokens == cluster.state.tokens
    assert copy.children_of(id_of(2)) == [id_of(3)]


def test_a_token_of_a_job_has_no_children(cluster: Cluster) -> None:
    job = JobOfToken(JobNumber(1), JobEpoch(1))
    made = a.CreateToken(id_of(4), token_hash(text_of(4)), "ann", of_job=job)
    cluster.state.apply(made, NOW)
    with pytest.raises(Refused, match="it has no children"):
        cluster.child(5, of=4)


def test_nothing_is_made_while_access_control_is_off() -> None:
    request = q.CreateChildTokenRequest(id_of(4), token_hash(text_of(4)), CutTime(NOW + 1))
    for one in (request, q.EndOwnTokenRequest()):
        with pytest.raises(CutwaterError, match="access control is off"):
            decide_access(one, AccessState(), NOW, None)
