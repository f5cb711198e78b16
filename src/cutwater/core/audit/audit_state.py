"""Audit records that are not in the log yet, as folded from decisions: a part of the state of the cluster.

They are in snapshots of the state, so decisions may be removed from the store before their records are in the log. A
leader appends the records in order, and ``NoteAudited`` removes those that are in the log. The number of a record is
its sequence in the log, so that the log itself tells which records it has: see ``metadata.audit_writer``.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, structs

from cutwater.core.access.access_decisions import AccessDecision, AccessMode, SetAccessMode
from cutwater.core.audit.audit_record import AuditRecord
from cutwater.core.order import decisions as d

PENDING_MAX = 10_000
"""Number of records that may wait for the log. With more, requests for further changes are refused."""


class AuditSnapshot(Struct, frozen=True):
    """The state in a snapshot, see ``AuditState``."""

    is_on: bool = False
    written: int = 0
    pending: tuple[AuditRecord, ...] = ()


class AuditState:
    """``is_on``: access control was on once; from then on all changes are recorded. Before, only changes of access
    control are, since they are how it is turned on. ``written`` is the number of the last record that is in the log for
    sure; ``pending`` are those after it."""

    def __init__(self, start: AuditSnapshot | None = None) -> None:
        start = start or AuditSnapshot()
        self.is_on, self.written = start.is_on, start.written
        self.pending = deque(start.pending)

    def snapshot(self) -> AuditSnapshot:
        return AuditSnapshot(self.is_on, self.written, tuple(self.pending))

    @property
    def is_untouched(self) -> bool:
        return not (self.is_on or self.written or self.pending)

    @property
    def is_full(self) -> bool:
        return len(self.pending) >= PENDING_MAX

    @property
    def last(self) -> int:
        """The number of the last record."""
        return self.written + len(self.pending)

    def wants(self, decision: d.Decision) -> bool:
        """Whether the decision is recorded, if it is a change."""
        return self.is_on or isinstance(decision, AccessDecision)

    def apply(self, decision: d.Decision, record: AuditRecord | None) -> None:
        """Fold a decision and the record of it, if there is one."""
        if isinstance(decision, SetAccessMode) and decision.mode is not AccessMode.OFF:
            self.is_on = True
        if isinstance(decision, d.NoteAudited):
            self._note(decision.through)
        elif record is not None:
            self.pending.append(structs.replace(record, number=self.last + 1))

    def _note(self, through: int) -> None:
        """Forget records that are in the log. If the log has numbers that were never given here, as the store was
        restored from an old copy, the pending records are numbered again after these."""
        if through > self.last:
            self.pending = deque(
                structs.replace(record, number=through + place) for place, record in enumerate(self.pending, 1)
            )
        else:
            for _ in range(through - self.written):
                self.pending.popleft()
        self.written = max(self.written, through)
