"""A REST service over a cluster in this process, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.core.access.access_decisions import AccessMode
from cutwater.service.app import RestService
from cutwater.service.options import HttpLimits, ServiceServing, ServiceStartOptions
from cutwater.service.start import serving_service
from tests.integration.access_cluster import AccessCluster

GATEWAY = "rest-service"


class ServedCluster:
    """``http`` sends requests without credentials."""

    def __init__(
        self, cluster: AccessCluster, service: RestService, serving: ServiceServing, http: httpx.AsyncClient
    ) -> None:
        self.cluster, self.service, self.serving, self.http = cluster, service, serving, http

    @property
    def port(self) -> int:
        return int(self.serving.url.rpartition(":")[2])

    async def get(self, path: str, token: str = "", **more: Any) -> httpx.Response:
        return await self.ask("GET", path, token, **more)

    async def ask(self, method: str, path: str, token: str = "", **more: Any) -> httpx.Response:
        headers = {**({"Authorization": f"Bearer {token}"} if token else {}), **more.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **more)


@asynccontextmanager
async def served(
    directory: Path,
    *,
    secure: AccessMode | None = None,
    limits: HttpLimits | None = None,
    metadata: int = 1,
    **options: Any,
) -> AsyncIterator[ServedCluster]:
    """Yield a service over a cluster with one storage node and so many metadata nodes. With ``secure``, it has access
    control in that mode, and the service a token of its own."""
    cluster = AccessCluster(directory, metadata, 2.0)
    try:
        await cluster.start(1)
        own = None
        if secure is not None:
            await cluster.secure(secure)
            own = directory / "service.token"
            own.write_text(await cluster.principal(GATEWAY))
            own.chmod(0o600)
        addresses = parse_servers(cluster.servers)
        start = ServiceStartOptions(
            "127.0.0.1:0", addresses, token_file=own, limits=limits or HttpLimits(stop_seconds=2), **options
        )
        async with (
            serving_service(start) as (serving, service),
            httpx.AsyncClient(base_url=serving.url, timeout=20) as http,
        ):
            yield ServedCluster(cluster, service, serving, http)
    finally:
        await cluster.close()


@asynccontextmanager
async def another_service(found: ServedCluster, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of another service over the same cluster, which has access control."""
    start = ServiceStartOptions(
        "127.0.0.1:0", parse_servers(found.cluster.servers), token_file=directory / "service.token"
    )
    async with serving_service(start) as (serving, _), httpx.AsyncClient(base_url=serving.url, timeout=20) as http:
        yield http


def check_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    found: dict[str, Any] = response.json()
    assert (response.status_code, found["status"], found["code"]) == (status, status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert found["request_id"] == response.headers["x-request-id"]
    assert (status in (429, 503, 504)) == ("retry-after" in response.headers)
    return found


def events_of(text: str) -> list[dict[str, str]]:
    found = []
    for part in text.split("\n\n"):
        lines = [line.split(": ", 1) for line in part.splitlines() if line and not line.startswith(":")]
        if lines:
            found.append(dict(lines))
    return found
