"""The REST service over HTTP: what it tells, for whom, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.requests import DropCursorRequest
from cutwater.service.options import HttpLimits
from tests.integration.access_cluster import until
from tests.integration.service.rest_kit import GATEWAY, ServedCluster, check_problem, events_of, served

pytestmark = pytest.mark.timeout(60)


def with_service(directory: Path, test: Callable[[ServedCluster], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with served(directory, **options) as found:
            await test(found)

    asyncio.run(run())


AT = datetime(2026, 1, 1, 12, tzinfo=UTC)


async def filled(found: ServedCluster, token: str = "") -> None:
    async with found.cluster.client(token) as log:
        await log.create_topic("orders", streams=2)
        for number in range(6):
            await log.append("orders", [b"value %d" % number, b"\xff\x00"], key=b"k", headers={"from": b"web"})
        await log.create_topic("payments", schema="user string, amount bigint, at timestamp", event_time="at")
        rows = [{"user": "ann", "amount": number, "at": AT + timedelta(hours=number)} for number in range(20)]
        await log.append("payments", rows)
        await log.cursor("billing/eu").commit(3)


def test_what_there_is_can_be_read(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found)
        told = {
            path: (await found.get(path)).json()
            for path in ("/livez", "/readyz", "/v1/cluster", "/v1/nodes", "/v1/metrics", "/v1/cluster/metadata-nodes")
        }
        assert (told["/livez"], told["/readyz"]) == ({"status": "live"}, {"status": "ready"})
        assert told["/v1/cluster"]["is_healthy"] is True
        assert (told["/v1/cluster"]["streams"], told["/v1/metrics"]["topics"]) == (3, 2)
        assert [node["node"] for node in told["/v1/nodes"]["items"]] == [1]
        assert [node["leads"] for node in told["/v1/cluster/metadata-nodes"]["nodes"]] == [True]

        first = (await found.get("/v1/streams?limit=2")).json()
        second = (await found.get(f"/v1/streams?limit=2&after={first['next']}")).json()
        assert [[one["stream"] for one in page["items"]] for page in (first, second)] == [[1, 2], [3]]
        assert (first["next"], second["next"]) == ("2", None)
        assert (await found.get("/v1/streams/3")).json() == second["items"][0]
        assert [one["stream"] for one in (await found.get("/v1/streams?topic=orders")).json()["items"]] == [1, 2]
        topics = (await found.get("/v1/topics?limit=1")).json()
        assert ([one["name"] for one in topics["items"]], topics["next"]) == (["orders"], "orders")
        payments = (await found.get("/v1/topics/payments")).json()
        assert payments["columns"].startswith("user string, amount int64")
        assert (await found.get("/v1/cursors/billing%2Feu")).json() == {"name": "billing/eu", "glsn": 3}
        events = (await found.get("/v1/events?limit=3")).json()
        later = (await found.get(f"/v1/events?after={events['next']}")).json()
        assert later["items"][0]["index"] > events["items"][-1]["index"]
        assert (await found.get("/v1/whoami")).json()["mode"] == "off"
        document = (await found.get("/v1/openapi.json")).json()
        assert document["paths"]["/v1/topics"]["get"]["operationId"] == "topics"
        for path, code in (
            ("/v1/nodes/9", "not_found"),
            ("/v1/streams/9", "not_found"),
            ("/v1/topics/none", "not_found"),
            ("/v1/runs/1", "not_found"),
            ("/v1/cursors/none", "not_found"),
            ("/v1/audit", "not_found"),
            ("/v1/topics/none/records", "not_found"),
            ("/v1/topics/none/tail", "not_found"),
            ("/v1/topics/orders/records/9999", "no_record_here"),
            ("/v1/topics/", "not_found"),
            ("/v1//topics", "not_found"),
            ("/V1/topics", "not_found"),
            ("/", "not_found"),
        ):
            check_problem(await found.get(path), 404, code)

    with_service(tmp_path, test)


def test_records_come_by_position_by_time_by_filter_and_page_by_page(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found)
        whole = (await found.get("/v1/topics/orders/records?limit=1000")).json()["items"]
        # Ticks, which mark time in an idle log, may have taken positions, too.
        glsns = [one["glsn"] for one in whole]
        assert (len(glsns), glsns) == (12, sorted(glsns))
        first, second = whole[:2]
        assert (first["key"], first["value"], first["headers"]) == ("k", "value 0", {"from": "web"})
        assert ("value" in second, second["value_base64"]) == (False, "/wA=")
        paged: list[int] = []
        after: str | None = "0"
        while after is not None:
            page = (await found.get(f"/v1/topics/orders/records?limit=5&after={after}")).json()
            assert len(page["items"]) <= 5
            paged += [one["glsn"] for one in page["items"]]
            after = page["next"]
        assert paged == glsns
        one = (await found.get(f"/v1/topics/orders/records/{glsns[1]}")).json()
        assert one == second
        some = (await found.get(f"/v1/topics/orders/records?start={glsns[2]}&stop={glsns[5]}")).json()
        assert ([one["glsn"] for one in some["items"]], some["next"]) == (glsns[2:5], None)
        beyond = (await found.get(f"/v1/topics/orders/records?start={glsns[10]}&stop=100000")).json()
        assert [one["glsn"] for one in beyond["items"]] == glsns[10:]
        assert (await found.get("/v1/topics/orders/records?start=100000")).json()["items"] == []

        picked = await found.get("/v1/topics/payments/records", params={"where": "amount >= 17 and user = 'ann'"})
        assert [one["row"]["amount"] for one in picked.json()["items"]] == [17, 18, 19]
        assert picked.json()["items"][0]["row"]["at"] == "2026-01-02T05:00:00Z"
        by_value = await found.get("/v1/topics/orders/records", params={"where": "starts_with(value, 'value 3')"})
        assert [one["value"] for one in by_value.json()["items"]] == ["value 3"]
        where = "amount in (3, 19)"
        begin = (await found.get("/v1/topics/payments/records", params={"where": where, "limit": 1})).json()
        rest = await found.get("/v1/topics/payments/records", params={"where": where, "after": begin["next"]})
        assert [one["row"]["amount"] for one in begin["items"] + rest.json()["items"]] == [3, 19]
        committed = first["ingested_at"]
        since = (await found.get("/v1/topics/orders/records", params={"since": committed, "limit": 1})).json()
        assert since["items"][0] == first
        until_then = (await found.get("/v1/topics/orders/records", params={"until": committed})).json()
        assert until_then["items"] == []
        for params in (
            {"where": "amunt = 1"},
            {"since": "yesterday"},
            {"since": committed, "start": "1"},
            {"until": committed, "stop": "1"},
        ):
            check_problem(await found.get("/v1/topics/payments/records", params=params), 400, "invalid_argument")

    with_service(tmp_path, test)


def test_the_tail_of_a_topic_comes_as_events_and_can_be_taken_up_again(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found)
        got: list[dict[str, str]] = []

        async def follow() -> None:
            async with found.http.stream("GET", "/v1/topics/orders/tail?limit=3") as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                got.extend(events_of("".join([part async for part in answer.aiter_text()])))

        task = asyncio.create_task(follow())
        await until(lambda: found.service.streams.taken == 1, "the stream has begun")
        async with found.cluster.client("") as log:
            for number in range(3):
                await log.append("orders", b"new %d" % number)
        await asyncio.wait_for(task, 20)
        assert [json.loads(event["data"])["value"] for event in got] == ["new 0", "new 1", "new 2"]
        again = await found.get("/v1/topics/orders/tail?limit=2", headers={"Last-Event-ID": got[0]["id"]})
        assert [event["id"] for event in events_of(again.text)] == [event["id"] for event in got[1:]]
        check_problem(
            await found.get("/v1/topics/orders/tail", headers={"Last-Event-ID": "x"}), 400, "invalid_argument"
        )
        short = await found.get("/v1/topics/orders/tail?seconds=1")
        assert (short.status_code, events_of(short.text)) == (200, [])
        assert found.service.streams.taken == 0

    with_service(tmp_path, test)


def test_a_caller_has_its_own_rights_and_the_audit_names_both(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found, found.cluster.root)
        reader = await found.cluster.principal("ann", ("read", "topic:orders"))
        owner = await found.cluster.principal("bob", ("cursor", "cursor:*"))
        check_problem(await found.get("/v1/topics"), 401, "unauthenticated")
        for wrong in ("cwt_x", "x" * 100, reader[:-1] + ("0" if reader[-1] != "0" else "1")):
            problem = check_problem(await found.get("/v1/topics", wrong), 401, "unauthenticated")
            assert wrong not in json.dumps(problem)
        assert (await found.get("/v1/whoami", reader)).json()["principal"] == "ann"
        assert [one["name"] for one in (await found.get("/v1/topics", reader)).json()["items"]] == ["orders"]
        assert (await found.get("/v1/nodes", reader)).json()["items"] == []
        assert len((await found.get("/v1/topics/orders/records", reader)).json()["items"]) == 12
        check_problem(await found.get("/v1/topics/payments/records", reader), 404, "not_found")
        denied = check_problem(await found.get("/v1/cursors/billing%2Feu", reader), 403, "permission_denied")
        assert "ann lacks the right describe on cursor:billing/eu" in denied["detail"]
        assert (await found.get("/v1/cursors/billing%2Feu", owner)).json()["glsn"] == 3
        # The rights of the service are none, whoever asks.
        assert (await found.get("/v1/topics", (tmp_path / "service.token").read_text())).json()["items"] == []

        async with found.service.gateway.lease(owner) as pooled:
            await pooled.repository.ask(DropCursorRequest("billing/eu"), object, timeout_ms=5_000)

        async def audited() -> list[dict[str, Any]]:
            return (await found.get("/v1/audit?limit=1000", found.cluster.root)).json()["items"]

        async def both() -> bool:
            return {(one["operation"], one.get("via")) for one in await audited()} >= {
                ("read-cursor", GATEWAY),
                ("drop-cursor", GATEWAY),
            }

        await eventually(both)
        records = {one["operation"]: one for one in await audited() if one.get("via")}
        assert (records["read-cursor"]["principal"], records["read-cursor"]["outcome"]) == ("ann", "denied")
        assert (records["drop-cursor"]["principal"], records["drop-cursor"]["outcome"]) == ("bob", "done")
        # What is asked without the service names no gateway.
        assert all("via" not in one for one in await audited() if one.get("principal") == "root")
        picked = (await found.get("/v1/audit?principal=ann&outcome=denied", found.cluster.root)).json()["items"]
        assert {one["principal"] for one in picked} == {"ann"}
        check_problem(await found.get("/v1/audit?operation=none", found.cluster.root), 400, "invalid_argument")
        check_problem(await found.get("/v1/audit", reader), 404, "not_found")

    with_service(tmp_path, test, secure=AccessMode.ENFORCED)


async def eventually(test: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await test():
            await asyncio.sleep(0.1)


def test_a_caller_whose_token_is_revoked_is_out_at_once(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        from cutwater.core.access.access_requests import RevokeTokenRequest

        await filled(found, found.cluster.root)
        reader = await found.cluster.principal("ann", ("read", "topic:orders"))
        assert (await found.get("/v1/topics/orders", reader)).status_code == 200
        await found.cluster.admin(RevokeTokenRequest(reader.split("_")[1]))
        check_problem(await found.get("/v1/topics/orders", reader), 401, "unauthenticated")
        # The service's own token: without it, it may ask for nobody.
        assert (await found.get("/v1/topics", found.cluster.root)).status_code == 200
        own = (tmp_path / "service.token").read_text()
        await found.cluster.admin(RevokeTokenRequest(own.split("_")[1]))

        async def is_out() -> bool:
            return (await found.get("/v1/topics", found.cluster.root)).status_code in (401, 503)

        await eventually(is_out)
        assert (await found.get("/livez")).status_code == 200

    with_service(tmp_path, test, secure=AccessMode.ENFORCED)


def test_with_access_control_a_service_without_a_token_serves_nobody(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        assert (await found.get("/readyz")).status_code == 200
        await found.cluster.secure()

        async def is_closed() -> bool:
            return (await found.get("/readyz")).status_code == 503

        await eventually(is_closed)
        problem = check_problem(await found.get("/v1/topics", found.cluster.root), 503, "unavailable")
        assert "--own-token-file" in problem["detail"]
        assert "token" not in (await found.get("/readyz")).text

    with_service(tmp_path, test)


def test_while_the_cluster_is_away_the_service_says_so(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        assert (await found.get("/v1/topics")).status_code == 200
        await found.cluster.stop_metadata()
        found.service.gateway._mode = None
        answer = await found.get("/v1/topics")
        assert answer.status_code in (503, 504)
        check_problem(answer, answer.status_code, answer.json()["code"])
        assert answer.json()["retriable"] is True
        check_problem(await found.get("/readyz"), 503, "unavailable")
        assert (await found.get("/livez")).status_code == 200

    with_service(tmp_path, test)


# What is refused.


def test_wrong_names_and_other_origins_are_refused_and_counted(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
        paths = ("/v1/topics", "/v1/topics/orders", "/livez", "/none")
        for method in methods:
            for path in paths:
                for host in ("evil.example", "evil.example:8300", "localhost.evil.example"):
                    answer = await found.ask(method, path, headers={"Host": host})
                    assert answer.status_code == 421, (method, path, host)
        assert found.service.counters.refused["wrong_host"] == len(methods) * len(paths) * 3
        for method in methods[2:]:
            for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
                check_problem(await found.ask(method, "/v1/topics", headers=headers), 403, "cross_origin")
        assert found.service.counters.refused["cross_origin"] == (len(methods) - 2) * 3
        for method in methods[1:]:
            answer = await found.ask(method, "/v1/topics")
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        good = await found.get("/v1/topics", headers={"Host": "localhost"})
        assert good.status_code == 200
        assert good.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in good.headers["content-security-policy"]
        assert good.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in good.headers
        assert "server" not in good.headers

    with_service(tmp_path, test)


NASTY = (
    *("..", "../..", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e%2f", "/etc/passwd", "%00", "a%00b", "..\\..\\x", "*"),
    *("%ff%fe", "a" * 256, "a" * 3_000, "%0d%0aSet-Cookie:%20a=b", "{{7*7}}", "file:%2f%2f%2fetc%2fpasswd"),
    *("-1", "1e9", "_audit"),
)


@pytest.mark.parametrize(
    "place",
    [
        *("/v1/topics/{}", "/v1/topics/{}/records", "/v1/topics/{}/tail", "/v1/topics/orders/records/{}"),
        *("/v1/cursors/{}", "/v1/nodes/{}", "/v1/streams/{}", "/v1/runs/{}"),
    ],
)
def test_no_name_in_an_address_leads_anywhere_else(tmp_path: Path, place: str) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found)
        for nasty in NASTY:
            status, head, body = await raw(found.port, f"GET {place.format(nasty)} HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status in (400, 404, 414), (place, nasty, body)
            assert b"root:" not in body
            assert b"set-cookie" not in head.lower()

    with_service(tmp_path, test)


async def raw(port: int, text: str, *, seconds: float = 20) -> tuple[int, bytes, bytes]:
    """Send bytes as they are; return status, head and body of the answer."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(text.encode("latin-1"))
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return int(head.split(b" ")[1]), head, await reader.readexactly(length)
        finally:
            writer.close()


