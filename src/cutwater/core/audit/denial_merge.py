"""Merges the denials of one second into few audit records: per principal, address, operation and outcome."""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, audit_text
from cutwater.core.audit.change_records import operation_name

DISTINCT_MAX = 1_000
"""Number of records that one second may have. A client can make up names and addresses."""
SUPPRESSED = "denials-suppressed"
"""The operation of a record that only counts those that are not recorded."""


class DenialKey(Struct, frozen=True):
    principal: str
    address: str
    operation: str
    outcome: AuditOutcome
    via: str = ""


class _Merged(Struct):
    token: str
    right: str
    resource: str
    count: int = 1
    has_others: bool = False
    """Whether there were denials of other rights, or on other resources, too."""


class DenialMerge:
    """See the module. ``note`` takes a denial in, ``take`` returns the records since the last time."""

    def __init__(self) -> None:
        self._found: dict[DenialKey, _Merged] = {}
        self.suppressed = 0

    def note(self, key: DenialKey, token: str, right: str, resource: str) -> None:
        known = self._found.get(key)
        if known is not None:
            known.count += 1
            known.has_others = known.has_others or (known.right, known.resource) != (right, resource)
        elif len(self._found) < DISTINCT_MAX:
            self._found[key] = _Merged(token, right, resource)
        else:
            self.suppressed += 1

    def take(self, time: int, server: str, prefix: str) -> tuple[AuditRecord, ...]:
        """Return the records. Their ids begin with ``prefix``, which no other call may have."""
        records = [
            AuditRecord(
                time,
                key.operation,
                key.outcome,
                audit_text(key.principal),
                audit_text(known.resource),
                "also on others, or for other rights" if known.has_others else "",
                known.token,
                id=f"{prefix}-{place}",
                right=known.right,
                address=key.address,
                server=server,
                count=known.count,
                via=audit_text(key.via),
            )
            for place, (key, known) in enumerate(self._found.items())
        ]
        if self.suppressed:
            words = "too many different denials in one second, or no room to keep them"
            records.append(
                AuditRecord(
                    time,
                    SUPPRESSED,
                    AuditOutcome.DENIED,
                    detail=words,
                    id=f"{prefix}-suppressed",
                    server=server,
                    count=0,
                    suppressed=self.suppressed,
                )
            )
        self._found, self.suppressed = {}, 0
        return tuple(records)


def denied_operation(method: str) -> str:
    """Return the operation of a method or request. ``CreateTopicRequest`` is the same as the change that it asks
    for: ``create-topic``."""
    return operation_name(method.removesuffix("Request"))


def host_of(address: str) -> str:
    """Return an address without its port, which is another one for each connection."""
    return address.rpartition(":")[0] or address
