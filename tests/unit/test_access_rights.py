"""Rights, resources, patterns, names, tokens and mappings of certificates: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from cutwater.core.access.access_requests import AccessVerdict, Missing
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_view import NOBODY, AccessView
from cutwater.core.access.denials import denied, quoted
from cutwater.core.access.principals import (
    CertificateNames,
    CertificateRule,
    PrincipalGroup,
    Scope,
    TokenRecord,
    can_map_to,
    captured,
    check_certificate_rule,
    check_principal,
    check_subject,
    check_token,
    make_token,
    principal_of_certificate,
    token_hash,
    token_id,
)
from cutwater.core.access.quotas import LIMIT_MAX, Quota, QuotaLimits, check_limits
from cutwater.core.access.rights import (
    CLUSTER,
    RIGHTS_OF_KIND,
    Resource,
    ResourceKind,
    ResourcePattern,
    Right,
    check_rights,
    parse_pattern,
    parse_resource,
)
from cutwater.core.access.rules import Rule
from cutwater.errors import InvalidArgument, PermissionDenied
from cutwater.types import CutTime, Revision

TOPIC = ResourceKind.TOPIC
TOKEN = make_token(b"12345678", b"s" * 32)
RECORD = TokenRecord(token_id(TOKEN) or "", token_hash(TOKEN), "alice")


def view(*rules: str, groups: dict[str, str] | None = None, tokens: tuple[TokenRecord, ...] = ()) -> AccessView:
    """A view of rules like ``alice read,append topic:orders*``."""
    made = []
    for text in rules:
        subject, rights, pattern = text.split()
        made.append(Rule(subject, tuple(rights.split(",")), parse_pattern(pattern)))
    members = tuple(PrincipalGroup(name, tuple(its.split())) for name, its in (groups or {}).items())
    return AccessView(AccessRules(Revision(1), tokens=tokens, rules=tuple(made), groups=members))


def may(seen: AccessView, question: str, token: str = "") -> bool:
    """Whether ``alice read topic:orders`` is allowed."""
    principal, right, resource = question.split()
    return seen.decide(principal, Right(right), parse_resource(resource), token).is_allowed


# Rights and patterns.


def test_every_right_exists_on_some_kind_of_resource_and_every_resource_can_be_described() -> None:
    assert {right for rights in RIGHTS_OF_KIND.values() for right in rights} == set(Right)
    assert set(RIGHTS_OF_KIND) == set(ResourceKind)
    assert all(Right.DESCRIBE in rights for rights in RIGHTS_OF_KIND.values())


@pytest.mark.parametrize("text", ["topic:orders", "topic:orders*", "topic:*", "topic:_audit", "cluster", "cursor:a b"])
def test_a_pattern_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_pattern(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "kinds: topic, cursor"),
        ("table:orders", "kinds: topic, cursor"),
        ("topic", "1 to 255 characters"),
        ("topic:", "1 to 255 characters"),
        ("topic:" + "x" * 256, "1 to 255 characters"),
        ("topic:a*b", "not at its end"),
        ("topic:**", "not at its end"),
        ("topic:a\n", "cannot be printed"),
        ("cluster:one", "write 'cluster'"),
        ("cluster:*", "write 'cluster'"),
    ],
)
def test_a_wrong_pattern_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse_pattern(text)


@pytest.mark.parametrize(("text", "says"), [("cluster:one", "write 'cluster'"), ("topic:", "1 to"), ("x:y", "kinds: ")])
def test_a_wrong_resource_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse_resource(text)


def test_rights_are_put_in_order_and_checked_against_the_kind_of_resource() -> None:
    orders = parse_pattern("topic:orders")
    assert check_rights(("append", "read", "append"), orders) == (Right.READ, Right.APPEND)
    with pytest.raises(InvalidArgument, match="no right publish on a topic; rights on a topic: read, append"):
        check_rights(("read", "publish"), orders)
    with pytest.raises(InvalidArgument, match="no right 'write'; rights: read, append"):
        check_rights(("write",), orders)
    with pytest.raises(InvalidArgument, match="at least one right on topic:orders: read"):
        check_rights((), orders)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("topic:orders", "orders", True),
        ("topic:orders", "orders.eu", False),
        ("topic:orders*", "orders", True),
        ("topic:orders*", "orders.eu", True),
        ("topic:orders*", "order", False),
        ("topic:*", "orders", True),
        ("topic:*", "_audit", False),
        ("topic:_*", "_audit", True),
        ("topic:_audit", "_audit", True),
        ("topic:_*", "orders", False),
        ("cursor:orders", "orders", False),
    ],
)
def test_internal_names_are_matched_only_by_what_names_them(pattern: str, name: str, expected: bool) -> None:
    assert parse_pattern(pattern).matches(Resource(TOPIC, name)) is expected
    kind = pattern.partition(":")[0]
    right = "read" if kind == "topic" else "cursor"
    assert may(view(f"alice {right} {pattern}"), f"alice read topic:{name}") is expected


# Rules.


@pytest.mark.parametrize(
    ("rule", "question", "expected"),
    [
        ("alice read topic:orders", "alice read topic:orders", True),
        ("alice read topic:orders", "bob read topic:orders", False),
        ("alice read topic:orders", "alice append topic:orders", False),
        ("alice read topic:orders", "alice describe topic:orders", True),
        ("alice trim topic:orders", "alice describe topic:orders", True),
        ("alice trim topic:orders", "alice read topic:orders", False),
        ("alice produce-as producer:app*", "alice produce-as producer:app-1", True),
        ("alice describe cluster", "alice describe topic:orders", False),
        ("alice cluster-operate cluster", "alice describe topic:_audit", True),
        ("alice cluster-operate cluster", "alice describe cluster", True),
        ("alice cluster-operate cluster", "alice read topic:orders", False),
        ("alice cluster-operate cluster", "alice cluster-admin cluster", False),
        ("alice audit-read cluster", "alice read topic:_audit", True),
        ("alice audit-read cluster", "alice describe topic:_audit", True),
        ("alice audit-read cluster", "alice trim topic:_audit", False),
        ("alice audit-read cluster", "alice read topic:_programs", False),
        ("alice cluster-admin cluster", "alice read topic:_audit", True),
        ("alice cluster-admin cluster", "alice trim topic:orders", True),
        ("alice cluster-admin cluster", "alice act-as principal:bob", True),
        ("alice cluster-admin cluster", "alice cluster-operate cluster", True),
        ("alice cluster-admin cluster", "alice trim topic:_audit", False),
        ("alice cluster-admin cluster", "alice alter topic:_audit", False),
        ("alice cluster-admin cluster", "alice delete topic:_audit", False),
        ("alice cluster-admin cluster", "alice append topic:_audit", False),
        ("alice trim topic:_audit", "alice trim topic:_audit", True),
        ("alice cluster-admin cluster", "alice append topic:_programs", True),
        ("alice cluster-admin cluster", "alice trim topic:_programs", False),
        ("alice job-submit job:fraud", "alice append topic:_programs", True),
        ("alice job-submit job:fraud*", "alice describe topic:_programs", True),
        ("alice job-submit job:fraud", "alice read topic:_programs", False),
        ("alice job-submit job:fraud", "alice publish run:program:ab", True),
        ("alice job-submit job:fraud", "alice publish run:fraud", False),
        ("alice job-operate job:fraud", "alice append topic:_programs", False),
        ("alice run-jobs cluster", "alice read topic:_programs", True),
        ("alice run-jobs cluster", "alice append topic:_programs", False),
        ("alice run-jobs cluster", "alice append topic:_job_logs", True),
        ("alice run-jobs cluster", "alice read topic:_job_logs", False),
        ("alice run-jobs cluster", "alice describe topic:_job_logs", True),
        ("alice run-jobs cluster", "alice read topic:orders", False),
        ("bob read topic:orders", "alice describe principal:alice", True),
        ("bob read topic:orders", "alice describe principal:bob", False),
        ("bob read topic:orders", "alice act-as principal:alice", True),
        ("bob read topic:orders", "alice act-as principal:bob", False),
    ],
)
def test_which_right_follows_from_which(rule: str, question: str, expected: bool) -> None:
    assert may(view(rule), question) is expected


def test_a_verdict_names_the_rule_that_decides_the_most_direct_one_first() -> None:
    seen = view(
        "alice cluster-admin cluster", "alice read topic:*", "alice read topic:orders*", "alice read topic:orders"
    )
    orders = parse_resource("topic:orders")
    verdict = seen.decide("alice", Right.READ, orders)
    assert str(verdict.rule) == "alice read topic:orders"
    assert "alice read topic:orders" in verdict.why
    assert str(seen.decide("alice", Right.READ, parse_resource("topic:orders.eu")).rule) == "alice read topic:orders*"
    assert str(seen.decide("alice", Right.READ, parse_resource("topic:other")).rule) == "alice read topic:*"
    assert str(seen.decide("alice", Right.TRIM, orders).rule) == "alice cluster-admin cluster"
    assert seen.decide("alice", Right.READ, orders) is verdict, "answers are remembered"
    assert seen.decide("bob", Right.READ, orders) == AccessVerdict(
        *("bob", Right.READ, orders, False, None, "no rule gives bob the right read on topic:orders", "", Missing.RULE)
    )


def test_members_of_a_group_have_its_rights() -> None:
    seen = view("group:writers append topic:orders", groups={"writers": "alice bob", "others": "carol"})
    assert may(seen, "alice append topic:orders")
    assert may(seen, "bob append topic:orders")
    assert not may(seen, "carol append topic:orders")
    assert not may(seen, "writers append topic:orders"), "a principal with the name of a group is not the group"


def test_rights_of_a_later_version_are_ignored() -> None:
    rules = (
        Rule("alice", ("fly", "read"), parse_pattern("topic:orders")),
        Rule("alice", ("x",), ResourcePattern("new")),
    )
    seen = AccessView(AccessRules(rules=rules))
    assert may(seen, "alice read topic:orders")
    assert not may(seen, "alice append topic:orders")


def test_a_client_without_credentials_has_no_rights() -> None:
    verdict = view("alice read topic:*").decide(NOBODY, Right.DESCRIBE, CLUSTER)
    assert (verdict.is_allowed, verdict.missing) == (False, Missing.CREDENTIALS)


def test_only_what_may_be_described_is_visible() -> None:
    seen = view("alice read topic:a*", "alice append topic:_jobs", "alice cursor cursor:b")
    names = ["a", "ab", "b", "_a", "_jobs"]
    assert seen.visible("alice", TOPIC, names) == {"a", "ab", "_jobs"}
    assert seen.visible("alice", ResourceKind.CURSOR, names) == {"b"}
    assert seen.visible("bob", TOPIC, names) == set()


def test_all_refusals_are_told_in_order() -> None:
    seen = view("alice append topic:a")
    asked = [(Right.APPEND, Resource(TOPIC, name)) for name in "bac"]
    assert [str(verdict.resource) for verdict in seen.refusals("alice", asked)] == ["topic:b", "topic:c"]


def test_remembered_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.core.access.access_view.ANSWERS_MAX", 10)
    seen = view("alice read topic:a*")
    assert [may(seen, f"alice read topic:a{i}") for i in range(35)] == [True] * 35
    assert len(seen._answers) <= 10


# Tokens.


def test_a_token_has_an_id_and_a_secret_and_only_its_hash_is_kept() -> None:
    assert TOKEN.split("_") == ["cwt", b"12345678".hex(), (b"s" * 32).hex()]
    assert token_id(TOKEN) == b"12345678".hex()
    secret = TOKEN.rpartition("_")[2]
    assert secret not in repr(RECORD)
    check_token(RECORD.id, RECORD.sha256)
    with pytest.raises(ValueError, match="32 random bytes"):
        make_token(b"12345678", b"short")


@pytest.mark.parametrize(
    "text", ["", "cwt", "cwt__", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "x" + TOKEN, TOKEN.replace("_", "-")]
)
def test_what_is_no_token_has_no_id_and_is_not_known(text: str) -> None:
    assert token_id(text) is None
    assert view(tokens=(RECORD,)).check_token(text, 0).token is None


def test_a_token_is_found_by_its_whole_text_until_it_expires() -> None:
    expiring = TokenRecord(RECORD.id, RECORD.sha256, "alice", expires=CutTime(100))
    seen = view(tokens=(expiring,))
    assert seen.check_token(TOKEN, 99).token == expiring
    expired = seen.check_token(TOKEN, 100)
    assert expired.token is None
    assert "has expired" in expired.problem
    assert (seen.is_current(RECORD.id, 99), seen.is_current(RECORD.id, 100)) == (True, False)
    wrong = seen.check_token(make_token(b"12345678", b"t" * 32), 0)
    unknown = seen.check_token(make_token(b"87654321", b"s" * 32), 0)
    assert wrong == unknown, "an answer does not tell whether the id exists"
    assert wrong.token is None
    assert not seen.is_current("0" * 16, 0)


def test_scopes_limit_a_token_and_add_nothing() -> None:
    scopes = (Scope(("append",), parse_pattern("topic:orders")), Scope(("trim",), parse_pattern("topic:*")))
    limited = TokenRecord(RECORD.id, RECORD.sha256, "alice", scopes)
    seen = view("alice read,append topic:*", tokens=(limited,))
    assert may(seen, "alice append topic:orders", limited.id)
    assert may(seen, "alice describe topic:orders", limited.id)
    assert not may(seen, "alice read topic:orders", limited.id)
    assert not may(seen, "alice append topic:other", limited.id)
    assert not may(seen, "alice trim topic:orders", limited.id), "a scope is no rule"
    assert not may(seen, "alice describe principal:alice", limited.id)
    assert may(seen, "alice read topic:other"), "not the principal is limited, but this token"


def test_a_revoked_token_has_no_rights() -> None:
    verdict = view("alice read topic:*").decide("alice", Right.READ, Resource(TOPIC, "a"), RECORD.id)
    assert (verdict.is_allowed, verdict.missing) == (False, Missing.TOKEN)


@pytest.mark.parametrize(("identifier", "sha256"), [("short", "0" * 64), ("G" * 16, "0" * 64), ("0" * 16, "0" * 63)])
def test_a_wrong_token_is_refused_in_words(identifier: str, sha256: str) -> None:
    with pytest.raises(InvalidArgument, match="hexadecimal digits"):
        check_token(identifier, sha256)


def test_a_token_that_is_sent_by_mistake_is_not_repeated_in_the_error() -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_token(RECORD.id, TOKEN)
    assert TOKEN not in str(raised.value)
    with pytest.raises(InvalidArgument) as raised:
        check_token(TOKEN, RECORD.sha256)
    assert TOKEN.rpartition("_")[2][:32] not in str(raised.value)


# Names and certificates.


@pytest.mark.parametrize("name", ["alice", "svc/orders", "ann@example.org", "0", "a+b=c-d_e.f", "x" * 255])
def test_names_of_principals(name: str) -> None:
    check_principal(name)
    check_subject(f"group:{name}" if len(name) < 200 else name)


@pytest.mark.parametrize("name", ["", "_local", ".a", "a b", "a:b", "a*", "ä", "a\n", "x" * 256, "group:", "group:_x"])
def test_other_names_are_refused_in_words(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"name of a (principal|group)"):
        check_subject(name)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("abc", "abc", ()),
        ("abc", "abcd", None),
        ("*", "abc", ("abc",)),
        ("*", "", ("",)),
        ("a*c", "abc", ("b",)),
        ("a*c", "ac", ("",)),
        ("a*a", "a", None),
        ("*.*.example", "a.b.c.example", ("a", "b.c")),
        ("DNS:*.svc", "DNS:orders.svc", ("orders",)),
        ("DNS:*.svc", "DNS:orders.svc.evil", None),
        ("*ab*ab", "xabab", ("x", "")),
        ("*ab*ab", "xab", None),
    ],
)
def test_a_pattern_matches_the_whole_name(pattern: str, text: str, expected: tuple[str, ...] | None) -> None:
    assert captured(pattern, text) == expected


RULES = (
    CertificateRule("san", "DNS:*.svc.example", "svc/{1}"),
    CertificateRule("cn", "admin", "root"),
    CertificateRule("cn", "*", "{1}"),
)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (CertificateNames("x", ("DNS:orders.svc.example",)), "svc/orders"),
        (CertificateNames("admin", ("DNS:other",)), "root"),
        (CertificateNames("alice"), "alice"),
        (CertificateNames("Alice Smith"), None),
        (CertificateNames("_local"), None),
        (CertificateNames(""), None),
        (CertificateNames("alice", ("DNS:a b.svc.example",)), None),
        (CertificateNames("{1}"), None),
    ],
)
def test_the_first_rule_that_matches_a_certificate_decides(names: CertificateNames, expected: str | None) -> None:
    assert principal_of_certificate(names, RULES) == expected
    assert AccessView(AccessRules(certificate_rules=RULES)).principal_of(names) == expected


def test_no_certificate_stands_for_anyone_without_a_rule() -> None:
    assert principal_of_certificate(CertificateNames("alice", ("DNS:a",)), ()) is None


def test_which_principals_a_rule_can_name() -> None:
    assert can_map_to(RULES[0], "svc/orders")
    assert not can_map_to(RULES[0], "orders")
    assert can_map_to(RULES[1], "root")
    assert not can_map_to(RULES[1], "admin")
    assert can_map_to(RULES[2], "anyone")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (CertificateRule("ou", "*", "{1}"), "use 'san'"),
        (CertificateRule("cn", "", "a"), "1 to 255 characters"),
        (CertificateRule("cn", "*" * 9, "a"), "at most 8"),
        (CertificateRule("cn", "*", "{2}"), "stand for the texts"),
        (CertificateRule("cn", "*", "{x}"), "stand for the texts"),
        (CertificateRule("cn", "*", "{1"), "stand for the texts"),
        (CertificateRule("cn", "admin", "{1}"), "has no '\\*'"),
        (CertificateRule("cn", "admin", "_local"), "begins with a letter"),
        (CertificateRule("cn", "admin", "group:a"), "begins with a letter"),
    ],
)
def test_a_wrong_rule_for_certificates_is_refused_in_words(rule: CertificateRule, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_certificate_rule(rule)


# Quotas and denials.


def test_all_quotas_of_a_principal_and_its_groups_apply() -> None:
    quotas = tuple(
        Quota(subject, QuotaLimits(connections=n)) for n, subject in enumerate(("group:a", "alice", "bob"), 1)
    )
    groups = (PrincipalGroup("a", ("alice",)),)
    seen = AccessView(AccessRules(groups=groups, quotas=quotas))
    assert seen.quotas_of("alice") == (quotas[1], quotas[0])
    assert seen.quotas_of("bob") == (quotas[2],)
    assert seen.quotas_of("carol") == ()


@pytest.mark.parametrize("limits", [QuotaLimits(), QuotaLimits(connections=0), QuotaLimits(staged_bytes=LIMIT_MAX + 1)])
def test_wrong_limits_are_refused_in_words(limits: QuotaLimits) -> None:
    with pytest.raises(InvalidArgument, match=r"at least one limit|is 1 to"):
        check_limits(limits)


def test_a_denial_names_principal_right_resource_and_the_command_that_helps() -> None:
    seen = view(
        "alice read topic:a",
        tokens=(TokenRecord(RECORD.id, RECORD.sha256, "alice", (Scope(("read",), parse_pattern("topic:b")),)),),
    )
    error = denied(seen.decide("alice", Right.READ, parse_resource("topic:orders")))
    assert isinstance(error, PermissionDenied)
    assert (error.principal, error.right, error.resource) == ("alice", "read", "topic:orders")
    assert (error.code, error.retriable) == ("permission_denied", False)
    assert error.message == (
        "alice lacks the right read on topic:orders: no rule gives it; an administrator can, with "
        "`cutwater acl allow alice read topic:orders`"
    )
    cursor = denied(seen.decide("alice", Right.CURSOR, parse_resource("cursor:my cursor")))
    assert "`cutwater acl allow alice cursor 'cursor:my cursor'`" in cursor.message
    programs = denied(seen.decide("alice", Right.DESCRIBE, parse_resource("topic:_programs"))).message
    assert "`cutwater acl allow alice job-submit job:NAME`" in programs, "a rule on the topic would not be enough"
    nobody = denied(seen.decide(NOBODY, Right.READ, parse_resource("topic:a"))).message
    assert nobody == (
        "a client without credentials lacks the right read on topic:a: give a token or a client certificate"
    )
    admin = denied(seen.decide("alice", Right.CLUSTER_ADMIN, parse_resource("cluster"))).message
    assert admin == "alice lacks the right cluster-admin on cluster: ask an administrator to do it"
    scope = denied(seen.decide("alice", Right.READ, parse_resource("topic:a"), RECORD.id)).message
    assert "wider scopes" in scope
    gone = denied(seen.decide("alice", Right.READ, parse_resource("topic:a"), "0" * 16)).message
    assert "revoked" in gone
    assert "`cutwater token create alice`" in gone


@pytest.mark.parametrize(
    ("text", "expected"), [("a", "a"), ("", "''"), ("a b", "'a b'"), ("a'b", "'a'\"'\"'b'"), ("$x", "'$x'")]
)
def test_names_are_quoted_for_the_shell(text: str, expected: str) -> None:
    assert quoted(text) == expected


def test_answers_about_names_that_strangers_make_up_are_not_remembered() -> None:
    view = AccessView(AccessRules())
    for principal, name in (("", "a"), ("ann", "x" * 256)):
        assert not view.decide(principal, Right.READ, Resource("topic", name)).is_allowed
    assert not view._answers
    view.decide("ann", Right.READ, Resource("topic", "x" * 255))
    assert len(view._answers) == 1


def test_a_name_that_looks_like_any_name_is_one_name() -> None:
    """Cursors, producers and runs may be named '*'. A right on another name is none on this one."""
    seen = view("ann cursor cursor:a", "ann produce-as producer:a*", "ann publish run:a", "ann append topic:a")
    for question in ("ann cursor cursor:*", "ann produce-as producer:*", "ann publish run:*", "ann describe run:*"):
        _, right, resource = question.split()
        kind, _, name = resource.partition(":")
        assert not seen.decide("ann", Right(right), Resource(kind, name)).is_allowed
    # Topics cannot have this name: it stands for some topic.
    assert seen.decide("ann", Right.APPEND, Resource(TOPIC, "*")).is_allowed
    assert not seen.decide("ann", Right.READ, Resource(TOPIC, "*")).is_allowed
