"""Tokens of jobs: the agent makes the secret, writes it into a file for the job, and lets the cluster know its hash.

A token is for one assignment, and ends with it. It is valid for a short time only, so the agent makes another one in
time, and replaces the file at once as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from cutwater.agent.processes.job_users import SystemUser
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.access.principals import TOKEN_ID_BYTES, TOKEN_SECRET_BYTES, make_token, token_hash, token_id
from cutwater.core.jobs.job_requests import JobTokenGranted, JobTokenRequest
from cutwater.errors import CutwaterError
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles
from cutwater.types import SECOND, CutTime, JobEpoch, JobNumber

_log = logging.getLogger(__name__)

VALID_SECONDS = 3_600.0
RENEW_SHARE = 0.5
"""A token is replaced when this share of its time has passed."""
AGAIN_SECONDS = 15.0
ASK_MS = 10_000


class JobToken:
    """The token of one assignment, in ``file``; or of an errand about a job."""

    def __init__(
        self,
        repository: Repository,
        agent: str,
        session: int,
        job: tuple[JobNumber, JobEpoch],
        file: Path,
        user: SystemUser | None,
        *,
        errand: str = "",
    ) -> None:
        self._repository, self._user, self._file = repository, user, file
        self._for = (agent, session, *job)
        self._errand = errand
        self._valid_seconds = VALID_SECONDS

    async def make(self) -> str:
        """Make a token, and return the path of its file; empty if the cluster wants none."""
        text = make_token(system.token_bytes(TOKEN_ID_BYTES), system.token_bytes(TOKEN_SECRET_BYTES))
        identifier = token_id(text)
        assert identifier is not None
        now = system.wall_time_ns() // 1_000
        expires = CutTime(now + round(VALID_SECONDS * SECOND))
        request = JobTokenRequest(*self._for, identifier, token_hash(text), expires, self._errand)
        granted = await self._repository.ask(request, JobTokenGranted, timeout_ms=ASK_MS)
        if not granted.principal:
            return ""
        self._valid_seconds = max(1.0, (granted.expires - now) / SECOND)
        await asyncio.to_thread(self._write, f"{text}\n".encode("ascii"))
        return str(self._file)

    async def renew_for_ever(self) -> None:
        """Replace the token, again and again, in time."""
        wait = self._valid_seconds * RENEW_SHARE
        while True:
            await asyncio.sleep(wait)
            try:
                await self.make()
                wait = self._valid_seconds * RENEW_SHARE
            except CutwaterError as error:
                _log.warning("the token in %s cannot be renewed now: %s", self._file, error.message)
                wait = min(AGAIN_SECONDS, self._valid_seconds * RENEW_SHARE)

    def _write(self, data: bytes) -> None:
        files = system.made(MachineFiles)
        whole = self._file.with_name(f".{self._file.name}.{system.token_hex(4)}")
        files.create_secret(whole, data, is_lasting=True)
        if self._user is not None:
            # The directory is the agent's own, so this is still the file that was made.
            os.chown(whole, self._user.uid, self._user.gid, follow_symlinks=False)
        files.replace(whole, self._file)
