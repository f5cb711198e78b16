"""What the leader tells storage nodes: announcements of stored decisions, and answers to reports.

The herald reads the state and the reports and changes neither. It is asked only when everything in the state is
stored, so nothing it says can be taken back. All that it says may get lost or arrive twice: the next report shows what
is still missing, and the answer says it again.
"""

from __future__ import annotations

from collections.abc import Iterator

from cutwater.core import decisions as d
from cutwater.core.messages import (
    CatchUp,
    CommitMessage,
    CreateReplica,
    DropReplica,
    ExcludeReplica,
    LearnFrom,
    SealReplica,
    TrimReplica,
    UnsealReplica,
)
from cutwater.core.order_events import Send
from cutwater.core.order_state import LogStream, OrderState
from cutwater.core.reports import ReportBook
from cutwater.types import GLSN, LeaderEpoch, LogStreamId, ReplicaState, Report, StorageNodeId, UncommitReport


class Herald:
    """Speaks for one leader."""

    def __init__(self, leader_epoch: LeaderEpoch, state: OrderState, book: ReportBook) -> None:
        self.leader_epoch = leader_epoch
        self._state = state
        self._book = book
        self._members_revision = -1
        self._member_of: dict[StorageNodeId, list[LogStreamId]] = {}

    # Stored decisions.

    def announce(self, decision: d.Decision) -> Iterator[Send]:
        if isinstance(decision, (d.Seal, d.Unseal, d.CreateStream)) and decision.stream not in self._state.streams:
            # Its topic was deleted by the same write.
            return
        match decision:
            case d.Cut():
                yield from self._announce_cut(decision)
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
            case d.Trim():
                for stream in self._state.streams_of(decision.topic):
                    for node in stream.replicas:
                        yield Send(node, TrimReplica(stream.stream, decision.before))

    def _announce_cut(self, cut: d.Cut) -> Iterator[Send]:
        committed = {commit.stream for commit in cut.commits}
        known = self._state.streams
        members = {commit.stream: known[commit.stream].members for commit in cut.commits if commit.stream in known}
        memberships = self._memberships()
        # Heads first: it is they for whom clients wait.
        heads = {chain[0]: None for chain in members.values() if chain}
        for node in (*heads, *(node for node in memberships if node not in heads)):
            member_of = memberships.get(node, ())
            commits = tuple(commit for commit in cut.commits if node in members.get(commit.stream, ()))
            quiet = tuple(lsid for lsid in member_of if lsid not in committed)
            if commits or quiet:
                message = CommitMessage(cut.prev_high_watermark, cut.high_watermark, cut.revision, commits, quiet)
                yield Send(node, message)

    def _memberships(self) -> dict[StorageNodeId, list[LogStreamId]]:
        """Of which open streams each node is a member; worked out anew when the catalog has changed."""
        if self._members_revision != self._state.revision:
            self._members_revision = self._state.revision
            self._member_of = {node: [] for node in sorted(self._state.nodes)}
            for stream in self._state.streams.values():
                for node in stream.members if stream.is_open else ():
                    self._member_of[node].append(stream.stream)
        return self._member_of

    def _announce_unseal(self, unseal: d.Unseal) -> Iterator[Send]:
        """The head hears of it last, when all others run; alone it is the last as well."""
        stream = self._state.streams[unseal.stream]
        if not stream.is_open or stream.epoch != unseal.epoch:
            return
        for node in unseal.chain[1:] or unseal.chain:
            yield Send(node, self._unseal(stream))
        for node in stream.replicas:
            if node not in unseal.chain:
                yield Send(node, self._exclude(stream))

    # Reports.

    def answer(self, report: Report, settled: GLSN) -> Iterator[Send]:
        """What the replicas of the node lack. Cuts up to ``settled`` are so old that whoever has not heard of them has
        lost a message."""
        node = report.storage_node_id
        behind = report.applied_high_watermark < settled
        for ur in report.uncommit_reports:
            stream = self._state.streams.get(ur.log_stream_id)
            if stream is None or ur.state is ReplicaState.LEARNING or (not behind and self._is_well(stream, node, ur)):
                continue
            if node in stream.replicas:
                yield from self._answer(stream, node, ur, behind)
            elif ur.epoch < stream.epoch:
                # It was replaced: whoever still waits there has to hear that the stream went on.
                yield Send(node, self._exclude(stream))
        for lsid in report.invalid:
            stream = self._state.streams.get(lsid)
            if stream is not None and node in stream.replicas:
                yield from self._trim(stream, node, GLSN(1))
        known = {ur.log_stream_id for ur in report.uncommit_reports}
        known.update(report.invalid)
        for lsid in sorted(known):
            if self._state.was_deleted(lsid):
                yield Send(node, DropReplica(lsid))
        for stream in self._state.streams_on(node):
            if stream.stream not in known:
                yield self._create(stream, report)

    def _is_well(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> bool:
        """Whether there is nothing to say, as nearly always: a member that runs, in a stream whose head runs."""
        return (
            stream.is_open
            and ur.state is ReplicaState.RUNNING
            and ur.epoch == stream.epoch
            and node in stream.members
            and ur.trimmed_before >= self._state.topics[stream.topic].trimmed_before
            and (node == stream.members[0] or self._runs(stream, stream.members[0]))
        )

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
            yield Send(node, TrimReplica(stream.stream, trimmed_before))

    def _open(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> Iterator[Send]:
        """Members that missed the unseal get it again; the head opens last, when all others run."""
        head, *backups = stream.members
        if node != head and ur.epoch < stream.epoch:
            yield Send(node, self._unseal(stream))
        elif not self._runs(stream, head) and all(self._runs(stream, backup) for backup in backups):
            yield Send(head, self._unseal(stream))

    def _runs(self, stream: LogStream, node: StorageNodeId) -> bool:
        ur = self._book.of(stream.stream, node)
        return ur is not None and ur.epoch == stream.epoch and ur.state is ReplicaState.RUNNING

    def _catch_up(self, stream: LogStream, node: StorageNodeId, ur: UncommitReport) -> Iterator[Send]:
        """Every later range of the stream; nothing if the replica must learn, which repair will see to."""
        if ur.epoch != stream.epoch or ur.durable_end < stream.committed_end:
            return
        contexts = self._state.histories[stream.stream].after(ur.committed_end)
        if contexts is not None:
            high_watermark, revision = self._state.high_watermark, self._state.revision
            yield Send(node, CatchUp(stream.stream, contexts, stream.committed_end, high_watermark, revision))

    # Messages.

    def learn(self, stream: LogStream, node: StorageNodeId, source: StorageNodeId) -> Send:
        return Send(node, LearnFrom(stream.stream, self.leader_epoch, stream.epoch, source))

    def _create(self, stream: LogStream, report: Report) -> Send:
        """Only a stream that never was open begins at its creation; a later replica of it has to learn."""
        start = stream.created_at if stream.epoch == 0 else GLSN(0)
        message = CreateReplica(stream.stream, stream.topic, start, report.incarnation, report.sequence)
        return Send(report.storage_node_id, message)

    def _seal(self, stream: LogStream) -> SealReplica:
        return SealReplica(stream.stream, self.leader_epoch, stream.epoch, stream.committed_end)

    def _unseal(self, stream: LogStream) -> UnsealReplica:
        return UnsealReplica(
            stream.stream, self.leader_epoch, stream.epoch, stream.start, stream.members, stream.departed
        )

    def _exclude(self, stream: LogStream) -> ExcludeReplica:
        return ExcludeReplica(stream.stream, self.leader_epoch, stream.epoch)
