"""Attacks on a real service of a secured cluster: each is refused, and shows in the audit or in a counter.

The table of routes says what there is to attack, so a new route is attacked without a change here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from cutwater.service.openapi import path_parameters
from cutwater.service.routes import BodyKind, RestRoute, RouteAccess
from cutwater.service.table import ROUTES
from tests.integration.service.rest_kit import check_problem
from tests.integration.service.rest_processes import PROGRAM, SHA256, ZIP, RestProcesses, rest_processes

pytestmark = [pytest.mark.timeout(150), pytest.mark.xdist_group("rest-attacks")]
NAMES = {"job": "fraud", "topic": "payments", "agent": "a1", "sha256": SHA256, "version": "1", "cursor": "billing"}
NAMES |= dict.fromkeys(("savepoint", "operation"), "0" * 32) | dict.fromkeys(("node", "stream", "run", "glsn"), "1")
CALLERS = [route for route in ROUTES if route.access is RouteAccess.CALLER]
CHANGES = [route for route in ROUTES if route.changes]
SPEC = {"program": SHA256, "entry": "fraud.py:p"}
BODIES: dict[str, dict[str, Any]] = {
    "submit": {"name": "fraud", "spec": SPEC},
    "upgrade": {"spec": SPEC},
    "validate": {"spec": SPEC},
    "post_requirements": {"text": f"a==1 --hash=sha256:{'a' * 64}"},
}
TRAVERSALS = (
    *("..", "../../etc/passwd", "..\\..\\etc"),
    *("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/", "\x00", "a\x00b", "\r\nSet-Cookie: a=b", "*"),
    *("{{7*7}}", "${HOME}", "$(id)", "`id`", "'; --", "ä" * 200, "\u202e", "~root", ".ssh/id_rsa"),
)


class Attacked:
    """The service, and what it is asked by callers with and without rights."""

    def __init__(self, place: RestProcesses) -> None:
        self.place = place
        self.root = place.http()
        self.stranger = httpx.Client(base_url=place.url, timeout=30)
        place.cutwater("token", "create", "eve", "--save", place.directory.parent / "eve.token")
        eve = (place.directory.parent / "eve.token").read_text().strip()
        self.eve = httpx.Client(base_url=place.url, timeout=30, headers={"Authorization": f"Bearer {eve}"})

    def close(self) -> None:
        for one in (self.root, self.stranger, self.eve):
            one.close()

    @property
    def port(self) -> int:
        return int(self.place.url.rpartition(":")[2])

    def counted(self, name: str, **labels: str) -> float:
        """Return the value of a counter of the service."""
        text = httpx.get(f"http://{self.place.metrics}/metrics").text
        told = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        series = f"cutwater_service_{name}_total" + (f"{{{told}}}" if told else "")
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found is not None else 0.0

    def state(self) -> Any:
        """Return what attacks might have changed."""
        found = [self.root.get(path).json() for path in ("/v1/jobs/fraud", "/v1/agents/a1", "/v1/jobs")]
        return {
            "job": [found[0][name] for name in ("phase", "versions", "epoch", "operation", "savepoints")],
            "agent": [found[1][name] for name in ("is_alive", "is_draining", "jobs")],
            "jobs": [row["name"] for row in found[2]["items"]],
        }


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    flags = ("--metrics", "127.0.0.1:0")
    with rest_processes(tmp_path_factory.mktemp("attacked"), is_secure=True, flags=flags) as place:
        place.cutwater("topic", "create", "payments", "--schema", "user string, amount bigint")
        found = Attacked(place)
        assert found.root.put(f"/v1/programs/{SHA256}", content=PROGRAM, headers=ZIP).status_code == 200
        answer = found.root.post("/v1/jobs", json=BODIES["submit"])
        found.root.get(f"{answer.headers['location']}/follow?seconds=20")
        yield found
        found.close()


def asked(client: httpx.Client, route: RestRoute, **more: Any) -> httpx.Response:
    """Send what the route takes."""
    path = route.path.format_map(NAMES)
    headers = more.pop("headers", {})
    if route.body_kind is BodyKind.JSON:
        more.setdefault("json", BODIES[route.name])
    elif route.body_kind is BodyKind.ZIP:
        more.setdefault("content", PROGRAM)
        headers = {**ZIP, **headers}
    params = more.pop("params", {})
    if route.name == "rescale":
        params = {"parallelism": "2", **params}
    if route.name == "diff_savepoints":
        params = {"other": "1" * 32, **params}
    if route.is_stream:
        params = {"seconds": "1", **params}
    return client.request(route.method, path, headers=headers, params=params, **more)


def test_a_wrong_host_gets_nothing_anywhere(attacked: Attacked) -> None:
    before = attacked.counted("refused", code="wrong_host")
    count = 0
    for route in ROUTES:
        for method in {route.method, "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"}:
            path = route.path.format_map(NAMES)
            answer = attacked.root.request(method, path, headers={"Host": "evil.example"})
            assert answer.status_code == 421, (method, path)
            count += 1
    assert attacked.counted("refused", code="wrong_host") - before == count


def test_no_page_of_another_origin_changes_anything(attacked: Attacked) -> None:
    before, state = attacked.counted("refused", code="cross_origin"), attacked.state()
    attacks = (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": attacked.place.url, "Sec-Fetch-Site": "cross-site"},
        {"Origin": attacked.place.url.replace("http:", "https:")},
    )
    for route in CHANGES:
        for headers in attacks:
            check_problem(asked(attacked.root, route, headers=headers), 403, "cross_origin")
    assert attacked.counted("refused", code="cross_origin") - before == len(CHANGES) * len(attacks)
    # What a form of another site can send without being asked for leave.
    for route in CHANGES:
        if route.body_kind is not BodyKind.NONE:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
                answer = asked(attacked.root, route, headers={"Content-Type": kind})
                check_problem(answer, 415, "unsupported_media_type")
    # No leave is given.
    for route in ROUTES:
        answer = attacked.stranger.options(
            route.path.format_map(NAMES),
            headers={"Access-Control-Request-Method": route.method, "Sec-Fetch-Site": "same-origin"},
        )
        assert answer.status_code == 405
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert attacked.state() == state


def test_without_a_token_nothing_is_told_and_nothing_read(attacked: Attacked) -> None:
    state = attacked.state()
    for route in CALLERS:
        check_problem(asked(attacked.stranger, route), 401, "unauthenticated")
    # The body of a stranger is not even read.
    answer = attacked.stranger.put(f"/v1/programs/{SHA256}", content=b"PK" + bytes(50_000_000), headers=ZIP)
    check_problem(answer, 401, "unauthenticated")
    assert attacked.state() == state


def test_a_caller_without_rights_is_denied_and_the_audit_names_it_and_the_service(attacked: Attacked) -> None:
    state = attacked.state()
    harmless = {"document", "live", "ready", "who_am_i", "begin_session", "end_session"}
    for route in CALLERS:
        if route.name in harmless:
            continue
        answer = asked(attacked.eve, route)
        if answer.status_code == 200:
            # Lists leave out what the caller may not see.
            told = answer.json()
            assert not told.get("items", ()), (route.name, told)
            assert not told.get("streams", 0), (route.name, told)
            continue
        assert answer.status_code in (403, 404), (route.name, answer.text)
        assert "fraud.py" not in answer.text
    assert attacked.state() == state
    wanted = {"submit-job", "upgrade-job", "rescale-job", "roll-back-job", "operate-job", "ask-agent", "drain-agent"}
    wanted |= {"remove-agent", "describe-job"}
    found: set[str] = set()
    end = time.monotonic() + 20
    while not wanted <= found and time.monotonic() < end:
        time.sleep(0.3)
        told = attacked.root.get("/v1/audit", params={"principal": "eve", "outcome": "denied", "limit": 1_000}).json()
        assert {one["via"] for one in told["items"]} <= {"rest-service"}
        found = {one["operation"] for one in told["items"]}
    assert wanted <= found


def test_no_name_in_an_address_leads_to_a_file_or_to_another_address(attacked: Attacked) -> None:
    """Also not to what is above it: a client may send dots that others would have resolved."""
    state = attacked.state()
    connection = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=30)
    for route in CALLERS:
        for name in path_parameters(route.path):
            for text in (*TRAVERSALS, "%2e%2e", "..%2f..%2f..%2fetc%2fpasswd", "%252e%252e%252f", "..;", ".%00."):
                encoded = quote(text, safe="%.;")
                path = route.path.format_map({**NAMES, name: encoded})
                headers = {**attacked.place.headers, "Content-Type": route.body_kind.value}
                body = json.dumps(BODIES.get(route.name, {})).encode() if route.body_kind is not BodyKind.NONE else b""
                connection.request(route.method, path, body, headers)
                answer = connection.getresponse()
                told = answer.read()
                assert answer.status in (400, 404, 405, 414), (route.name, path, answer.status, told)
                check_told(told, answer.headers)
    connection.close()
    assert attacked.state() == state


def test_no_argument_leads_to_a_file_or_to_another_address(attacked: Attacked) -> None:
    state = attacked.state()
    for route in CALLERS:
        if route.query is None or route.name == "begin_session":
            continue
        # What a stream accepts takes a second.
        texts = TRAVERSALS[:1] if route.is_stream else TRAVERSALS[::2]
        for name in route.query.__struct_fields__:
            for text in texts:
                answer = asked(attacked.root, route, params={name: text})
                # Nothing but a list that begins elsewhere, or a filter that selects nothing.
                wanted = (400,) if route.changes else (200, 400, 404, 409)
                assert answer.status_code in wanted, (route.name, name, text, answer.text)
                check_told(answer.content, answer.headers)
    for text in TRAVERSALS:
        for name, body in (
            ("submit", {"name": text, "spec": SPEC}),
            ("submit", {"name": "other", "spec": {**SPEC, "program": text}}),
            ("submit", {"name": "other", "spec": {**SPEC, "requirements": text}}),
            ("submit", {"name": "other", "spec": SPEC, "savepoint": text, "from_job": "fraud"}),
            ("validate", {"spec": {**SPEC, "program": text}}),
            ("post_requirements", {"text": text}),
        ):
            route = next(one for one in ROUTES if one.name == name)
            check_problem(asked(attacked.root, route, json=body), 400, "invalid_argument")
    assert attacked.state() == state


def check_told(body: bytes, headers: Any) -> None:
    assert b"root:x" not in body
    assert "set-cookie" not in headers


def test_what_is_too_large_or_no_json_is_refused(attacked: Attacked) -> None:
    state = attacked.state()
    deep = "[" * 100_000
    for route in CHANGES:
        headers = {"Content-Type": "application/json"}
        if route.body_kind is BodyKind.JSON:
            for content, status in (
                (b" " * (route.body_bytes_max + 1), 413),
                (deep.encode(), 400),
                (b"", 400),
                (b"null", 400),
                (b"{", 400),
                (b'{"\xff": 1}', 400),
                (b'{"name": 1e999}', 400),
                (json.dumps({**BODIES[route.name], "more": 1}).encode(), 400),
            ):
                answer = asked(attacked.root, route, json=None, content=content, headers=headers)
                assert answer.status_code == status, (route.name, content[:20], answer.text)
        elif route.body_kind is BodyKind.NONE and route.name not in ("begin_session", "end_session"):
            answer = asked(attacked.root, route, content=b"{}", headers=headers)
            check_problem(answer, 413, "too_large")
    assert attacked.state() == state


def test_a_thousand_connections_and_slow_senders_keep_nobody_out(attacked: Attacked) -> None:
    """All at once: silent connections beyond the limit, and heads and bodies that never end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4_096)), hard))

    async def run() -> None:
        slow = [asyncio.create_task(slow_body(attacked)) for _ in range(20)]
        heads = [asyncio.create_task(slow_head(attacked)) for _ in range(20)]
        await asyncio.sleep(0.2)
        opened = []
        for _ in range(12):
            opened += await asyncio.gather(
                *(asyncio.open_connection("127.0.0.1", attacked.port) for _ in range(100)), return_exceptions=True
            )
        writers = [one[1] for one in opened if isinstance(one, tuple)]
        assert len(writers) >= 1_100
        took = []
        async with httpx.AsyncClient(base_url=attacked.place.url, headers=attacked.place.headers, timeout=20) as client:
            for _ in range(50):
                begun = time.monotonic()
                assert (await client.get("/v1/jobs")).status_code == 200
                took.append(time.monotonic() - begun)
        assert sorted(took)[25] < 2.0, took
        assert set(await asyncio.gather(*slow)) == {408}
        assert set(await asyncio.gather(*heads)) == {0}
        async with asyncio.timeout(30):
            # None of those that say nothing stays.
            while attacked.counted("slow_requests") < 500:
                await asyncio.sleep(0.5)
        for writer in writers:
            writer.transport.abort()

    before = attacked.counted("connections_replaced")
    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert attacked.counted("connections_replaced") - before >= 100
    assert attacked.counted("refused", code="slow_request") >= 20
    assert attacked.root.get("/readyz").status_code == 200


async def slow_body(attacked: Attacked) -> int:
    """Send the head and a part of a body; return the status of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", attacked.port)
    head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n"
    token = "".join(f"{name}: {value}\r\n" for name, value in attacked.place.headers.items())
    writer.write(f"{head}{token}\r\n{{".encode())
    answer = await asyncio.wait_for(reader.readline(), 40)
    writer.transport.abort()
    return int(answer.split()[1])


async def slow_head(attacked: Attacked) -> int:
    """Send a byte of a head now and then; return how much came before the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", attacked.port)
    reading = asyncio.create_task(reader.read())
    for byte in b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 100:
        writer.write(bytes([byte]))
        if (await asyncio.wait({reading}, timeout=0.5))[0]:
            break
    writer.transport.abort()
    try:
        return len(await reading)
    except ConnectionError:
        return 0
