"""Sessions of browsers: a token is exchanged for a cookie that ends with it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import ListTokensRequest, RevokeTokenRequest
from cutwater.service.http.sessions import COOKIE
from tests.integration.service.rest_kit import ServedCluster, another_service, check_problem, served

pytestmark = pytest.mark.timeout(60)


def cookie_of(answer: httpx.Response) -> str:
    """Return the value of the cookie, after checking its attributes."""
    cookie = answer.headers["set-cookie"]
    pair, *attributes = cookie.split("; ")
    assert {"Path=/", "Secure", "HttpOnly", "SameSite=Strict"} <= set(attributes)
    assert not any(attribute.lower().startswith("domain") for attribute in attributes)
    name, _, value = pair.partition("=")
    assert name == COOKIE == "__Host-cutwater"
    return value


async def begun(found: ServedCluster, token: str, query: str = "") -> dict[str, str]:
    """Begin a session, and return the headers of its requests."""
    answer = await found.ask("POST", f"/v1/session{query}", token)
    assert answer.status_code == 201, answer.text
    value = cookie_of(answer)
    assert value not in answer.text
    assert value != token
    found.http.cookies.clear()
    return {"Cookie": f"a=b; {COOKIE}={value}"}


def test_a_session_has_the_rights_of_its_token_until_it_is_ended(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, secure=AccessMode.ENFORCED, allow_submit=True) as found:
            ann = await found.cluster.principal("ann", ("describe", "topic:*"))
            session = await begun(found, ann)
            told = (await found.get("/v1/whoami", headers=session)).json()
            assert (told["principal"], told["parent"]) == ("ann", ann.split("_")[1])
            assert told["expires"] > 0
            assert (await found.get("/v1/topics", headers=session)).status_code == 200
            check_problem(await found.ask("POST", "/v1/agents/a1/drain", headers=session), 403, "permission_denied")

            # No other site makes use of it, and it makes no further sessions.
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                for method, path in (("POST", "/v1/session"), ("DELETE", "/v1/session"), ("DELETE", "/v1/jobs/a")):
                    answer = await found.ask(method, path, headers={**session, **headers})
                    check_problem(answer, 403, "cross_origin")
            check_problem(await found.ask("POST", "/v1/session", headers=session), 409, "refused")
            # A token is no session, and logging out does not end it.
            check_problem(await found.ask("DELETE", "/v1/session", ann), 409, "refused")

            ended = await found.ask("DELETE", "/v1/session", headers=session)
            assert (ended.status_code, cookie_of(ended), ended.content) == (204, "", b"")
            answer = await found.get("/v1/whoami", headers=session)
            check_problem(answer, 401, "unauthenticated")
            assert cookie_of(answer) == ""
            assert (await found.get("/v1/whoami", ann)).status_code == 200
            assert "set-cookie" not in (await found.get("/v1/whoami")).headers

    asyncio.run(run())


def test_a_session_ends_with_its_token_in_every_service(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, secure=AccessMode.ENFORCED) as found, another_service(found, tmp_path) as other:
            ann, bob = [await found.cluster.principal(name) for name in ("ann", "bob")]
            of_ann, of_bob = await begun(found, ann), await begun(found, bob, "?seconds=60")
            for session in (of_ann, of_bob):
                for http in (found.http, other):
                    assert (await http.get("/v1/whoami", headers=session)).status_code == 200
            tokens = (await found.cluster.admin(ListTokensRequest("ann"))).tokens
            assert [one.parent for one in tokens if one.parent] == [ann.split("_")[1]]
            await found.cluster.admin(RevokeTokenRequest(ann.split("_")[1]))
            for http in (found.http, other):
                check_problem(await http.get("/v1/whoami", headers=of_ann), 401, "unauthenticated")
            assert (await found.get("/v1/whoami", headers=of_bob)).json()["principal"] == "bob"
            assert (await found.cluster.admin(ListTokensRequest("ann"))).tokens == ()
            for query in ("?seconds=59", "?seconds=90000", "?seconds=x"):
                check_problem(await found.ask("POST", f"/v1/session{query}", bob), 400, "invalid_argument")
            twice = {"Cookie": f"{of_bob['Cookie']}; {COOKIE}=x"}
            check_problem(await found.get("/v1/whoami", headers=twice), 400, "invalid_argument")
            for wrong in ("x", "cwt_0_0", of_bob["Cookie"].rpartition("=")[2][:-1]):
                answer = await found.get("/v1/whoami", headers={"Cookie": f"{COOKIE}={wrong}"})
                assert wrong not in json.dumps(check_problem(answer, 401, "unauthenticated"))

    asyncio.run(run())


def test_without_access_control_there_are_no_sessions(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as found:
            check_problem(await found.ask("POST", "/v1/session"), 409, "refused")
            check_problem(await found.ask("DELETE", "/v1/session"), 409, "refused")

    asyncio.run(run())
