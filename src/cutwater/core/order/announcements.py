"""Messages of the leader to storage nodes: announcements of stored decisions, and answers to reports.

The herald reads the state and the reports and changes neither. The leader calls it only when everything in the state is
stored, so no message ever has to be taken back. Any message may get lost or arrive twice: the next report shows what is
still missing, and the answer says it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import filterfalse

from msgspec import UnsetType

from cutwater.core import messages as m
from cutwater.core.order import decisions as d
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.events import Send
from cutwater.core.order.planning.membership_index import Roster
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import (
    GLSN,
    LeaderEpoch,
    LogStreamId,
    ReplicaState,
    Report,
    Revision,
    StorageNodeId,
    UncommitReport,
)


class Herald:
    """Builds the messages of one leader."""

    def __init__(
        self, leader_epoch: LeaderEpoch, state: OrderState, book: ReportBook, roster: Roster, *, list_min: int
    ) -> None:
        """A node that is a member of fewer streams than ``list_min`` keeps no list of them."""
        self.leader_epoch = leader_epoch
        self._list_min = list_min
        self._state, self._book, self._roster = state, book, roster
        self._answered: dict[StorageNodeId, Revision] = {}
        """Catalog revision at which a node's whole report was examined and no stream was missing or superfluous."""
        self._restless: dict[StorageNodeId, set[LogStreamId]] = {}
        """Streams about which a node got a message after its last report. The message may be lost."""

    # Stored decisions.

    def announce(self, decision: d.Decision) -> Iterable[Send]:
        return self._announce_cut(decision) if isinstance(decision, d.Cut) else self._announce(decision)

    def _announce(self, decision: d.Decision) -> Iterator[Send]:
        if isinstance(decision, (d.Seal, d.Unseal, d.CreateStream)) and decision.stream not in self._state.streams:
            # The same write deleted its topic.
            return
        match decision:
            case d.Seal():
                stream = self._state.streams[decision.stream]
                if not stream.is_open and stream.epoch == decision.epoch:
                    for node in stream.replicas:
                        yield Send(node, self._seal(stream))
            case d.Unseal():
                yield from self._announce_unseal(decision)
            case d.CreateStream():
                for node in decision.replicas:
                    report = self._book.newest(node)
                    if report is not None:
                        yield self._create(self._state.streams[decision.stream], report)
            case d.ChangeTopic():
                # A node fetches the catalog when it hears of a newer one. Without appends the next cut may be far off.
                high_watermark, revision = self._state.high_watermark, self._state.revision
                for node in self._roster.member_of:
                    yield Send(node, m.CommitMessage(high_watermark, high_watermark, revision, (), ()))
            case d.Trim():
                for stream in self._state.streams_of(decision.topic):
                    for node in stream.replicas:
                        yield Send(node, m.TrimReplica(stream.stream, decision.before))

    def _announce_cut(self, cut: d.Cut) -> list[Send]:
        commits: dict[StorageNodeId, list[StreamCommit]] = {}
        heads: set[StorageNodeId] = set()
        committed: set[LogStreamId] = set()
        for commit in cut.commits:
            committed.add(commit.stream)
            stream = self._state.streams.get(commit.stream)
            if stream is not None and stream.members:
                heads.add(stream.members[0])
                for node in stream.members:
                    if node in commits:
                        commits[node].append(commit)
                    else:
                        commits[node] = [commit]
        # Heads come first, because clients wait for them. Other messages may wait a little if no reader follows that
        # node.
        urgent, others = [], []
        list_min = self._list_min
        for node, member_of in self._roster.member_of.items():
            own = tuple(commits.get(node, ()))
            if len(member_of) >= list_min:
                message = self._message_with_list(cut, node, own, member_of, committed)
            else:
                quiet = tuple(filterfalse(committed.__contains__, member_of)) if own else member_of
                message = m.CommitMessage(cut.prev_high_watermark, cut.high_watermark, cut.revision, own, quiet)
            if own or member_of:
                if node in heads:
                    urgent.append(Send(node, message))
                else:
                    others.append(Send(node, message, may_wait=not self._book.is_followed(node)))
        return urgent + others

    def _message_with_list(
        self,
        cut: d.Cut,
        node: StorageNodeId,
        own: tuple[StreamCommit, ...],
        member_of: tuple[LogStreamId, ...],
        committed: set[LogStreamId],
    ) -> m.CommitMessage:
        """Name the streams without commits one by one only to a node that does not hold the list of all its streams."""
        before, through, revision = cut.prev_high_watermark, cut.high_watermark, cut.revision
        name = (self.leader_epoch, self._roster.list_since[node])
        if self._book.members_known(node) == name:
            return m.CommitMessage(before, through, revision, own, (), others_of=name)
        quiet = tuple(filterfalse(committed.__contains__, member_of)) if own else member_of
        if not [commit for commit in own if not self._state.streams[commit.stream].is_open]:
            return m.CommitMessage(before, through, revision, own, quiet, names=name)
        # The same write sealed a stream with commits, so the list is without it.
        return m.CommitMessage(before, through, revision, own, quiet)

    def _announce_unseal(self, unseal: d.Unseal) -> Iterator[Send]:
        """Announce an unseal to all but the head. The head hears of it last, when all others run. A head without
        backups hears of it at once."""
        stream = self._state.streams[unseal.stream]
        if not stream.is_open or stream.epoch != unseal.epoch:
            return
        for node in unseal.chain[1:] or unseal.chain:
            yield Send(node, self._unseal(stream))
        for node in stream.replicas:
            if node not in unseal.chain:
                yield Send(node, self._exclude(stream))

    # Reports.

    def answer(self, report: Report, changed: set[LogStreamId], settled: GLSN) -> list[Send]:
        """Return the messages that bring the replicas of the node up to date.

        Cuts up to ``settled`` are so old that a node that has not applied them has lost a message. While the catalog
        stays the same, only streams that have ``changed`` since the last answer, and streams about which a message was
        sent, need another answer.
        """
        node = report.storage_node_id
        behind = report.applied_high_watermark < settled
        is_new = behind or not self._is_answered(node)
        told: list[Send] = []
        missed: list[UncommitReport] = []
        restless = self._restless.pop(node, set())
        for ur in self._book.said_by(node) if is_new else self._some(node, changed | restless):
            stream = self._state.streams.get(ur.log_stream_id)
            if stream is not None and self.is_settled(stream, node, ur):
                if not behind:
                    continue
                if stream.last_glsn <= report.applied_high_watermark:
                    missed.append(ur)
                    continue
            for send in self._answer_replica(node, ur, behind):
                told.append(send)
                for concerned in (node, send.node):
                    self._restless.setdefault(concerned, set()).add(ur.log_stream_id)
        if len(missed) >= self._list_min:
            told.append(self._nothing_since(report, missed))
        else:
            for ur in missed:
                told += self._catch_up(self._state.streams[ur.log_stream_id], node, ur)
                self._restless.setdefault(node, set()).add(ur.log_stream_id)
        if is_new:
            others = list(self._answer_node(report))
            told += others
            self._answered.pop(node, None)
            if not others:
                self._answered[node] = self._state.revision
        return told

    def _nothing_since(self, report: Report, missed: list[UncommitReport]) -> Send:
        """Tell many replicas at once that there is nothing for them in the cuts that the node has missed. Each of them
        runs, so it is complete up to the applied high watermark of the report, and the stream got nothing later."""
        streams = tuple(ur.log_stream_id for ur in missed)
        before, through = report.applied_high_watermark, self._state.high_watermark
        return Send(
            report.storage_node_id, m.CommitMessage(before, through, self._state.revision, (), streams), may_wait=True
        )

    def look_again(self, node: StorageNodeId) -> None:
        """Examine the node's whole next report: it covers other streams, so some may be missing or superfluous."""
        self._answered.pop(node, None)

    def is_content(self, report: Report, settled: GLSN) -> bool:
        """Whether the node needs no message, except perhaps about streams that have changed. See ``answer``. If the
        node falls behind later, its next report is answered."""
        node = report.storage_node_id
        return (
            report.applied_high_watermark >= settled
            and node not in self._restless
            and (self._answered.get(node) == self._state.revision or self._is_answered(node))
        )

    def _is_answered(self, node: StorageNodeId) -> bool:
        """Whether nothing has changed for the node since its whole report was examined."""
        answered = self._answered.get(node)
        if answered is None or answered < self._roster.touched(node):
            return False
        self._answered[node] = self._state.revision
        return True

    def unsettled(self, node: StorageNodeId) -> list[UncommitReport]:
        """Return the node's last reports on streams about which it got a message."""
        restless = self._restless.get(node)
        return self._some(node, restless) if restless else []

    def _some(self, node: StorageNodeId, streams: set[LogStreamId]) -> list[UncommitReport]:
        found = (self._book.of(stream, node) for stream in sorted(streams))
        return [ur for ur in found if ur is not None]

    def is_settled(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> bool:
        """Whether a replica is in its normal state: it runs, its head runs, it has what is committed, and it reports
        only what was decided. Then it needs no message, and nothing but a cut can follow from its report."""
        return (
            stream.is_open
            and ur.state is ReplicaState.RUNNING
            and ur.epoch == stream.epoch
            and node in stream.members
            and ur.committed_end <= stream.committed_end <= ur.durable_end
            and ur.high_watermark <= self._state.high_watermark
            and ur.trimmed_before == self._state.topics[stream.topic].trimmed_before
            and (node == stream.members[0] or self._book.is_running(stream, stream.members[0]))
        )

    def _answer_replica(self, node: StorageNodeId, ur: UncommitReport, behind: bool) -> Iterator[Send]:
        stream = self._state.streams.get(ur.log_stream_id)
        if stream is None or ur.state is ReplicaState.LEARNING:
            return
        if node in stream.replicas:
            yield from self._answer(stream, node, ur, behind)
        elif ur.epoch < stream.epoch:
            # The replica was replaced. Calls that still wait there must learn that the stream went on.
            yield Send(node, self._exclude(stream, replaced=True))

    def _answer_node(self, report: Report) -> Iterator[Send]:
        """Yield messages about replicas that cannot be trusted, that are superfluous, or that are missing."""
        node = report.storage_node_id
        for lsid in report.invalid:
            stream = self._state.streams.get(lsid)
            if stream is not None and node in stream.replicas:
                yield from self._trim(stream, node, GLSN(1))
            elif stream is not None:
                # The node holds leftovers of a replaced replica, whose damage does not matter.
                yield Send(node, self._exclude(stream, replaced=True))
        known = self._book.reported(node).union(report.invalid)
        for lsid in sorted(known):
            if self._state.was_deleted(lsid):
                yield Send(node, m.DropReplica(lsid))
        for lsid in self._roster.replica_of.get(node, ()):
            if lsid not in known:
                yield self._create(self._state.streams[lsid], report)

    def _answer(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport, behind: bool) -> Iterator[Send]:
        if not stream.is_open:
            if ur.state is not ReplicaState.SEALED or ur.epoch != stream.epoch:
                yield Send(node, self._seal(stream))
                yield from self._catch_up(stream, node, ur)
        elif node not in stream.members:
            if ur.epoch < stream.epoch:
                yield Send(node, self._exclude(stream))
        else:
            yield from self._open(stream, node, ur)
            if behind:
                yield from self._catch_up(stream, node, ur)
        yield from self._trim(stream, node, ur.trimmed_before)

    def _trim(self, stream: LogStream, node: StorageNodeId, known: GLSN) -> Iterator[Send]:
        trimmed_before = self._state.topics[stream.topic].trimmed_before
        if known < trimmed_before:
            yield Send(node, m.TrimReplica(stream.stream, trimmed_before))

    def _open(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> Iterator[Send]:
        """Send the unseal again to members that missed it. The head opens last, when all others run."""
        head, *backups = stream.members
        if node != head and ur.epoch < stream.epoch:
            yield Send(node, self._unseal(stream))
        elif not self._book.is_running(stream, head) and all(
            self._book.is_running(stream, backup) for backup in backups
        ):
            yield Send(head, self._unseal(stream))

    def _catch_up(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> Iterator[Send]:
        """Send every later range of the stream. Send nothing if the replica must learn, which repair arranges."""
        if ur.epoch != stream.epoch or ur.durable_end < stream.committed_end:
            return
        contexts = self._state.histories[stream.stream].after(ur.committed_end)
        if contexts is not None:
            high_watermark, revision = self._state.high_watermark, self._state.revision
            yield Send(node, m.CatchUp(stream.stream, contexts, stream.committed_end, high_watermark, revision))

    # Messages.

    def learn(self, stream: LogStream, node: StorageNodeId, source: StorageNodeId) -> Send:
        return Send(node, m.LearnFrom(stream.stream, self.leader_epoch, stream.epoch, source))

    def hold(self, report: Report, *, is_admitted: bool) -> Iterable[Send]:
        """Say which base of the node is held, if this report offers one, or builds on one that is not here."""
        node, incarnation = report.storage_node_id, report.incarnation
        if isinstance(report.base, UnsetType) or (is_admitted and report.base != report.sequence):
            return ()
        return (Send(node, m.LeaderHello(self.leader_epoch, (incarnation, self._book.holds(node, incarnation)))),)

    def release(self, stream: LogStream, node: StorageNodeId) -> Send:
        """Tell a node that others hold the stream now. Its report does not show whether it knows, if it has heard of
        the present epoch before it lost its place."""
        return Send(node, self._exclude(stream, replaced=True))

    def _create(self, stream: LogStream, report: Report) -> Send:
        """Create a replica. Only a stream that was never open begins at its creation; later replicas have to learn."""
        start = stream.created_at if stream.epoch == 0 else GLSN(0)
        message = m.CreateReplica(stream.stream, stream.topic, start, report.incarnation, report.sequence)
        return Send(report.storage_node_id, message)

    def _seal(self, stream: LogStream) -> m.SealReplica:
        return m.SealReplica(stream.stream, self.leader_epoch, stream.epoch, stream.committed_end)

    def _unseal(self, stream: LogStream) -> m.UnsealReplica:
        return m.UnsealReplica(
            stream.stream, self.leader_epoch, stream.epoch, stream.start, stream.members, stream.departed
        )

    def _exclude(self, stream: LogStream, *, replaced: bool = False) -> m.ExcludeReplica:
        return m.ExcludeReplica(stream.stream, self.leader_epoch, stream.epoch, replaced)
