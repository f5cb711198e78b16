"""Jobs over HTTP: programs, operations, savepoints, logs and agents, with an agent that runs no programs."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.core.access.access_decisions import AccessMode
from cutwater.metadata.stores.memory_store import MemoryStore
from cutwater.programs.job_logs import JobLogAppender
from cutwater.programs.program_store import fetch_program
from cutwater.service.routes import RouteAccess
from cutwater.types import JobEpoch, JobNumber
from tests.integration.access_cluster import until
from tests.integration.agent_double import AgentDouble
from tests.integration.service.rest_kit import ServedCluster, check_problem, events_of, served
from tests.integration.service.rest_processes import PROGRAM, SHA256, ZIP, zipped

pytestmark = pytest.mark.timeout(90)


NEEDED = {"rescale": {"parallelism": "2"}, "diff_savepoints": {"other": "1" * 32}}


class JobsOverHttp:
    """The service, an agent at its cluster, and the token that requests show."""

    def __init__(self, found: ServedCluster, agent: AgentDouble, token: str = "") -> None:
        self.found, self.agent, self.token = found, agent, token

    async def __call__(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        answer = await self.found.ask(method, path, self.token, **more)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        return answer.json()

    async def stored(self) -> None:
        await self("PUT", f"/v1/programs/{SHA256}", content=PROGRAM, headers=ZIP)

    async def begun(self, method: str, path: str, **more: Any) -> Any:
        """Begin an operation, and return it when it is over."""
        answer = await self.found.ask(method, path, self.token, **more)
        assert answer.status_code == 202, answer.text
        place = answer.headers["location"]
        assert place == f"/v1/operations/{answer.json()['id']}"
        follow = await self.found.get(f"{place}/follow?seconds=30", self.token)
        told = [json.loads(event["data"]) for event in events_of(follow.text)]
        assert told[-1]["is_over"], told
        return told[-1]

    async def submitted(self, name: str, **spec: Any) -> Any:
        body = {"name": name, "spec": {"program": SHA256, "entry": "fraud.py:p", **spec}}
        return await self.begun("POST", "/v1/jobs", json=body)


@asynccontextmanager
async def jobs_over_http(
    directory: Path, *, secure: AccessMode | None = None, **options: Any
) -> AsyncIterator[JobsOverHttp]:
    async with served(directory, secure=secure, allow_submit=True, **options) as found:
        access = ANYONE
        if secure is not None:
            access = Access(token=await found.cluster.principal("agent-a1", ("run-jobs", "cluster")))
        agent = AgentDouble(found.cluster.servers, access=access)
        # It blocks until it has registered, and the cluster is in this thread.
        await asyncio.to_thread(agent.__enter__)
        try:
            yield JobsOverHttp(found, agent, found.cluster.root)
        finally:
            await asyncio.to_thread(agent.__exit__, None, None, None)


def with_jobs(directory: Path, test: Callable[[JobsOverHttp], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with jobs_over_http(directory, **options) as jobs:
            await test(jobs)

    asyncio.run(run())


def test_a_program_is_uploaded_submitted_upgraded_and_rolled_back(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        assert await jobs("GET", f"/v1/programs/{SHA256}") == {"sha256": SHA256, "is_stored": False}
        for was_stored in (False, True):
            told = await jobs("PUT", f"/v1/programs/{SHA256}", content=PROGRAM, headers=ZIP)
            assert told == {"sha256": SHA256, "bytes": len(PROGRAM), "was_stored": was_stored}
        assert await jobs("GET", f"/v1/programs/{SHA256}") == {"sha256": SHA256, "is_stored": True}
        async with jobs.found.cluster.client("") as log:
            assert await fetch_program(log, SHA256) == PROGRAM

        done = await jobs.submitted("fraud", arguments={"as": "good", "region": "eu"}, parallelism=2)
        assert (done["kind"], done["state"], done["version"], done["steps_done"]) == ("submit", "done", 1, 1)
        told = await jobs("GET", "/v1/jobs/fraud")
        assert (told["phase"], told["agent"], told["spec"]["parallelism"]) == ("running", "a1", 2)
        assert (await jobs("GET", "/v1/metrics"))["jobs"] == {"running": 1}
        (row,) = (await jobs("GET", "/v1/jobs"))["items"]
        assert (row["name"], row["phase"], row["version"]) == ("fraud", "running", 1)

        change = {"arguments": {"region": None, "limit": "7"}, "parallelism": 4}
        done = await jobs.begun("POST", "/v1/jobs/fraud/upgrade", json={"change": change})
        assert (done["state"], done["version"], done["version_before"]) == ("done", 2, 1)
        second = await jobs("GET", "/v1/jobs/fraud/versions/2")
        assert second["spec"]["arguments"] == {"as": "good", "limit": "7"}
        assert second["spec"]["parallelism"] == 4
        done = await jobs.begun("POST", "/v1/jobs/fraud/rollback")
        assert (done["state"], done["version"]) == ("done", 1)
        first = await jobs("GET", "/v1/jobs/fraud/versions?limit=1")
        assert ([one["number"] for one in first["items"]], first["next"]) == ([1], "1")
        rest = await jobs("GET", f"/v1/jobs/fraud/versions?after={first['next']}")
        assert ([one["number"] for one in rest["items"]], rest["next"]) == ([2], None)
        kinds = [one["kind"] for one in (await jobs("GET", "/v1/jobs/fraud/operations"))["items"]]
        assert kinds == ["rollback", "upgrade", "submit"]

        whole = {"program": SHA256, "entry": "fraud.py:p", "arguments": {"as": "good"}}
        done = await jobs.begun("POST", "/v1/jobs/fraud/upgrade", json={"spec": whole})
        assert (await jobs("GET", "/v1/jobs/fraud/versions/3"))["spec"]["parallelism"] == 1
        assert (await jobs.begun("POST", "/v1/jobs/fraud/rescale?parallelism=3"))["version"] == 4
        for verb, phase in (("restart", "running"), ("stop", "stopped"), ("start", "running"), ("cancel", "cancelled")):
            assert (await jobs.begun("POST", f"/v1/jobs/fraud/{verb}"))["state"] == "done"
            assert (await jobs("GET", "/v1/jobs/fraud"))["phase"] == phase
        assert (await jobs.begun("DELETE", "/v1/jobs/fraud"))["state"] == "done"
        check_problem(await jobs.found.get("/v1/jobs/fraud"), 404, "not_found")

    with_jobs(tmp_path, test)


def test_savepoints_are_listed_and_agents_look_into_them(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        await jobs.submitted("fraud")
        for _ in range(3):
            assert (await jobs.begun("POST", "/v1/jobs/fraud/savepoints"))["state"] == "done"
        first = await jobs("GET", "/v1/jobs/fraud/savepoints?limit=2")
        rest = await jobs("GET", f"/v1/jobs/fraud/savepoints?after={first['next']}")
        known = [one["id"] for one in first["items"] + rest["items"]]
        assert (len(set(known)), rest["next"]) == (3, None)
        place = f"/v1/jobs/fraud/savepoints/{known[0]}"
        told = await jobs("GET", place)
        assert (told["savepoint"]["id"], told["manifest"]["kind"]) == (known[0], "savepoint-describe")
        assert (await jobs("POST", f"{place}/verify"))["intact"] is True
        assert (await jobs("GET", f"{place}/diff?other={known[1]}"))["kind"] == "savepoint-diff"
        state = await jobs("GET", "/v1/jobs/fraud/state", params={"uid": "count", "key": '["ann"]', "limit": 5})
        assert state["operators"] == {"count": [{"key": {"user": "ann"}, "state.n": 3}]}
        for key in ("ann", "[]", '["a', "{}", "[1]"):
            check_problem(await jobs.found.get("/v1/jobs/fraud/state", params={"key": key}), 400, "invalid_argument")
        assert await jobs("DELETE", place) == {"deleted": known[0], "files_kept": False}
        assert await jobs("DELETE", f"/v1/jobs/fraud/savepoints/{known[1]}?keep_files=true") == {
            "deleted": known[1],
            "files_kept": True,
        }
        assert [one["id"] for one in (await jobs("GET", "/v1/jobs/fraud/savepoints"))["items"]] == known[2:]
        asked = [action for name, action in jobs.agent.seen if action.startswith(("savepoint-", "state"))]
        assert asked == ["savepoint-describe", "savepoint-verify", "savepoint-diff", "state", "savepoint-delete"]
        check_problem(await jobs.found.get(place), 404, "not_found")
        check_problem(await jobs.found.ask("DELETE", place), 404, "not_found")

    with_jobs(tmp_path, test)


def test_a_question_to_an_agent_that_takes_long_is_answered_when_it_is_asked_again(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        body = {"spec": {"program": SHA256, "entry": "fraud.py:p"}}
        jobs.agent.pause_seconds = 3
        answer = await jobs.found.ask("POST", "/v1/jobs/fraud/validate?wait=1", json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (202, "1"), answer.text
        assert answer.json()["status"] == "working"
        told = await jobs("POST", "/v1/jobs/fraud/validate", json=body)
        assert (told["pipeline"], told["sources"]) == ("fraud", [{"topic": "in", "uid": "i", "schema": "id string"}])
        assert [action for _, action in jobs.agent.seen] == ["validate"], "it was asked once"
        jobs.agent.pause_seconds = 0
        body["spec"]["arguments"] = {"as": "fails"}  # type: ignore[assignment]
        answer = await jobs.found.ask("POST", "/v1/jobs/fraud/validate", json=body)
        assert "line 3: invalid syntax" in check_problem(answer, 400, "invalid_argument")["detail"]
        assert (await jobs("GET", "/v1/jobs"))["items"] == []

    with_jobs(tmp_path, test)


def test_the_same_request_under_the_same_key_is_the_same_operation(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        body = {"name": "fraud", "spec": {"program": SHA256, "entry": "fraud.py:p"}}
        key = {"Idempotency-Key": "release-7"}
        first = await jobs("POST", "/v1/jobs", 202, json=body, headers=key)
        assert (await jobs("POST", "/v1/jobs", 202, json=body, headers=key))["id"] == first["id"]
        again = await jobs.found.ask("POST", "/v1/jobs", json=body)
        check_problem(again, 409, "already_exists")
        other = await jobs.found.ask("POST", "/v1/jobs", json={**body, "name": "other"}, headers=key)
        assert "another request" in check_problem(other, 400, "invalid_argument")["detail"]
        assert len((await jobs("GET", "/v1/jobs"))["items"]) == 1
        for wrong in ("", "a b", "a" * 256, "\xff"):
            headers = {b"Idempotency-Key": wrong.encode("latin-1")}
            answer = await jobs.found.http.post("/v1/jobs", json=body, headers=headers)
            check_problem(answer, 400, "invalid_argument")

    with_jobs(tmp_path, test)


def test_what_failed_is_told_with_its_record(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        async with jobs.found.cluster.client("") as log:
            await log.create_topic("payments", schema="user string, amount bigint")
            while (await log.append("payments", [{"user": "ann", "amount": 1}])).glsn < 7:
                pass
        assert (await jobs.submitted("fraud", arguments={"as": "fails"}))["state"] in ("done", "failed")
        async with asyncio.timeout(20):
            while (told := await jobs("GET", "/v1/jobs/fraud"))["phase"] != "failed":
                await asyncio.sleep(0.1)
        assert (told["phase"], told["failure"]["code"], told["failure"]["glsn"]) == ("failed", "pipeline_failed", 7)
        (found,) = (await jobs("GET", "/v1/jobs/fraud/exceptions"))["items"]
        assert (found["failure"]["message"], found["epoch"], found["attempt"]) == ("boom in function 'f'", 1, 1)
        if found["record"] is None:
            # A tick, which marks time, may have taken that position.
            assert found["no_record"].startswith("no_record_here")
        else:
            assert (found["record"]["glsn"], found["record"]["row"]) == (7, {"user": "ann", "amount": 1})
        assert [one["name"] for one in (await jobs("GET", "/v1/jobs?phase=failed"))["items"]] == ["fraud"]
        assert (await jobs("GET", "/v1/jobs?phase=running"))["items"] == []

    with_jobs(tmp_path, test)


def test_what_a_job_printed_can_be_read_and_followed(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        await jobs.submitted("fraud", arguments={"as": "idle"})
        number = (await jobs("GET", "/v1/jobs/fraud"))["number"]
        async with jobs.found.cluster.client("") as log:
            appender = JobLogAppender(log)
            attempt = appender.log_of(JobNumber(number), JobEpoch(1), 1)
            attempt.write("begän\n".encode())
            await appender._append_all(10)
            told = await jobs("GET", "/v1/jobs/fraud/logs")
            assert (told["text"], told["epoch"], told["attempt"], told["is_running"]) == ("begän\n", 1, 1, True)

            async def follow(last: str = "") -> list[dict[str, str]]:
                headers = {"Last-Event-ID": last} if last else {}
                answer = await jobs.found.get("/v1/jobs/fraud/logs/follow?seconds=30", headers=headers)
                return events_of(answer.text)

            following = asyncio.create_task(follow())
            await asyncio.sleep(0.5)
            euro = "€".encode()
            attempt.write(b"boom " + euro[:1])
            await appender._append_all(10)
            await asyncio.sleep(1.5)
            attempt.write(euro[1:] + b"\n")
            attempt.end()
            await appender._append_all(10)
            await jobs.begun("POST", "/v1/jobs/fraud/cancel")
            events = await asyncio.wait_for(following, 30)
            assert "".join(json.loads(event["data"])["text"] for event in events) == "begän\nboom €\n"
            again = await follow(events[0]["id"])
            assert "".join(json.loads(event["data"])["text"] for event in again) == "boom €\n"
        check_problem(await jobs.found.get("/v1/jobs/none/logs"), 404, "not_found")
        check_problem(await jobs.found.get("/v1/jobs/none/logs/follow"), 404, "not_found")

    with_jobs(tmp_path, test)


def test_agents_are_shown_drained_and_forgotten(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        await jobs.submitted("fraud")
        (told,) = (await jobs("GET", "/v1/agents"))["items"]
        assert (told["name"], told["slots"], told["used_slots"], told["jobs"]) == ("a1", 50, 1, ["fraud"])
        assert told["is_alive"] is True
        assert (await jobs("POST", "/v1/agents/a1/drain"))["is_draining"] is True
        assert (await jobs("GET", "/v1/agents/a1"))["is_draining"] is True
        assert (await jobs("POST", "/v1/agents/a1/undrain"))["is_draining"] is False
        check_problem(await jobs.found.ask("DELETE", "/v1/agents/a1"), 409, "refused")
        check_problem(await jobs.found.get("/v1/agents/none"), 404, "not_found")

    with_jobs(tmp_path, test)


def test_a_job_is_followed_as_it_changes(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        await jobs.submitted("fraud")
        revision = (await jobs("GET", "/v1/jobs/fraud"))["revision"]

        async def follow() -> list[dict[str, str]]:
            answer = await jobs.found.get("/v1/jobs/fraud/follow?seconds=6", headers={"Last-Event-ID": str(revision)})
            return events_of(answer.text)

        following = asyncio.create_task(follow())
        await jobs.begun("POST", "/v1/jobs/fraud/stop")
        events = await asyncio.wait_for(following, 30)
        assert json.loads(events[-1]["data"])["phase"] == "stopped"
        ids = [int(event["id"]) for event in events]
        assert ids == sorted(set(ids))
        assert ids[0] > revision

    with_jobs(tmp_path, test)


def test_no_caller_takes_all_places_for_streams_and_uploads(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        found, root = jobs.found, jobs.token
        await jobs.stored()
        await jobs.submitted("fraud")
        bob = await found.cluster.principal("bob", ("job-submit,describe", "job:*"))
        head = f"Host: localhost\r\nAuthorization: Bearer {root}\r\n"
        writers = []
        for _ in range(64):
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            writer.write(f"GET /v1/jobs/fraud/follow HTTP/1.1\r\n{head}\r\n".encode())
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 20)
            writers.append(writer)
        check_problem(await found.get("/v1/jobs/fraud/follow?seconds=1", root), 429, "too_many_streams")
        assert (await found.get("/v1/jobs/fraud/follow?seconds=1", bob)).status_code == 200
        place = (
            f"PUT /v1/programs/{'0' * 64} HTTP/1.1\r\n{head}Content-Type: application/zip\r\nContent-Length: 9\r\n\r\n"
        )
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", found.port)
            writer.write(place.encode())
            writers.append(writer)
        await until(lambda: found.service.uploads.taken == 2, "both uploads have begun")
        answer = await found.ask("PUT", f"/v1/programs/{SHA256}", root, content=PROGRAM, headers=ZIP)
        check_problem(answer, 429, "too_many_uploads")
        answer = await found.ask("PUT", f"/v1/programs/{SHA256}", bob, content=PROGRAM, headers=ZIP)
        assert answer.json()["was_stored"] is True
        for writer in writers:
            writer.transport.abort()
        await until(lambda: found.service.streams.taken == found.service.uploads.taken == 0, "all have ended")

    with_jobs(tmp_path, test, secure=AccessMode.ENFORCED)


def test_while_another_leader_takes_over_requests_wait_or_say_when_to_try_again(tmp_path: Path) -> None:
    """And a request that is repeated under its key is carried out once."""

    async def test(jobs: JobsOverHttp) -> None:
        found = jobs.found
        await jobs.stored()
        statuses: Counter[int] = Counter()
        names = count()
        is_over = False

        async def submit() -> None:
            while not is_over:
                body = {"name": f"job-{next(names)}", "spec": {"program": SHA256, "entry": "fraud.py:p"}}
                while True:
                    key = {"Idempotency-Key": body["name"]}
                    answer = await found.ask("POST", "/v1/jobs", jobs.token, json=body, headers=key)
                    statuses[answer.status_code] += 1
                    if answer.status_code == 202:
                        break
                    check_problem(answer, answer.status_code, answer.json()["code"])
                    assert answer.json()["retriable"] is True, answer.text
                    await asyncio.sleep(0.1)
                # One page must list all of them.
                await asyncio.sleep(0.02)

        async def look() -> None:
            while not is_over:
                answer = await found.get("/v1/jobs", jobs.token)
                statuses[answer.status_code] += 1
                await asyncio.sleep(0.05)

        tasks = [asyncio.create_task(work()) for work in (submit, submit, look)]
        await asyncio.sleep(1)
        before = found.cluster.leader
        await before.stop(timeout_ms=100)
        found.cluster.metadata.remove(before)
        await until(lambda: sum(server.leads for server in found.cluster.metadata) == 1, "another one leads", 30)
        await asyncio.sleep(2)
        is_over = True
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert set(statuses) <= {200, 202, 503, 504}, statuses
        assert statuses[202] == next(names), statuses
        kinds: Counter[str] = Counter()
        for row in (await jobs("GET", "/v1/jobs?limit=1000"))["items"]:
            operations = (await jobs("GET", f"/v1/jobs/{row['name']}/operations"))["items"]
            kinds[",".join(one["kind"] for one in operations)] += 1
        assert kinds == {"submit": statuses[202]}

    with_jobs(tmp_path, test, metadata=3)


def test_while_the_cluster_is_down_every_request_soon_says_when_to_try_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, allow_submit=True) as found:
            assert (await found.get("/v1/jobs")).status_code == 200
            await found.cluster.stop_metadata()
            found.service.gateway._mode = None
            asked = []
            for route in found.service.routes:
                if route.access is RouteAccess.OPEN:
                    continue
                names = dict.fromkeys(("job", "topic", "agent", "cursor"), "fraud") | {"sha256": SHA256}
                names |= dict.fromkeys(("savepoint", "operation"), "0" * 32)
                names |= dict.fromkeys(("version", "node", "stream", "run", "glsn"), "1")
                asked.append(found.ask(route.method, route.path.format_map(names), params=NEEDED.get(route.name)))
            begun = asyncio.get_running_loop().time()
            for answer in await asyncio.gather(*asked):
                assert answer.status_code in (503, 504), (answer.request.url, answer.text)
                problem = check_problem(answer, answer.status_code, answer.json()["code"])
                assert problem["retriable"] is True
            assert asyncio.get_running_loop().time() - begun < 18
            await found.cluster.start_metadata(1, MemoryStore(found.cluster.data))
            async with asyncio.timeout(20):
                while (await found.get("/v1/jobs")).status_code != 200:
                    await asyncio.sleep(0.2)

    asyncio.run(run())


# What is refused.


def test_a_service_without_permission_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as found:
            for route in found.service.routes:
                if not route.needs_allow_submit:
                    continue
                path = route.path.format(job="fraud", savepoint="0" * 32, agent="a1", sha256=SHA256)
                answer = await found.ask(route.method, path, json={})
                assert "--allow-submit" in check_problem(answer, 403, "submit_is_off")["detail"]
            assert found.service.counters.refused["submit_is_off"] >= 15

    asyncio.run(run())


def test_uploads_that_are_no_programs_are_refused(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        place = f"/v1/programs/{SHA256}"

        async def endless() -> AsyncIterator[bytes]:
            yield b"PK"
            while True:
                yield b"a" * 1_000_000

        for content, headers, status, code in (
            (b"print(1)", ZIP, 400, "invalid_argument"),
            (b"", ZIP, 400, "invalid_argument"),
            (PROGRAM + b"x", ZIP, 400, "invalid_argument"),
            (PROGRAM, {"Content-Type": "application/json"}, 415, "unsupported_media_type"),
            (PROGRAM, {**ZIP, "Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
            (b"PK" + bytes(64 * 1024 * 1024), ZIP, 413, "too_large"),
        ):
            answer = await jobs.found.ask("PUT", place, content=content, headers=headers)
            check_problem(answer, status, code)
        # Whether a sender that goes on for ever sees the answer depends on when it looks. The connection ends anyway.
        try:
            check_problem(await jobs.found.ask("PUT", place, content=endless(), headers=ZIP), 413, "too_large")
        except httpx.TransportError:
            assert jobs.found.service.counters.refused["too_large"] == 2
        answer = await jobs.found.ask("PUT", "/v1/programs/..%2f..", content=PROGRAM, headers=ZIP)
        check_problem(answer, 400, "invalid_argument")
        assert await jobs("GET", place) == {"sha256": SHA256, "is_stored": False}
        large = b"PK" + bytes(range(256)) * 12_000
        sha256 = hashlib.sha256(large).hexdigest()
        told = await jobs("PUT", f"/v1/programs/{sha256}", content=large, headers=ZIP)
        assert told["bytes"] == len(large)
        async with jobs.found.cluster.client("") as log:
            assert await fetch_program(log, sha256) == large
        assert jobs.found.service.uploads.taken == 0
        pins = {"text": f"unidecode==1.4.0 --hash=sha256:{'a' * 64}"}
        assert (await jobs("POST", "/v1/requirements", json=pins))["packages"] == ["unidecode==1.4.0"]
        answer = await jobs.found.ask("POST", "/v1/requirements", json={"text": "--index-url http://evil"})
        check_problem(answer, 400, "invalid_argument")

    with_jobs(tmp_path, test)


def test_wrong_specifications_are_refused_before_anything_is_stored(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        await jobs.stored()
        good: dict[str, Any] = {"program": SHA256, "entry": "fraud.py:p"}
        for spec, told in (
            ({**good, "paralelism": 2}, "unknown field"),
            ({**good, "conf": {"spark.hadoop.fs.s3a.secret.key": "x"}}, "secret"),
            ({**good, "restart": "sometimes"}, "sometimes"),
            ({**good, "parallelism": 0}, "parallelism"),
            ({**good, "program": "../../etc/passwd"}, "program"),
            ({**good, "checkpoint_root": ""}, "checkpoint_root"),
            ({"program": SHA256}, "entry"),
        ):
            answer = await jobs.found.ask("POST", "/v1/jobs", json={"name": "fraud", "spec": spec})
            assert told in check_problem(answer, 400, "invalid_argument")["detail"], spec
        for name in ("../x", "", "a/b", "_x", "a" * 300):
            answer = await jobs.found.ask("POST", "/v1/jobs", json={"name": name, "spec": good})
            check_problem(answer, 400, "invalid_argument")
        await jobs.submitted("fraud")
        for body in ({}, {"spec": good, "change": {}}, {"change": {}}):
            answer = await jobs.found.ask("POST", "/v1/jobs/fraud/upgrade", json=body)
            check_problem(answer, 400, "invalid_argument")
        assert (await jobs("GET", "/v1/jobs/fraud"))["versions"] == [1]

    with_jobs(tmp_path, test)


def test_jobs_are_changed_with_the_rights_of_the_caller_only(tmp_path: Path) -> None:
    async def test(jobs: JobsOverHttp) -> None:
        found = jobs.found
        await jobs.stored()
        ann = await found.cluster.principal(
            "ann", ("job-submit,job-operate,describe", "job:fraud"), ("act-as", "principal:job:fraud")
        )
        eve = await found.cluster.principal("eve", ("describe", "job:fraud"))
        nobody = await found.cluster.principal("nobody")
        body = {"name": "fraud", "spec": {"program": SHA256, "entry": "fraud.py:p"}}
        for token in ("", nobody, eve):
            answer = await found.ask("POST", "/v1/jobs", token, json=body)
            check_problem(answer, *((403, "permission_denied") if token else (401, "unauthenticated")))
            answer = await found.ask("PUT", f"/v1/programs/{SHA256}", token, content=PROGRAM, headers=ZIP)
            assert answer.status_code == (403 if token else 401)
        own = JobsOverHttp(found, jobs.agent, ann)
        other = zipped(fraud="print(2)")
        await own("PUT", f"/v1/programs/{hashlib.sha256(other).hexdigest()}", content=other, headers=ZIP)
        assert (await own.begun("POST", "/v1/jobs", json=body))["state"] == "done"
        assert (await own("GET", "/v1/jobs/fraud"))["owner"] == "ann"
        assert (await found.get("/v1/jobs", nobody)).json()["items"] == []
        assert [one["name"] for one in (await found.get("/v1/jobs", eve)).json()["items"]] == ["fraud"]
        check_problem(await found.get("/v1/jobs/fraud", nobody), 403, "permission_denied")
        operation = (await found.get("/v1/jobs/fraud", eve)).json()["operations"][0]["id"]
        assert (await found.get(f"/v1/operations/{operation}", eve)).status_code == 200
        assert (await found.get(f"/v1/operations/{operation}", nobody)).status_code in (403, 404)
        for method, path in (("POST", "/stop"), ("POST", "/rollback"), ("POST", "/savepoints"), ("DELETE", "")):
            for token in (eve, nobody):
                answer = await found.ask(method, f"/v1/jobs/fraud{path}", token)
                check_problem(answer, 403, "permission_denied")
        check_problem(await found.ask("POST", "/v1/agents/a1/drain", ann), 403, "permission_denied")
        assert (await own("GET", "/v1/jobs/fraud"))["phase"] == "running"

    with_jobs(tmp_path, test, secure=AccessMode.ENFORCED)
