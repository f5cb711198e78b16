"""What the REST service refuses by the headers of a request alone."""

from __future__ import annotations

import pytest

from cutwater.errors import InvalidArgument
from cutwater.service.http.http_problems import HttpRefusal
from cutwater.service.http.query import decode_query
from cutwater.service.http.request_guard import (
    HEADERS_MAX,
    allowed_hosts,
    check_address,
    check_origin,
    headers_of,
    host_name,
    media_type,
)
from cutwater.service.http.sessions import COOKIE, clear_cookie, session_token, set_cookie
from cutwater.service.resources.records import RecordsQuery


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8300", "localhost"),
        ("127.0.0.1:1", "127.0.0.1"),
        ("[::1]:8300", "::1"),
        ("[::1]", "::1"),
        ("db.example.", "db.example"),
        ("db.example:80x", ""),
        ("db.example:", ""),
        ("[::1", ""),
        ("[::1]x", ""),
        ("", ""),
        ("a@localhost", "a@localhost"),
        ("localhost:80:80", ""),
    ],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize("host", ["evil.example", "", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0"])
def test_a_service_of_this_machine_takes_no_other_name(host: str) -> None:
    """DNS rebinding: a page's own name may lead here."""
    allowed = allowed_hosts("127.0.0.1", ["Reports.Example"])
    for own in ("localhost:8300", "127.0.0.1:8300", "[::1]:8300", "reports.example"):
        allowed.check(own)
    with pytest.raises(HttpRefusal) as refused:
        allowed.check(host)
    assert (refused.value.status, refused.value.code) == (421, "wrong_host")


def test_a_service_for_all_addresses_must_be_told_its_names() -> None:
    with pytest.raises(InvalidArgument, match="--allow-host NAME"):
        allowed_hosts("0.0.0.0", [])
    with pytest.raises(InvalidArgument, match="without a port"):
        allowed_hosts("0.0.0.0", ["db.example:443"])
    assert allowed_hosts("0.0.0.0", ["db.example"]).names == {"db.example"}
    assert allowed_hosts("10.1.2.3", []).names == {"10.1.2.3"}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"])
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "", "origin": "null"},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "https://db.example"},
        {"origin": "http://db.example:81"},
        {"sec-fetch-site": "same-origin", "origin": "http://evil.example"},
    ],
)
def test_a_page_of_another_origin_changes_nothing(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(HttpRefusal) as refused:
        check_origin(method, {"host": "db.example", **headers}, "http")
    assert (refused.value.status, refused.value.code) == (403, "cross_origin")


def test_programs_and_own_pages_may_change_things() -> None:
    for headers in ({}, {"origin": "http://db.example"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        check_origin("DELETE", {"host": "db.example", **headers}, "http")
    check_origin("GET", {"host": "db.example", "origin": "http://evil.example"}, "http")


def test_headers_that_matter_come_once_and_there_are_not_too_many() -> None:
    assert headers_of([(b"Host", b"a"), (b"x", b"1"), (b"x", b"2")]) == {"host": "a", "x": "2"}
    for name in (b"host", b"origin", b"authorization", b"cookie", b"content-type", b"sec-fetch-site"):
        with pytest.raises(HttpRefusal, match="twice"):
            headers_of([(name, b"a"), (name.title(), b"b")])
    with pytest.raises(HttpRefusal) as refused:
        headers_of([(b"x%d" % number, b"") for number in range(HEADERS_MAX + 1)])
    assert refused.value.status == 431
    with pytest.raises(HttpRefusal) as refused:
        check_address(b"/" + b"a" * 5_000, b"")
    assert refused.value.status == 414


def test_the_type_of_a_body() -> None:
    assert media_type({"content-type": 'Application/JSON; charset="UTF-8"'}) == "application/json"
    assert media_type({}) == ""
    for wrong in ("application/json; charset=latin-1", "application/json; boundary=x"):
        with pytest.raises(HttpRefusal):
            media_type({"content-type": wrong})


@pytest.mark.parametrize(
    "query",
    [
        *(b"limit=0", b"limit=1001", b"limit=1e2", b"limit=", b"limit=+5", b"limit= 5", b"limit=05", b"limit=null"),
        *(b"limit=1&limit=2", b"other=1", b"%FF=1", b"where=%FF", b"=1", b"limit=" + b"9" * 30),
    ],
)
def test_a_wrong_argument_is_refused(query: bytes) -> None:
    with pytest.raises(HttpRefusal) as refused:
        decode_query(query, RecordsQuery)
    assert refused.value.status == 400


def test_arguments_are_read_into_their_types() -> None:
    found = decode_query(b"start=7&limit=5&where=a%20%3E+1&since=2026-01-01T00:00%2B01:00", RecordsQuery)
    assert found == RecordsQuery(start=7, limit=5, where="a > 1", since="2026-01-01T00:00+01:00")
    assert decode_query(b"", RecordsQuery) == RecordsQuery()
    assert decode_query(b"", None) is None
    with pytest.raises(HttpRefusal, match="takes no arguments"):
        decode_query(b"a=1", None)


def test_the_token_of_a_request() -> None:
    assert session_token({}) == ""
    assert session_token({"authorization": "bearer  abc "}) == "abc"
    assert session_token({"cookie": f"a=b; {COOKIE}=abc"}) == "abc"
    assert session_token({"authorization": "Bearer x", "cookie": f"{COOKIE}=abc"}) == "x"
    for wrong in ("Basic abc", "Bearer", "abc"):
        with pytest.raises(HttpRefusal):
            session_token({"authorization": wrong})
    with pytest.raises(HttpRefusal):
        session_token({"cookie": f"{COOKIE}=a; {COOKIE}=b"})


def test_the_cookie_of_a_session_is_for_this_host_and_for_no_script() -> None:
    for cookie in (set_cookie("cwt_x", 60), clear_cookie()):
        parts = cookie.split("; ")
        assert cookie.startswith("__Host-")
        assert {"Path=/", "Secure", "HttpOnly", "SameSite=Strict"} <= set(parts)
        assert not any(part.startswith("Domain") for part in parts)
