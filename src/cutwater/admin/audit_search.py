"""Reads the audit: searches it, and follows it. Both need the right ``audit-read``, or to read the topic ``_audit``."""

from __future__ import annotations

import typing
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from cutwater.core.access.denials import quoted
from cutwater.core.audit.audit_record import AuditRecord, decode_audit
from cutwater.core.audit.change_records import ALWAYS, IF_ASKED, operation_name
from cutwater.core.audit.denial_merge import SUPPRESSED, denied_operation
from cutwater.core.internal_topics import AUDIT
from cutwater.errors import DeadlineExceeded, InvalidArgument, NotFound
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS

if TYPE_CHECKING:
    from cutwater.client.client import Client

TAKE_SECONDS = 1.0
CLOCKS_DIFFER = timedelta(minutes=1)
SEEN_MAX = 100_000
"""Number of denials that are remembered, to leave out those that are appended twice."""
AuditRecords = Generator[AuditRecord, None, None]
_Start = datetime | Literal["earliest", "latest"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


OPERATIONS = frozenset(
    {
        SUPPRESSED,
        *(operation_name(kind.__name__) for kind in typing.get_args(ALWAYS | IF_ASKED)),
        *(denied_operation(request.__name__) for request, access in REQUEST_ACCESS.items() if access.is_for_clients),
        *(
            denied_operation(method)
            for table in (STORAGE_NODE_ACCESS, METADATA_ACCESS)
            for method, access in table.items()
            if access.is_for_clients or access.client_subject is not None
        ),
    }
)
"""All that records name: changes, and methods that may be denied."""


def check_operation(name: str | None) -> None:
    if name is not None and name not in OPERATIONS:
        raise InvalidArgument(
            f"the audit knows no operation {name!r}, so nothing would be found; operations (a subscription is "
            f"'follow'): {', '.join(sorted(OPERATIONS))}"
        )


class AuditQuery(Struct, frozen=True):
    """Selects records; what is None does not matter. ``since`` is included, ``until`` is not. ``resource`` is literal,
    or a prefix and ``*``."""

    since: datetime | None = None
    until: datetime | None = None
    principal: str | None = None
    operation: str | None = None
    resource: str | None = None
    outcome: str | None = None

    def selects(self, record: AuditRecord) -> bool:
        if self.since is not None and record.time < _micros(self.since):
            return False
        if self.until is not None and record.time >= _micros(self.until):
            return False
        wanted = (self.principal, self.operation, self.outcome)
        found = (record.principal, record.operation, str(record.outcome))
        if any(want is not None and want != have for want, have in zip(wanted, found, strict=True)):
            return False
        return self.resource is None or _matches(self.resource, record.resource)


def search_audit(log: Client, query: AuditQuery, *, who: Callable[[], str] = lambda: "") -> AuditRecords:
    """Return the records that the audit has now, in the order of the log. ``who`` returns for which principal this
    reads; it is asked if the audit cannot be seen."""
    return _read(log, query, start=_begin(query) or "earliest", follow=False, goes_on=lambda: True, who=who)


def tail_audit(
    log: Client, query: AuditQuery, goes_on: Callable[[], bool] = lambda: True, *, who: Callable[[], str] = lambda: ""
) -> AuditRecords:
    """Return records as they come, without end: those from ``query.since`` on, or new ones only. ``goes_on`` is asked
    about once a second; for ``who`` see ``search_audit``."""
    return _read(log, query, start=_begin(query) or "latest", follow=True, goes_on=goes_on, who=who)


def no_audit(principal: str) -> NotFound:
    """Return the error for a caller that sees no audit: its principal, or empty."""
    return NotFound(
        f"there is no audit here, or you may not see it: topic {AUDIT.name!r} is made when access control is first "
        f"turned on, and an administrator lets you read it with `cutwater acl allow {quoted(principal or 'NAME')} "
        "audit-read cluster`"
    )


def _read(
    log: Client,
    query: AuditQuery,
    start: _Start,
    *,
    follow: bool,
    goes_on: Callable[[], bool],
    who: Callable[[], str],
) -> AuditRecords:
    seen: dict[str, None] = {}
    if AUDIT.name not in {topic.name for topic in log.topics(internal=True)}:
        raise no_audit(who())
    with log.subscribe(AUDIT.name, start=start, follow=follow) as subscription:
        while goes_on():
            try:
                found = subscription.take(TAKE_SECONDS if follow else None)
            except DeadlineExceeded:
                if follow:
                    continue
                raise
            if not found:
                return
            for stored in found:
                record = decode_audit(bytes(stored.value))
                if record is None or record.id in seen:
                    # Not a record of the cluster, or a denial that was appended twice.
                    continue
                if record.id:
                    seen[record.id] = None
                    if len(seen) > SEEN_MAX:
                        del seen[next(iter(seen))]
                if query.selects(record):
                    yield record


def _begin(query: AuditQuery) -> datetime | None:
    """Return the time of commit from which on the records lie. They are committed after their time, by clocks that may
    differ."""
    return None if query.since is None else query.since - CLOCKS_DIFFER


def _micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def _matches(pattern: str, resource: str) -> bool:
    return resource.startswith(pattern[:-1]) if pattern.endswith("*") else resource == pattern


def in_words(record: AuditRecord) -> str:
    """Return a record as one line. What a client has made up, such as a name that was denied, cannot look like another
    record, or control the terminal."""
    time = datetime.fromtimestamp(record.time / 1_000_000, UTC).isoformat(timespec="milliseconds")
    principal = _name(record.principal) or ("(no credentials)" if record.address else "(cluster)")
    parts = [time, str(record.outcome), principal, _name(record.operation), _name(record.resource)]
    if record.right:
        parts.append(f"lacks {_name(record.right)}")
    if record.count > 1:
        parts.append(f"{record.count} times")
    if record.suppressed:
        parts.append(f"{record.suppressed} not recorded")
    if record.address:
        parts.append(f"from {_name(record.address)}")
    if record.via:
        parts.append(f"via {_name(record.via)}")
    line = "  ".join(part for part in parts if part)
    return f"{line}: {_printable(record.detail)}" if record.detail else line


def _name(text: str) -> str:
    """Return a name as it is, or in quotes if it could pass for several words."""
    return text if text.isprintable() and "  " not in text else ascii(text)


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
