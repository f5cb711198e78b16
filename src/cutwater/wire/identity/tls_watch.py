"""Watches the certificates of a server while it runs: uses new files, and logs when a certificate expires soon."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cutwater.runtime import system
from cutwater.wire.identity.certificate_files import ExpiryReports
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.tls import ServerCertificates, Tls

_log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""New files are in use at most this long after they were written."""


@asynccontextmanager
async def watching(tls: Tls | None, name: ServerName) -> AsyncIterator[None]:
    """Watch the files of a server's certificates. SIGHUP makes it look at once.

    Raises if the certificate is for another server than this one.
    """
    if tls is None:
        yield
        return
    tls.certificates.claim(name)
    loop, hurry = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hurry.set)
    task = loop.create_task(_watch(tls.certificates, hurry))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(certificates: ServerCertificates, hurry: asyncio.Event) -> None:
    reports = ExpiryReports()
    while True:
        try:
            await asyncio.to_thread(certificates.look)
        except Exception:
            # A fault in new files must not end the watch for better ones.
            _log.exception("the files for TLS cannot be looked at")
        for told in reports.due(certificates.expiries, system.wall_time_ns() / 1e9):
            _log.warning("%s", told)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await hurry.wait()
        hurry.clear()