def test_what_is_too_large_or_no_http_is_refused(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        ok = "Host: localhost\r\n"
        for text, status in (
            (f"GET /v1/topics HTTP/1.1\r\n{ok}X-A: {'a' * 20_000}\r\n\r\n", 431),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}{''.join(f'X-{n}: a{chr(13)}{chr(10)}' for n in range(70))}\r\n", 431),
            (f"GET /{'a' * 5_000} HTTP/1.1\r\n{ok}\r\n", 414),
            (f"GET /v1/topics?where={'a' * 9_000} HTTP/1.1\r\n{ok}\r\n", 414),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}Content-Length: 5\r\n\r\nhello", 413),
            ("GET /v1/topics HTTP/1.1\r\n\r\n", 400),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}Host: localhost\r\n\r\n", 400),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
            (f"GET http://evil.example/v1/topics HTTP/1.1\r\n{ok}\r\n", 404),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}Content-Length: x\r\n\r\n", 400),
            (f"GET /v1/topics HTTP/1.1\r\n{ok}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("hello\r\n\r\n", 400),
            ("\x16\x03\x01\x02\r\n\r\n", 400),
        ):
            found_status, _, body = await raw(found.port, text)
            assert found_status == status, (text[:60], body)
            assert json.loads(body)["status"] == status
        assert found.service.counters.refused["malformed_http"] >= 4

    with_service(tmp_path, test)


