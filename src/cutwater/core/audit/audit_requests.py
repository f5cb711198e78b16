"""Requests of servers to the leader about the audit. Clients read the audit like any topic."""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.audit.audit_record import AuditRecord

AUDIT_PRODUCER = "_cutwater/audit"
"""The producer under whose name leaders append the audit of changes."""
DENIALS_MAX = 256
"""Number of records in one request."""


class NoteAuditedRequest(Struct, frozen=True, tag=True):
    """The records up to this number are in the log. Only the leader itself asks for it."""

    through: int


class RecordDenialsRequest(Struct, frozen=True, tag=True):
    """Asks the leader to append these records to the audit. The leader answers when they are in the log. It decides
    nothing: a flood of denials must not fill the store."""

    records: tuple[AuditRecord, ...]


AuditRequest = NoteAuditedRequest | RecordDenialsRequest
