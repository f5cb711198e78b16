"""One leader's view of nodes and replicas: their reports, which are alive, and how long streams have been sealed.

The view answers questions and decides nothing. A new leader starts with a fresh one.
"""

from __future__ import annotations

from itertools import islice

from cutwater.core.order.options import OrderOptions
from cutwater.core.order.planning.liveness import Liveness
from cutwater.core.order.planning.repair import RepairPlan, StreamView, is_ready, plan_open, plan_sealed
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import LLSN, SECOND, Instant, LogStreamId, StorageNodeId


class Outlook:
    def __init__(
        self, state: OrderState, book: ReportBook, liveness: Liveness, options: OrderOptions, now: Instant
    ) -> None:
        self._state, self._book, self._liveness, self._options = state, book, liveness, options
        self._invalid_since: dict[tuple[LogStreamId, StorageNodeId], int] = {}
        self._sealed_since = {s.stream: now.monotonic for s in state.streams.values() if not s.is_open}

    # Sealed streams.

    def note_sealed(self, stream: LogStreamId, now: Instant) -> None:
        self._sealed_since[stream] = now.monotonic

    def note_sleep(self, slept_us: int) -> None:
        """Add the time that the leader itself was stopped: it does not count against replicas."""
        self._sealed_since = {stream: since + slept_us for stream, since in self._sealed_since.items()}

    def forget_streams(self) -> None:
        known = self._state.streams
        self._sealed_since = {lsid: since for lsid, since in self._sealed_since.items() if lsid in known}
        self._invalid_since = {key: since for key, since in self._invalid_since.items() if key[0] in known}

    def is_patient(self, stream: LogStream, now: Instant) -> bool:
        return now.monotonic - self._sealed_since.get(stream.stream, 0) < self._options.reopen_patience_us

    def is_given_up(self, stream: LogStream, now: Instant) -> bool:
        """Whether the stream has been sealed for so long that waiting for it is pointless."""
        sealed_for = now.monotonic - self._sealed_since.get(stream.stream, now.monotonic)
        return not stream.is_open and sealed_for >= self._options.replace_stream_after_us

    def forgettable_end(self, stream: LogStream, now: Instant) -> LLSN | None:
        """Return the LLSN up to which ranges may be forgotten, or None.

        A range is kept until every member of an open stream, and at least one of a sealed one, has it on disk. The
        other members of a sealed stream get some time, since commits are cheaper than learning.
        """
        reports = [self._book.of(stream.stream, node) for node in stream.members]
        applied = [ur.committed_end for ur in reports if ur is not None]
        if not applied or (len(applied) < len(reports) and (stream.is_open or self.is_patient(stream, now))):
            return None
        return min(applied)

    # Nodes and replicas.

    def is_usable(self, node: StorageNodeId, now: Instant) -> bool:
        return self._liveness.is_alive(node, now) and self._book.is_writable(node)

    def is_ready(self, stream: LogStream, node: StorageNodeId, now: Instant) -> bool:
        """Whether the replica is alive and sealed exactly where the stream is."""
        return self._liveness.is_alive(node, now) and is_ready(stream, self._book.of(stream.stream, node))

    def is_gone(self, node: StorageNodeId, now: Instant) -> bool:
        """Whether the node has been dead for so long that others may take its place."""
        silence = self._liveness.silence(node, now)
        return silence is None or silence >= self._options.replace_node_after_us

    def is_invalid(self, node: StorageNodeId, lsid: LogStreamId) -> bool:
        report = self._book.newest(node)
        return report is not None and lsid in report.invalid

    def is_unfit(self, node: StorageNodeId, lsid: LogStreamId, now: Instant) -> bool:
        """Whether the replica has been damaged for longer than a repair in place takes."""
        key = (lsid, node)
        if not self.is_invalid(node, lsid):
            self._invalid_since.pop(key, None)
            return False
        since = self._invalid_since.setdefault(key, now.monotonic)
        return now.monotonic - since >= self._options.reopen_patience_us

    def can_spare(self, stream: LogStream, node: StorageNodeId, now: Instant) -> bool:
        """Whether the stream can go on without one of its members."""
        others = sum(1 for other in stream.members if other != node and self.is_usable(other, now))
        return others >= max(1, self._options.min_replication)

    # Input for planning.

    def plan(self, stream: LogStream, now: Instant, *, admit: bool) -> RepairPlan:
        lsid = stream.stream
        view = StreamView(
            stream,
            self._state.histories[lsid],
            report=lambda node: self._book.of(lsid, node),
            alive=lambda node: self._liveness.is_alive(node, now),
            usable=lambda node: self.is_usable(node, now) and not self._liveness.is_avoided(lsid, node, now),
            fallback=lambda node: self.is_usable(node, now),
            invalid=lambda node: self.is_invalid(node, lsid),
            is_unheard=lambda node: self._liveness.is_alive(node, now) and self._book.newest(node) is None,
            replace_after_us=self._options.replace_node_after_us,
            turn=now.monotonic // (2 * SECOND),
        )
        wanted = self._state.wanted(stream.topic)
        if stream.is_open:
            return plan_open(view, admit=admit, wanted=wanted)
        least = min(self._options.min_replication, wanted)
        # A chain that has more members than its topic asks for loses one at a time.
        kept = max(wanted, len(stream.members) - 1)
        return plan_sealed(view, min_replication=least, patient=self.is_patient(stream, now), wanted=kept)


def trim_histories(
    state: OrderState, outlook: Outlook, with_history: dict[LogStreamId, None], count: int, now: Instant
) -> None:
    """Forget the ranges that no member needs, in the first streams of ``with_history``. They leave it, or go to its end
    if ranges are left."""
    for lsid in list(islice(with_history, count)):
        end = outlook.forgettable_end(state.streams[lsid], now)
        if end is not None:
            state.trim_history(lsid, end)
        del with_history[lsid]
        if state.histories[lsid]:
            with_history[lsid] = None