def test_a_request_that_comes_too_slowly_is_cut_off(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(b"GET /v1/topics HTTP/1.1\r\nHost: loc")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        silent, other = await asyncio.open_connection("127.0.0.1", found.port)
        assert await asyncio.wait_for(silent.read(), 10) == b""
        other.close()
        assert found.service.counters.slow_requests == 2
        # A connection that has served a request is closed when nothing more comes.
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()

    with_service(tmp_path, test, limits=HttpLimits(header_seconds_max=0.3, idle_seconds_max=1, stop_seconds=1))


def test_a_reader_that_does_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.service.app.SEND_SECONDS", 0.3)

    async def test(found: ServedCluster) -> None:
        async with found.cluster.client("") as log:
            await log.create_topic("orders")
            for _ in range(40):
                await log.append("orders", [b"a" * 250_000] * 4)
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port, limit=1_000)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /v1/topics/orders/tail?start=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: found.service.counters.slow_readers == 1, "it is given up")
        await until(lambda: found.service.streams.taken == 0, "its stream has ended")
        writer.transport.abort()

    with_service(tmp_path, test)


def test_connections_are_bounded_and_idle_ones_make_room(tmp_path: Path) -> None:
    async def test(found: ServedCluster) -> None:
        await filled(found)
        idle = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(40)]
        assert (await found.get("/v1/topics")).status_code == 200
        counters = found.service.counters
        assert counters.connections_replaced >= 31
        closed = [await asyncio.wait_for(reader.read(), 5) == b"" for reader, _ in idle[:30]]
        assert all(closed)
        for _, writer in idle:
            writer.close()
        streams = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            writer.write(b"GET /v1/topics/orders/tail HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            streams.append(writer)
        status, head, body = await raw(found.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (status, json.loads(body)["code"]) == (503, "too_many_connections")
        assert b"retry-after: 1" in head.lower()
        assert counters.connections_refused == 1
        for writer in streams:
            writer.close()
        await until(lambda: found.service.streams.taken == 0, "the streams have ended")
        status, _, _ = await raw(found.port, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 200

    with_service(tmp_path, test, limits=HttpLimits(connections_max=10, stop_seconds=1))


def test_a_stopping_service_answers_what_is_in_progress_and_ends_streams(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as found:
            await filled(found)
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            writer.write(b"GET /v1/topics/orders/tail HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b": stream"), 10)
            begun = asyncio.get_running_loop().time()
        rest = await asyncio.wait_for(reader.read(), 10)
        assert rest.endswith(b"0\r\n\r\n"), "the stream ended in order"
        writer.close()
        assert asyncio.get_running_loop().time() - begun < 10

    asyncio.run(run())
