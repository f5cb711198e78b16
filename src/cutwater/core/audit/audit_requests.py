"""Requests of servers to the leader about the audit. Clients read the audit like any topic."""

from __future__ import annotations

from msgspec import Struct, structs

from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, encode_audit
from cutwater.errors import InvalidArgument

AUDIT_PRODUCER = "_cutwater/audit"
"""The producer under whose name leaders append the audit of changes."""
DENIALS_MAX = 256
"""Number of records in one request."""
DENIAL_BYTES_MAX = 32 * 1024


class NoteAuditedRequest(Struct, frozen=True, tag=True):
    """The records up to this number are in the log. Only the leader itself asks for it."""

    through: int


class RecordDenialsRequest(Struct, frozen=True, tag=True):
    """Asks the leader to append these records to the audit. The leader answers when they are in the log. It decides
    nothing: a flood of denials must not fill the store."""

    records: tuple[AuditRecord, ...]


def checked_denials(records: tuple[AuditRecord, ...], server: str) -> tuple[AuditRecord, ...]:
    """Return the records as those of this server. Raise if one is no denial: otherwise the key of one storage node
    would be enough to put changes into the audit that nobody made."""
    if len(records) > DENIALS_MAX:
        raise InvalidArgument(f"{len(records)} records of denials are too many: {DENIALS_MAX} is the most at once")
    for record in records:
        if record.outcome is AuditOutcome.DONE or record.number or record.index:
            raise InvalidArgument(f"a record about {record.operation[:40]!r} of {server} is no denial, but a change")
        if len(encode_audit(record)) > DENIAL_BYTES_MAX:
            raise InvalidArgument(f"a record of {server} is no denial: it has more than {DENIAL_BYTES_MAX} bytes")
    return tuple(structs.replace(record, server=server) for record in records)


AuditRequest = NoteAuditedRequest | RecordDenialsRequest
