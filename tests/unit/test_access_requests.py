"""Requests about access control: what each decides, each refusal in words, and what the fold makes of it."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from order_driver import LS1, N1, Leader, cluster_of, ur

from cutwater.core import requests as r
from cutwater.core.access import access_decisions as a
from cutwater.core.access import access_requests as q
from cutwater.core.access import access_state
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_handling import Change, decide_access
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.access_text import tell_access
from cutwater.core.access.principals import (
    DAY_US,
    LOCAL_ADMIN,
    CertificateRule,
    PrincipalGroup,
    Scope,
    make_token,
    token_hash,
    token_id,
)
from cutwater.core.access.quotas import Quota, QuotaLimits
from cutwater.core.access.rights import CLUSTER, THE_CLUSTER, Resource, ResourcePattern, parse_pattern
from cutwater.core.access.rules import Rule
from cutwater.core.order import decisions as d
from cutwater.core.order import events as e
from cutwater.core.order.events import Asked, Reply
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import AlreadyExists, ContradictoryCommand, CutwaterError, InvalidArgument, NotFound, Refused
from cutwater.protocol.access_copy import decode_rules, encode_rules
from cutwater.protocol.errors import MalformedFrame
from cutwater.protocol.metadata_api import ASK
from cutwater.types import GLSN, CutTime, ProducerEpoch, ProducerId, Revision
from cutwater.wire.options import WireOptions

NOW = CutTime(20_000 * DAY_US + 5)
LOCAL = RequestOrigin(LOCAL_ADMIN, "request-1")
ROOT = RequestOrigin("root", "request-2", "0" * 16)
SHOWN = RequestOrigin("root", "request-3", "0" * 15 + "1")
"""The administrator, with the token that it shows."""
ORDERS = parse_pattern("topic:orders")


def token(number: int) -> str:
    return make_token(number.to_bytes(8), bytes([number]) * 32)


def create(number: int, principal: str, *scopes: Scope, expires: int = 0) -> q.CreateTokenRequest:
    text = token(number)
    return q.CreateTokenRequest(token_id(text) or "", token_hash(text), principal, scopes, CutTime(expires))


def child(number: int, *scopes: Scope, expires: int = NOW + 5) -> q.CreateChildTokenRequest:
    made = create(number, "")
    return q.CreateChildTokenRequest(made.id, made.sha256, CutTime(expires), scopes)


ID = create(1, "root").id
OTHER_ID = create(2, "root").id


class Cluster:
    """Access control as a leader has it, driven by requests."""

    def __init__(self) -> None:
        self.state = AccessState()
        self.decisions: list[a.AccessDecision] = []

    def ask(self, request: q.AccessRequest, origin: RequestOrigin | None = LOCAL, now: CutTime = NOW) -> q.AccessAnswer:
        decisions, answer = decide_access(request, self.state, now, origin)
        for decision in decisions:
            made = d.attributed(msgspec.structs.replace(decision, at=now), origin)
            assert isinstance(made, a.AccessDecision)
            assert self.state.problem(made) == ""
            self.state.apply(made, CutTime(0))
            self.decisions.append(made)
        if isinstance(answer, q.AccessChanged):
            assert answer.revision == self.state.revision, "the answer names the revision that has the change"
        return answer

    def changes(self, request: q.AccessRequest, origin: RequestOrigin | None = LOCAL, now: CutTime = NOW) -> bool:
        """Ask, and return whether that decided anything."""
        before = len(self.decisions)
        self.ask(request, origin, now)
        return len(self.decisions) > before


@pytest.fixture
def off() -> Cluster:
    return Cluster()


@pytest.fixture
def secured() -> Cluster:
    """Access control is enforced, with an administrator that has one token."""
    cluster = Cluster()
    cluster.ask(q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER))
    cluster.ask(create(1, "root"))
    cluster.ask(q.SetAccessModeRequest(AccessMode.ENFORCED))
    return cluster


# Turning it on.


def sample(kind: type) -> q.AccessRequest:
    """A request of this kind that fits ``secured``."""
    samples: list[q.AccessRequest] = [
        create(2, "alice"),
        q.RevokeTokenRequest(ID),
        q.ExpireTokenRequest(ID, CutTime(NOW + 10)),
        child(7),
        q.EndOwnTokenRequest(),
        q.ListTokensRequest(),
        q.DescribeTokenRequest(ID),
        q.NoteTokenUseRequest({ID: 20_000}),
        q.AllowRequest("alice", ("read",), ORDERS),
        q.RemoveRightsRequest("root", THE_CLUSTER),
        q.ListRulesRequest(),
        q.CheckAccessRequest("root", "read", Resource("topic", "orders")),
        q.CreateGroupRequest("writers"),
        q.ChangeGroupRequest("writers", add=("alice",)),
        q.DeleteGroupRequest("writers"),
        q.ListGroupsRequest(),
        q.SetCertificateRulesRequest((CertificateRule("cn", "*", "{1}"),)),
        q.ListCertificateRulesRequest(),
        q.SetQuotaRequest("alice", QuotaLimits(connections=1)),
        q.RemoveQuotaRequest("alice"),
        q.ListQuotasRequest(),
        q.ListPrincipalsRequest(),
        q.DescribePrincipalRequest("root"),
        q.SetAccessModeRequest(AccessMode.OFF),
        q.WhoAmIRequest(),
        q.ConfirmAccessRequest(),
    ]
    return next(one for one in samples if type(one) is kind)


@pytest.mark.parametrize("kind", get_args(q.AccessRequest), ids=lambda kind: kind.__name__)
def test_while_it_is_off_only_the_holder_of_the_clusters_key_changes_anything(kind: type) -> None:
    for origin in (None, RequestOrigin("root"), RequestOrigin("")):
        off = Cluster()
        if issubclass(kind, Change):
            with pytest.raises(Refused, match="cutwater cluster secure"):
                off.ask(sample(kind), origin)
        else:
            try:
                off.ask(sample(kind), origin)
            except NotFound:
                assert kind in (q.DescribeTokenRequest, q.DescribePrincipalRequest)
        assert off.state.is_untouched


@pytest.mark.parametrize("mode", [AccessMode.PERMISSIVE, AccessMode.ENFORCED])
def test_it_is_turned_on_only_with_an_administrator_that_can_prove_its_identity(off: Cluster, mode: AccessMode) -> None:
    turn_on = q.SetAccessModeRequest(mode)

    def is_refused() -> bool:
        with pytest.raises(Refused, match="acl allow NAME cluster-admin cluster"):
            off.ask(turn_on)
        return True

    assert is_refused()
    off.ask(create(1, "root"))
    assert is_refused()
    off.ask(q.AllowRequest("other", ("cluster-admin",), THE_CLUSTER))
    off.ask(q.AllowRequest("root", ("cluster-operate",), THE_CLUSTER))
    assert is_refused()
    off.ask(create(2, "other", Scope(("read",), ORDERS)))
    off.ask(create(3, "other", expires=NOW + 1))
    with pytest.raises(Refused, match="without an administrator"):
        off.ask(turn_on, now=CutTime(NOW + 1))
    assert off.changes(turn_on)
    assert off.state.mode is mode
    assert not off.changes(turn_on, ROOT), "it is on already"


def test_a_mapped_certificate_or_a_group_makes_an_administrator_too(off: Cluster) -> None:
    off.ask(q.CreateGroupRequest("admins", ("ann",)))
    off.ask(q.AllowRequest("group:admins", ("cluster-admin",), THE_CLUSTER))
    off.ask(q.SetCertificateRulesRequest((CertificateRule("cn", "ops-*", "ops/{1}"),)))
    with pytest.raises(Refused):
        off.ask(q.SetAccessModeRequest(AccessMode.ENFORCED))
    off.ask(q.SetCertificateRulesRequest((CertificateRule("cn", "ops-*", "{1}"),)))
    assert off.changes(q.SetAccessModeRequest(AccessMode.ENFORCED))


@pytest.mark.parametrize(
    "request_",
    [
        q.RevokeTokenRequest(ID),
        q.ExpireTokenRequest(ID, CutTime(NOW + 10)),
        q.RemoveRightsRequest("root", THE_CLUSTER),
    ],
)
def test_the_last_administrator_cannot_be_removed(secured: Cluster, request_: q.AccessRequest) -> None:
    with pytest.raises(Refused, match="make another one first"):
        secured.ask(request_, ROOT)
    secured.ask(q.AllowRequest("ann", ("cluster-admin",), THE_CLUSTER), ROOT)
    secured.ask(create(2, "ann"), ROOT)
    assert secured.changes(request_, ROOT)


def test_it_can_be_turned_off_and_then_nothing_keeps_the_last_administrator(secured: Cluster) -> None:
    assert secured.changes(q.SetAccessModeRequest(AccessMode.OFF), ROOT)
    assert secured.changes(q.RevokeTokenRequest(ID), LOCAL)


def test_when_the_last_token_has_expired_other_changes_go_on(off: Cluster) -> None:
    off.ask(q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER))
    off.ask(create(1, "root", expires=NOW + 1))
    off.ask(q.SetAccessModeRequest(AccessMode.ENFORCED))
    later = CutTime(NOW + 2)
    assert off.changes(q.AllowRequest("alice", ("read",), ORDERS), ROOT, later)
    assert off.changes(create(2, "root"), ROOT, later)


# Tokens.


def test_a_token_is_created_once_listed_described_and_revoked(secured: Cluster) -> None:
    scope = Scope(("append", "read"), ORDERS)
    request = create(2, "alice", scope, expires=NOW + 10)
    assert secured.changes(request, ROOT)
    assert not secured.changes(request, ROOT), "a repeated request makes no second token"
    expected = q.TokenInfo(
        *(request.id, "alice", (Scope(("read", "append"), ORDERS),), CutTime(NOW + 10), "root", NOW, 0)
    )
    assert secured.ask(q.DescribeTokenRequest(request.id)) == q.TokenList((expected,))
    assert secured.ask(q.ListTokensRequest("alice")) == q.TokenList((expected,))
    assert secured.ask(q.ListTokensRequest("nobody")) == q.TokenList(())
    both = secured.ask(q.ListTokensRequest())
    assert isinstance(both, q.TokenList)
    assert [(one.id, one.creator) for one in both.tokens] == [(ID, LOCAL_ADMIN), (request.id, "root")]
    assert secured.ask(q.ListTokensRequest(after=ID)) == q.TokenList((expected,))
    assert secured.changes(q.RevokeTokenRequest(request.id), ROOT)
    assert not secured.state.view.is_current(request.id, NOW)


def test_a_token_gets_an_earlier_end_and_never_a_later_one(secured: Cluster) -> None:
    request = create(2, "alice")
    secured.ask(request, ROOT)
    assert secured.changes(q.ExpireTokenRequest(request.id, CutTime(NOW + 10)), ROOT)
    assert not secured.changes(q.ExpireTokenRequest(request.id, CutTime(NOW + 10)), ROOT), "it ends then already"
    view = secured.state.view
    assert (view.is_current(request.id, NOW + 9), view.is_current(request.id, NOW + 10)) == (True, False)
    assert secured.changes(q.ExpireTokenRequest(request.id, CutTime(NOW + 5)), ROOT)
    for expires, error, says in (
        (NOW + 6, Refused, "never gets more time"),
        (NOW, InvalidArgument, f"cutwater token revoke {request.id}"),
        (0, InvalidArgument, "which is past"),
    ):
        with pytest.raises(error, match=says):
            secured.ask(q.ExpireTokenRequest(request.id, CutTime(expires)), ROOT)
    with pytest.raises(NotFound, match="cutwater token list"):
        secured.ask(q.ExpireTokenRequest("none", CutTime(NOW + 5)), ROOT)


def test_no_answer_and_no_event_shows_a_hash(secured: Cluster) -> None:
    answers = [secured.ask(sample(kind), ROOT) for kind in (q.ListTokensRequest, q.DescribePrincipalRequest)]
    told = [tell_access(decision) for decision in secured.decisions]
    assert token_hash(token(1)) not in repr((answers, told))
    assert token(1).rpartition("_")[2] not in repr((answers, told, secured.decisions, secured.state.snapshot()))


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (q.CreateTokenRequest("x", "0" * 64, "alice"), InvalidArgument, "16 hexadecimal digits"),
        (q.CreateTokenRequest(OTHER_ID, "secret", "alice"), InvalidArgument, "never the token"),
        (create(2, "_local"), InvalidArgument, "name of a principal"),
        (create(2, "group:a"), InvalidArgument, "name of a principal"),
        (create(2, "alice", expires=NOW), InvalidArgument, "which is past"),
        (create(2, "alice", expires=-1), InvalidArgument, "which is past"),
        (create(2, "alice", expires=2**60), InvalidArgument, "after the year 9999"),
        (create(2, "alice", Scope((), ORDERS)), InvalidArgument, "at least one right"),
        (create(2, "alice", Scope(("publish",), ORDERS)), InvalidArgument, "no right publish on a topic"),
        (create(2, "alice", Scope(("read",), ResourcePattern("x"))), InvalidArgument, "kinds: topic"),
        (create(2, "alice", *(Scope(("read",), ORDERS),) * 33), InvalidArgument, "32 is the most"),
        (q.CreateTokenRequest(ID, "0" * 64, "alice"), AlreadyExists, "random id"),
        (q.RevokeTokenRequest("none"), NotFound, "cutwater token list"),
        (q.DescribeTokenRequest("none"), NotFound, "cutwater token list"),
        (q.AllowRequest("a b", ("read",), ORDERS), InvalidArgument, "name of a principal"),
        (
            q.AllowRequest("group:none", ("read",), ORDERS),
            NotFound,
            "create it first with `cutwater group create none`",
        ),
        (q.AllowRequest("bob", ("read",), parse_pattern("topic:order:s")), InvalidArgument, "'order:s' cannot be the"),
        (q.AllowRequest("bob", ("read",), parse_pattern("topic:a b*")), InvalidArgument, "'a b' cannot be the"),
        (q.AllowRequest("alice", (), ORDERS), InvalidArgument, "at least one right"),
        (q.AllowRequest("alice", ("cluster-admin",), ORDERS), InvalidArgument, "rights on a topic: read"),
        (q.AllowRequest("alice", ("read",), ResourcePattern("topic", "a*")), InvalidArgument, "not at its end"),
        (q.AllowRequest("alice", ("read",), ResourcePattern("topic")), InvalidArgument, "1 to 255 characters"),
        (q.RemoveRightsRequest("alice", ORDERS), NotFound, "cutwater acl list"),
        (q.RemoveRightsRequest("root", THE_CLUSTER, ("audit-read",)), NotFound, "it gives cluster-admin"),
        (q.CheckAccessRequest("alice", "fly", CLUSTER), InvalidArgument, "rights: read"),
        (q.CheckAccessRequest("alice", "read", CLUSTER), InvalidArgument, "rights on a cluster: cluster-operate"),
        (q.CheckAccessRequest("alice", "read", Resource("topic")), InvalidArgument, "1 to 255 characters"),
        (q.CreateGroupRequest("a:b"), InvalidArgument, "name of a group"),
        (q.CreateGroupRequest("a", ("_x",)), InvalidArgument, "name of a principal"),
        (q.CreateGroupRequest("a", tuple(f"p{i}" for i in range(1_001))), InvalidArgument, "1000 is the most"),
        (q.ChangeGroupRequest("none"), NotFound, "create it first"),
        (q.DeleteGroupRequest("none"), NotFound, "create it first"),
        (q.ListGroupsRequest("none"), NotFound, "create it first"),
        (q.SetCertificateRulesRequest((CertificateRule("x", "*", "{1}"),)), InvalidArgument, "use 'san'"),
        (
            q.SetCertificateRulesRequest((CertificateRule("cn", "*", "{1}"),) * 101),
            *(InvalidArgument, "100 is the most"),
        ),
        (q.SetQuotaRequest("alice", QuotaLimits()), InvalidArgument, "at least one limit"),
        (q.SetQuotaRequest("alice", QuotaLimits(connections=-1)), InvalidArgument, "connections is 1 to"),
        (q.SetQuotaRequest("group:none", QuotaLimits(connections=1)), NotFound, "create it first"),
        (q.SetQuotaRequest("", QuotaLimits(connections=1)), InvalidArgument, "name of a principal"),
        (q.RemoveQuotaRequest("alice"), NotFound, "cutwater quota list"),
        (q.DescribePrincipalRequest("alice"), NotFound, "cutwater principal list"),
    ],
)
def test_a_wrong_request_is_refused_in_words_and_changes_nothing(
    secured: Cluster, request_: q.AccessRequest, error: type[CutwaterError], says: str
) -> None:
    before = secured.state.snapshot()
    with pytest.raises(error, match=says):
        secured.ask(request_, ROOT)
    assert secured.state.snapshot() == before


def test_numbers_are_bounded(secured: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENS_MAX", "RULES_MAX", "GROUPS_MAX", "QUOTAS_MAX"):
        monkeypatch.setattr(access_state, name, 1)
    secured.ask(q.CreateGroupRequest("one"), ROOT)
    secured.ask(q.SetQuotaRequest("one", QuotaLimits(connections=1)), ROOT)
    for request in (
        create(2, "alice"),
        q.AllowRequest("alice", ("read",), ORDERS),
        q.CreateGroupRequest("two"),
        q.SetQuotaRequest("two", QuotaLimits(connections=1)),
    ):
        with pytest.raises(Refused, match=r"there are 1 .*, which is the most"):
            secured.ask(request, ROOT)
    assert secured.changes(q.AllowRequest("root", ("audit-read",), THE_CLUSTER), ROOT), "this is no further rule"
    assert secured.changes(q.SetQuotaRequest("one", QuotaLimits(connections=2)), ROOT)
    # An administrator can be made nevertheless with direct access to the store, which is the last way in.
    assert secured.changes(q.AllowRequest("ann", ("cluster-admin",), THE_CLUSTER), LOCAL)
    assert secured.changes(create(3, "ann"), LOCAL)


def test_the_use_of_tokens_is_noted_by_day_and_changes_no_revision(secured: Cluster) -> None:
    today, revision = NOW // DAY_US, secured.state.revision
    assert secured.changes(q.NoteTokenUseRequest({ID: today - 1, "unknown": today}), None)
    assert not secured.changes(q.NoteTokenUseRequest({ID: today - 1}), None)
    assert secured.state.tokens[ID].last_used_day == today - 1
    assert secured.changes(q.NoteTokenUseRequest({ID: today + 400}), None)
    assert secured.state.tokens[ID].last_used_day == today, "the future has not come yet"
    assert secured.state.revision == revision


# Rules, groups, quotas, certificates and principals.


def test_allowing_adds_rights_to_one_rule_and_removing_takes_them_away(secured: Cluster) -> None:
    assert secured.changes(q.AllowRequest("alice", ("trim", "read"), ORDERS), ROOT)
    assert secured.changes(q.AllowRequest("alice", ("append", "read"), ORDERS), ROOT)
    assert secured.decisions[-1] == a.AllowRights("alice", ("append",), ORDERS, at=NOW, by=ROOT)
    assert not secured.changes(q.AllowRequest("alice", ("append",), ORDERS), ROOT)
    assert secured.ask(q.ListRulesRequest("alice")) == q.RuleList((Rule("alice", ("read", "append", "trim"), ORDERS),))
    question = q.CheckAccessRequest("alice", "append", Resource("topic", "orders"))
    verdict = secured.ask(question)
    assert isinstance(verdict, q.AccessVerdict)
    assert (verdict.is_allowed, str(verdict.rule)) == (True, "alice read,append,trim topic:orders")
    secured.ask(q.RemoveRightsRequest("alice", ORDERS, ("append",)), ROOT)
    verdict = secured.ask(question)
    assert isinstance(verdict, q.AccessVerdict)
    assert (verdict.is_allowed, verdict.missing) == (False, q.Missing.RULE)
    secured.ask(q.RemoveRightsRequest("alice", ORDERS), ROOT)
    assert secured.ask(q.ListRulesRequest("alice")) == q.RuleList(())
    rest = secured.ask(q.ListRulesRequest())
    assert rest == q.RuleList((Rule("root", ("cluster-admin",), THE_CLUSTER),))
    assert secured.ask(q.ListRulesRequest(after=1)) == q.RuleList(())


def test_groups_are_created_changed_and_deleted_with_their_rules_and_quota(secured: Cluster) -> None:
    assert secured.changes(q.CreateGroupRequest("w", ("bob", "alice", "bob")), ROOT)
    assert not secured.changes(q.CreateGroupRequest("w", ("alice", "bob")), ROOT)
    with pytest.raises(AlreadyExists, match="change it"):
        secured.ask(q.CreateGroupRequest("w"), ROOT)
    secured.ask(q.AllowRequest("group:w", ("read",), ORDERS), ROOT)
    secured.ask(q.SetQuotaRequest("group:w", QuotaLimits(connections=5)), ROOT)
    with pytest.raises(NotFound, match="'carol' is no member"):
        secured.ask(q.ChangeGroupRequest("w", remove=("carol",)), ROOT)
    with pytest.raises(InvalidArgument, match="added and removed"):
        secured.ask(q.ChangeGroupRequest("w", add=("bob",), remove=("bob",)), ROOT)
    assert not secured.changes(q.ChangeGroupRequest("w", add=("bob",)), ROOT)
    assert secured.changes(q.ChangeGroupRequest("w", add=("carol",), remove=("bob",)), ROOT)
    assert secured.ask(q.ListGroupsRequest()) == q.GroupList((PrincipalGroup("w", ("alice", "carol")),))
    assert secured.ask(q.ListGroupsRequest("w")) == secured.ask(q.ListGroupsRequest())
    assert secured.ask(q.DescribePrincipalRequest("carol")) == q.PrincipalDescription(
        "carol",
        ("w",),
        (Rule("group:w", ("read",), ORDERS),),
        (Quota("group:w", QuotaLimits(connections=5)),),
        (),
        is_admin=False,
    )
    secured.ask(q.DeleteGroupRequest("w"), ROOT)
    assert secured.ask(q.ListQuotasRequest()) == q.QuotaList(())
    secured.ask(q.CreateGroupRequest("w", ("eve",)), ROOT)
    verdict = secured.ask(q.CheckAccessRequest("eve", "read", Resource("topic", "orders")))
    assert isinstance(verdict, q.AccessVerdict)
    assert not verdict.is_allowed, "a new group with the name of a deleted one has none of its rights"


def test_quotas_are_set_as_a_whole_and_removed(secured: Cluster) -> None:
    limits = QuotaLimits(bytes_in_per_s=1_000, staged_bytes=5)
    assert secured.changes(q.SetQuotaRequest("alice", limits), ROOT)
    assert not secured.changes(q.SetQuotaRequest("alice", limits), ROOT)
    assert secured.ask(q.ListQuotasRequest()) == q.QuotaList((Quota("alice", limits),))
    secured.ask(q.SetQuotaRequest("alice", QuotaLimits(connections=1)), ROOT)
    assert secured.ask(q.ListQuotasRequest("alice")) == q.QuotaList((Quota("alice", QuotaLimits(connections=1)),))
    assert secured.ask(q.ListQuotasRequest("bob")) == q.QuotaList(())
    assert secured.changes(q.RemoveQuotaRequest("alice"), ROOT)
    assert secured.state.quotas == {}


def test_certificate_rules_are_replaced_as_a_whole(secured: Cluster) -> None:
    rules = (CertificateRule("san", "DNS:*", "{1}"), CertificateRule("cn", "a", "b"))
    assert secured.changes(q.SetCertificateRulesRequest(rules), ROOT)
    assert not secured.changes(q.SetCertificateRulesRequest(rules), ROOT)
    assert secured.ask(q.ListCertificateRulesRequest()) == q.CertificateRuleList(rules)


def test_principals_are_all_that_something_names(secured: Cluster) -> None:
    secured.ask(q.CreateGroupRequest("w", ("bob",)), ROOT)
    secured.ask(q.AllowRequest("group:w", ("read",), ORDERS), ROOT)
    secured.ask(q.AllowRequest("alice", ("read",), ORDERS), ROOT)
    secured.ask(q.SetQuotaRequest("carol", QuotaLimits(connections=1)), ROOT)
    rules = (CertificateRule("cn", "x", "dora"), CertificateRule("cn", "*", "{1}"))
    secured.ask(q.SetCertificateRulesRequest(rules), ROOT)
    names = ("alice", "bob", "carol", "dora", "root")
    assert secured.ask(q.ListPrincipalsRequest()) == q.PrincipalList(names)
    assert secured.ask(q.ListPrincipalsRequest("bob")) == q.PrincipalList(names[2:])
    root = secured.ask(q.DescribePrincipalRequest("root"))
    assert isinstance(root, q.PrincipalDescription)
    assert (root.is_admin, [one.id for one in root.tokens]) == (True, [ID])


def test_long_lists_come_in_pages(secured: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdefg":
        secured.ask(q.CreateGroupRequest(name, ("x" * 100,)), ROOT)
    monkeypatch.setattr(q, "PAGE_MAX", 3)
    found: list[str] = []
    more = True
    while more:
        page = secured.ask(q.ListGroupsRequest(after=found[-1] if found else ""))
        assert isinstance(page, q.GroupList)
        assert len(page.groups) <= 3
        found += [group.name for group in page.groups]
        more = page.more
    assert found == list("abcdefg")
    monkeypatch.setattr(q, "PAGE_CHARS_MAX", 10)
    page = secured.ask(q.ListGroupsRequest())
    assert isinstance(page, q.GroupList)
    assert (len(page.groups), page.more) == (1, True), "one always comes, so that a reader gets on"


# The fold.


def life() -> list[a.AccessDecision]:
    """Every kind of decision once at least."""
    cluster = Cluster()
    cluster.ask(q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER))
    cluster.ask(create(1, "root", Scope(("cluster-admin",), THE_CLUSTER)))
    cluster.ask(q.SetAccessModeRequest(AccessMode.PERMISSIVE))
    for request in (
        create(2, "alice"),
        q.NoteTokenUseRequest({ID: 20_000}),
        q.CreateGroupRequest("w", ("alice",)),
        q.AllowRequest("group:w", ("read", "append"), ORDERS),
        q.RemoveRightsRequest("group:w", ORDERS, ("append",)),
        q.SetQuotaRequest("alice", QuotaLimits(requests_per_s=7)),
        q.SetCertificateRulesRequest((CertificateRule("cn", "*", "{1}"),)),
        q.ExpireTokenRequest(OTHER_ID, CutTime(NOW + 10)),
        q.RevokeTokenRequest(OTHER_ID),
        q.SetAccessModeRequest(AccessMode.ENFORCED),
        q.RemoveQuotaRequest("alice"),
        q.DeleteGroupRequest("w"),
    ):
        cluster.ask(request, ROOT)
    assert {type(decision) for decision in cluster.decisions} == set(get_args(a.AccessDecision))
    return cluster.decisions


LIFE = life()


@pytest.mark.parametrize("at", range(len(LIFE) + 1))
def test_a_snapshot_and_the_rest_equal_the_whole_sequence(at: int) -> None:
    whole = OrderState(None, LIFE)
    part = OrderState(None, LIFE[:at])
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(part.snapshot()), type=Snapshot)
    rest = msgspec.msgpack.decode(msgspec.msgpack.encode(LIFE[at:]), type=list[d.Decision])
    assert rest == LIFE[at:]
    resumed = OrderState(stored, rest)
    assert resumed.snapshot() == whole.snapshot()
    assert resumed.access.view.rules == whole.access.snapshot()
    assert part.access.revision == sum(1 for one in LIFE[:at] if not isinstance(one, a.NoteTokenUse))


def test_a_cluster_that_never_used_access_control_stores_the_bytes_of_before() -> None:
    """'The field is younger than the format': neither a snapshot nor a decision says anything of it."""
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(OrderState().snapshot()))
    assert "access" not in stored
    for decision in (
        d.DropCursor("a"),
        d.CommitCursor("a", GLSN(1)),
        d.OpenProducer(ProducerId("p"), ProducerEpoch(1), LS1, 1),
    ):
        assert "by" not in msgspec.msgpack.decode(msgspec.msgpack.encode(decision))
    assert "access" in msgspec.msgpack.decode(msgspec.msgpack.encode(OrderState(None, LIFE[:1]).snapshot()))
    old = msgspec.msgpack.decode(msgspec.msgpack.encode({"index": 3}), type=Snapshot)
    assert OrderState(old).access.snapshot() == AccessRules()


def test_a_server_that_knows_fewer_fields_understands_rules_and_one_that_knows_more_too() -> None:
    rules = OrderState(None, LIFE[:-3]).access.snapshot()
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(rules))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data | {"later": 1}), type=AccessRules) == rules
    del data["quotas"], data["certificate_rules"]
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=AccessRules)
    assert (older.quotas, older.rules, older.revision) == ((), rules.rules, rules.revision)


@pytest.mark.parametrize("kind", get_args(q.AccessRequest), ids=lambda kind: kind.__name__)
def test_requests_and_answers_come_back_from_the_wire(kind: type, secured: Cluster) -> None:
    request = sample(kind)
    assert ASK.argument_of(msgspec.Raw(msgspec.msgpack.encode(request))) == request
    secured.ask(q.CreateGroupRequest("writers", ("alice",)), ROOT)
    secured.ask(q.SetQuotaRequest("alice", QuotaLimits(connections=9)), ROOT)
    try:
        answer = secured.ask(request, SHOWN)
    except Refused:
        known = (q.RevokeTokenRequest, q.EndOwnTokenRequest, q.ExpireTokenRequest, q.RemoveRightsRequest)
        assert kind in known, "that would remove the last administrator"
        return
    except AlreadyExists:
        assert kind is q.CreateGroupRequest
        return
    assert ASK.result_of(msgspec.msgpack.encode(answer)) == answer


def test_rules_travel_to_servers_as_they_are() -> None:
    rules = OrderState(None, LIFE).access.snapshot()
    assert decode_rules(memoryview(encode_rules(rules))) == rules
    for damaged in (b"", b"nothing", encode_rules(rules)[:-1], msgspec.msgpack.encode({"mode": "other"})):
        with pytest.raises(MalformedFrame, match="no rules of access control"):
            decode_rules(damaged)


@pytest.mark.parametrize(
    "decision",
    [
        a.CreateToken(ID, "0" * 64, "alice"),
        a.CreateToken("f" * 16, "0" * 64, "alice", parent="none"),
        a.RevokeToken("none"),
        a.ExpireToken("none", CutTime(1)),
        a.RemoveRights("alice", ("read",), ORDERS),
        a.RemoveRights("root", ("audit-read",), THE_CLUSTER),
        a.DeleteGroup("none"),
        a.RemoveQuota("none"),
    ],
)
def test_a_decision_that_contradicts_the_earlier_ones_is_refused(decision: a.AccessDecision) -> None:
    state = OrderState(None, LIFE)
    before = state.snapshot()
    with pytest.raises(ContradictoryCommand):
        state.apply(decision)
    assert state.snapshot() == before


# Through the leader.


def test_the_leader_notes_on_whose_request_it_decides() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}))
    for number, request in enumerate(
        (
            q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER),
            create(1, "root"),
            r.CommitCursorRequest("a", GLSN(0)),
        )
    ):
        (reply,) = [one for one in leader.run(Asked(number, request, LOCAL)) if isinstance(one, Reply)]
        assert not isinstance(reply.outcome, CutwaterError), reply
        decision = leader.stored[-1]
        assert isinstance(decision, a.AllowRights | a.CreateToken | d.CommitCursor)
        assert decision.by == LOCAL
    assert leader.state.access.tokens[ID].creator == LOCAL_ADMIN
    kinds = [event.kind for event in leader.state.events][-2:]
    assert kinds == ["AllowRights", "CreateToken"]
    leader.run(Asked(9, r.CommitCursorRequest("b", GLSN(0))))
    assert leader.stored[-1] == d.CommitCursor("b", GLSN(0)), "without a principal there is none to note"


def test_a_token_is_revoked_while_no_member_of_a_log_stream_has_reported() -> None:
    leader = Leader([*cluster_of({LS1: (N1,)}), *LIFE], is_new=True)
    assert leader.layer.first_reports.are_missing
    leader.run(Asked(1, create(5, "alice"), ROOT))
    leader.run(Asked(2, q.RevokeTokenRequest(create(5, "alice").id), ROOT))
    assert [type(decision) for decision in leader.stored[-2:]] == [a.CreateToken, a.RevokeToken]
    assert leader.layer.first_reports.are_missing


def test_the_leader_refuses_a_change_without_a_principal_while_access_control_is_off() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}))
    (reply,) = [one for one in leader.run(Asked(1, create(1, "root"))) if isinstance(one, Reply)]
    assert isinstance(reply.outcome, Refused)


def test_the_description_tells_of_access_control_only_once_it_was_used() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}))

    def described() -> r.Description:
        (reply,) = [one for one in leader.run(Asked(1, r.DescribeRequest())) if isinstance(one, Reply)]
        assert isinstance(reply.outcome, r.Description)
        return reply.outcome

    assert described().access is msgspec.UNSET
    leader.run(Asked(2, create(1, "root"), LOCAL))
    assert described().access == q.AccessSummary(AccessMode.OFF, Revision(1), tokens=1)


# Requests that wait between their judgement and their decision.


def test_only_what_takes_rights_away_asks_for_another_judgement(secured: Cluster) -> None:
    state = secured.state
    wider: list[q.AccessRequest] = [
        create(2, "alice"),
        q.AllowRequest("alice", ("read",), ORDERS),
        q.SetQuotaRequest("alice", QuotaLimits(connections=1)),
        q.RemoveQuotaRequest("alice"),
        q.NoteTokenUseRequest({ID: 20_000}),
        child(7),
    ]
    for request in wider:
        before = state.narrowed_at
        assert secured.changes(request, SHOWN)
        assert state.narrowed_at == before < state.revision
    narrower: list[q.AccessRequest] = [
        q.ExpireTokenRequest(OTHER_ID, CutTime(NOW + 10)),
        q.RevokeTokenRequest(OTHER_ID),
        q.EndOwnTokenRequest(child(7).id),
        q.RemoveRightsRequest("alice", ORDERS),
        q.CreateGroupRequest("g", ("alice", "bob")),
        q.ChangeGroupRequest("g", remove=("bob",)),
        q.DeleteGroupRequest("g"),
        q.SetCertificateRulesRequest((CertificateRule("cn", "*", "{1}"),)),
        q.SetAccessModeRequest(AccessMode.PERMISSIVE),
    ]
    for request in narrower:
        assert secured.changes(request, SHOWN)
        assert state.narrowed_at == state.revision
    assert {type(one) for one in wider + narrower} >= set(get_args(Change))


def test_a_request_that_waited_for_first_reports_is_judged_again_if_rights_were_taken_away() -> None:
    leader = Leader(cluster_of({LS1: (N1,)}), is_new=True)
    # Changes of access control do not wait, so the right may be gone before a replica has reported.
    changes = (
        q.AllowRequest("root", ("cluster-admin",), THE_CLUSTER),
        create(1, "root"),
        q.SetAccessModeRequest(AccessMode.ENFORCED),
    )
    effects: list[e.OrderEffect] = []
    for number in (1, 2):
        judged_at = leader.state.access.revision
        effects += leader.run(
            Asked(number, r.CreateTopicRequest(f"made-{number}", 1, 1), RequestOrigin("eve"), judged_at)
        )
        if number == 1:
            for request in changes:
                effects += leader.run(Asked(9, request, LOCAL))
    effects += leader.run(leader.report(N1, ur(LS1, end=0)))
    outcomes = {effect.request_id: effect.outcome for effect in effects if isinstance(effect, Reply)}
    assert isinstance(outcomes[1], e.RightsChanged)
    assert isinstance(outcomes[2], r.Created)
    assert [leader.state.topic_named(f"made-{number}") is not None for number in (1, 2)] == [False, True]


def test_the_rules_always_fit_into_one_message_to_a_server(secured: Cluster) -> None:
    """A server that cannot get the rules has no lease, and refuses all clients."""
    members = tuple(f"{number:03}{'m' * 250}" for number in range(access_state.MEMBERS_MAX))
    groups = [q.CreateGroupRequest(f"g{number}", members) for number in range(40)]
    with pytest.raises(Refused, match="8 MiB is the most"):
        _ = [secured.ask(group, ROOT) for group in groups]
    assert len(secured.state.groups) > 20
    size = len(encode_rules(secured.state.snapshot()))
    assert size <= access_state.RULES_BYTES_MAX <= WireOptions().frame_bytes_max / 2
    # What makes them smaller is possible, and so is to bring an administrator back.
    assert secured.changes(q.ChangeGroupRequest("g0", remove=members[:1]), ROOT)
    assert secured.changes(create(7, "root"), LOCAL)
    assert secured.changes(q.DeleteGroupRequest("g0"), ROOT)
