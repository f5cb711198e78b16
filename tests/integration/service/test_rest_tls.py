"""The HTTP side over TLS, and what a service needs before it can be reached from other machines."""

from __future__ import annotations

import asyncio
import ssl
import time
import warnings
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme

from cutwater.core.access.access_decisions import AccessMode
from cutwater.errors import InvalidArgument
from cutwater.service.http.sessions import COOKIE
from cutwater.service.options import ServiceStartOptions
from cutwater.service.start import serving_service
from tests.integration.service.rest_kit import ServedCluster, check_problem, events_of, served

pytestmark = pytest.mark.timeout(60)
NAME = "db.example"


def issue(authority: trustme.CA, directory: Path) -> tuple[Path, Path]:
    """Write a certificate and its key into these files, new ones or in the place of others."""
    issued = authority.issue_cert(NAME, "127.0.0.1")
    certificate, key = directory / "http.pem", directory / "http.key"
    for path, blob in ((certificate, issued.cert_chain_pems[0]), (key, issued.private_key_pem)):
        new = path.with_suffix(".new")
        new.write_bytes(blob.bytes())
        new.chmod(0o600)
        new.replace(path)
    return certificate, key


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def secured(found: ServedCluster, authority: trustme.CA) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=found.serving.url, verify=trusting(authority), timeout=20)


def test_sessions_and_streams_go_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, key = issue(authority, tmp_path)

    async def run() -> None:
        async with (
            served(
                tmp_path, secure=AccessMode.ENFORCED, certificate=certificate, key=key, allow_hosts=(NAME,)
            ) as found,
            secured(found, authority) as http,
        ):
            assert found.serving.url.startswith("https://")
            ann = await found.cluster.principal("ann", ("describe,read,create,append", "topic:*"))
            async with found.cluster.client(ann) as log:
                await log.create_topic("orders")
                await log.append("orders", [b"coffee"])
            # The client keeps the cookie as a browser does: it is Secure, and for this host only.
            begun = await http.post("/v1/session", headers={"Authorization": f"Bearer {ann}"})
            assert (begun.status_code, list(http.cookies)) == (201, [COOKIE])
            told = await http.get("/v1/whoami")
            assert (told.status_code, told.json()["principal"]) == (200, "ann")
            assert told.headers["strict-transport-security"].startswith("max-age=")
            tail = await http.get("/v1/topics/orders/tail?start=1&limit=1")
            assert len(events_of(tail.text)) == 1
            # The origin of its own pages has the scheme of TLS.
            for origin, status in ((f"https://{NAME}", 204), (f"http://{NAME}", 403), ("https://evil.example", 403)):
                headers = {"Host": NAME, "Origin": origin}
                if status == 403:
                    check_problem(await http.delete("/v1/session", headers=headers), 403, "cross_origin")
            ended = await http.delete("/v1/session", headers={"Host": NAME, "Origin": f"https://{NAME}"})
            assert (ended.status_code, list(http.cookies)) == (204, [])
            check_problem(await http.get("/v1/whoami"), 401, "unauthenticated")

    asyncio.run(run())


def test_plain_http_and_old_tls_get_no_answer_and_new_certificates_are_taken_at_once(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    certificate, key = issue(old, tmp_path)

    async def run() -> None:
        async with served(tmp_path, certificate=certificate, key=key) as found:
            async with secured(found, old) as http:
                assert (await http.get("/livez")).status_code == 200
            async with httpx.AsyncClient(base_url=found.serving.url.replace("https:", "http:")) as plain:
                with pytest.raises(httpx.TransportError):
                    await plain.get("/livez")
            ancient = trusting(old)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                ancient.minimum_version = ancient.maximum_version = ssl.TLSVersion.TLSv1_1
            async with httpx.AsyncClient(base_url=found.serving.url, verify=ancient) as http:
                with pytest.raises(httpx.ConnectError):
                    await http.get("/livez")
            issue(new, tmp_path)
            deadline = time.monotonic() + 20
            while True:
                try:
                    async with secured(found, new) as http:
                        assert (await http.get("/livez")).status_code == 200
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.2)
            async with secured(found, old) as http:
                with pytest.raises(httpx.ConnectError):
                    await http.get("/livez")

    asyncio.run(run())


def test_a_service_for_other_machines_needs_tls_names_and_access_control(tmp_path: Path) -> None:
    certificate, key = issue(trustme.CA(), tmp_path)
    addresses = ("127.0.0.1:1",)

    async def refused(options: ServiceStartOptions) -> str:
        with pytest.raises(InvalidArgument) as error:
            async with serving_service(options):
                pass
        return str(error.value)

    async def run() -> None:
        assert "tokens would travel there in the clear" in await refused(ServiceStartOptions("0.0.0.0:0", addresses))
        assert "belong together" in await refused(
            ServiceStartOptions("127.0.0.1:0", addresses, certificate=certificate)
        )
        everywhere = ServiceStartOptions("0.0.0.0:0", addresses, certificate=certificate, key=key)
        assert "--allow-host NAME" in await refused(everywhere)
        key.chmod(0o644)
        assert "http.key" in await refused(ServiceStartOptions("127.0.0.1:0", addresses, None, None, certificate, key))

        async with served(tmp_path) as found:
            assert (await found.get("/v1/topics")).status_code == 200
            # As if it listened on another address: without access control, everyone could do everything.
            gateway = found.service.gateway
            gateway._options = msgspec.structs.replace(gateway._options, needs_principal=True)
            check_problem(await found.get("/v1/topics"), 403, "access_control_is_off")
            await found.cluster.secure()
            assert (await found.get("/livez")).status_code == 200

    asyncio.run(run())
