"""The denials of one server on their way into the audit: merged each second, and kept on disk while the log is away.

The leader appends the records. While it cannot, they wait in memory and in one file for the owner, of a bounded size;
what has no room is counted. A record may be appended twice, if a server ends or a connection breaks between the append
and its answer; both have the same id. What was denied in the second before a crash may be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from cutwater.access.denial_counts import Denial
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, encode_audit
from cutwater.core.audit.audit_requests import DENIALS_MAX, RecordDenialsRequest
from cutwater.core.audit.denial_merge import DenialKey, DenialMerge, denied_operation, host_of
from cutwater.errors import CutwaterError
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles, write_secret

_log = logging.getLogger(__name__)

MERGE_SECONDS = 1.0
SPOOL_BYTES_MAX = 1024 * 1024
"""Size of the records that wait, in memory and in the file: about 4,000."""
NONCE_BYTES = 6

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
Record = Callable[[RecordDenialsRequest], Awaitable[object]]

_DECODER = msgspec.json.Decoder(AuditRecord)


class DenialLog:
    """See the module. ``server`` names this server in the records. ``spool`` is the file; without one, records wait in
    memory only. ``in_thread`` calls a function that reads or writes files."""

    def __init__(self, server: str, spool: Path | None, in_thread: InThread[None]) -> None:
        self._server, self._spool, self._in_thread = server, spool, in_thread
        self._merge = DenialMerge()
        self._waiting: deque[tuple[AuditRecord, int]] = deque()
        """Records and their sizes."""
        self._bytes = 0
        self._is_loaded = spool is None
        self._is_saved = True
        """Whether the file has what waits."""
        self._nonce = system.token_hex(NONCE_BYTES)
        self._second = 0

    @property
    def waiting(self) -> int:
        """Number of records that wait."""
        return len(self._waiting)

    def note(self, denial: Denial) -> None:
        verdict = denial.verdict
        outcome = AuditOutcome.DENIED if denial.is_enforced else AuditOutcome.WOULD_BE_DENIED
        key = DenialKey(
            verdict.principal, host_of(denial.address), denied_operation(denial.method), outcome, denial.via
        )
        self._merge.note(key, verdict.token, str(verdict.right), str(verdict.resource))

    async def deliver_for_ever(self, record: Record) -> None:
        while True:
            await asyncio.sleep(MERGE_SECONDS)
            try:
                await self.deliver(record)
            except Exception as error:
                # Also a bug here must not end the server, which does not need the audit.
                _log.error("the audit of denials failed, and is tried again", exc_info=error)

    async def deliver(self, record: Record) -> None:
        """Send what waits to the leader, or keep it."""
        if not self._is_loaded:
            await self._in_thread(self._load)
        self._collect()
        try:
            while self._waiting:
                some = [one for one, _ in list(self._waiting)[:DENIALS_MAX]]
                await record(RecordDenialsRequest(tuple(some)))
                for _ in some:
                    self._bytes -= self._waiting.popleft()[1]
                self._is_saved = False
        except CutwaterError as error:
            _log.info("%s denials wait for the audit: %s", len(self._waiting), error.message)
        if not self._is_saved and self._spool is not None:
            await self._in_thread(self._save)

    def _collect(self) -> None:
        self._second += 1
        prefix = f"{self._nonce}-{self._second}"
        for one in self._merge.take(system.wall_time_ns() // 1_000, self._server, prefix):
            size = len(encode_audit(one)) + 1
            if self._bytes + size > SPOOL_BYTES_MAX:
                self._merge.suppressed += one.count + one.suppressed
                continue
            self._waiting.append((one, size))
            self._bytes += size
            self._is_saved = False

    def _load(self) -> None:
        """Take over what an earlier process could not deliver. A file that cannot be read is left, and replaced."""
        self._is_loaded = True
        assert self._spool is not None
        try:
            lines = system.made(MachineFiles).read(self._spool).splitlines()
            found = [(_DECODER.decode(line), len(line) + 1) for line in lines]
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("%s, denials that wait for the audit, cannot be read: %s", self._spool, error)
            return
        self._waiting.extendleft(reversed(found))
        self._bytes += sum(size for _, size in found)

    def _save(self) -> None:
        assert self._spool is not None
        content = b"".join(encode_audit(one) + b"\n" for one, _ in self._waiting)
        try:
            if content:
                write_secret(self._spool, content, is_lasting=True)
            else:
                system.made(MachineFiles).unlink(self._spool)
            self._is_saved = True
        except OSError as error:
            _log.warning("denials that wait for the audit cannot be kept in %s: %s", self._spool, error)
