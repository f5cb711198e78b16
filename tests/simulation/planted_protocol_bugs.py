"""Bugs in the core and in the storage of replicas that the simulator must find. Each function returns what to replace
by what."""

from __future__ import annotations

from msgspec import structs
from planted_bugs import Patch, unasserted

from cutwater.client.cluster import catalog_cache
from cutwater.core.messages import SealReplica
from cutwater.core.order import cut, request_handling
from cutwater.core.order import decisions as d
from cutwater.core.order.cutting import Cutter
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.planning.cluster_view import Outlook
from cutwater.core.order.planning.first_reports import FirstReports
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.producer_session import Fate, Phase, ProducerSession
from cutwater.core.publish import run_requests
from cutwater.core.publish.groups import GroupBounds, GroupMemory
from cutwater.core.publish.publishing import Publisher
from cutwater.core.publish.run_requests import open_streams
from cutwater.core.publish.runs import RunRegistry
from cutwater.core.read import watermark
from cutwater.core.read.merge_reader import MergeReader
from cutwater.core.replica import opening, recovery
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.pending import PendingEntries
from cutwater.core.replica.replica import Replica
from cutwater.format.errors import StorageBroken
from cutwater.storage.format import SEGMENT
from cutwater.storage.replica import small_files
from cutwater.storage.replica.commits import CommitLog
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment import Segment, SegmentEnd
from cutwater.storage.results import EntryRange
from cutwater.storagenode.report_writer import ReportWriter
from cutwater.types import GLSN, LLSN, BatchNumber
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.server_book import ServerBook


def anyone_passes_for_a_server() -> list[Patch]:
    return [(Guard, "check", lambda self, peer: None), (Guard, "check_argument", lambda self, peer, argument: None)]


def any_key_is_a_proof() -> list[Patch]:
    return [(ServerBook, "is_known", lambda self, server: True)]


def report_before_sync() -> list[Patch]:
    right = Replica.report

    def report(self):
        ur = right(self)
        return ur and structs.replace(ur, uncommitted_llsn_length=self.written_end - self.durable_committed_end)

    return [(Replica, "report", report)]


def ack_before_cut_is_stored() -> list[Patch]:
    right = OrderLayer._apply

    def apply(self, decision, decided, now):
        right(self, decision, decided, now)
        if isinstance(decision, d.Cut):
            self.too_early += self._herald.announce(decision)

    def turn(self, now):
        self.too_early = []
        return [*right_turn(self, now), *self.too_early]

    right_turn = OrderLayer.turn
    return [(OrderLayer, "_apply", apply), (OrderLayer, "turn", turn)]


def commit_by_majority() -> list[Patch]:
    def committable_end(candidate):
        ends = sorted((end for end in candidate.durable_ends if end is not None), reverse=True)
        majority = len(candidate.durable_ends) // 2 + 1
        return max(ends[majority - 1], candidate.committed_end) if len(ends) >= majority else candidate.committed_end

    return [(cut, "committable_end", committable_end)]


def skip_epoch_check() -> list[Patch]:
    return [(Replica, "check_epoch", lambda self, epoch: None)]


def forget_deduplication_on_restart() -> list[Patch]:
    def replay(dedup, files, committed_end):
        dedup.__init__()
        return 0

    return [(opening, "replay", replay)]


def resurrect_truncated_tail() -> list[Patch]:
    def truncate(self, end):
        offset, running = self._end_of(end)
        self._unmarked = None
        self.end = self.durable = SegmentEnd(end, offset)
        self.running, self.lost = running, None

    def keep_end(tail, hard, committed_end):
        return tail[-1].last_llsn if tail else committed_end

    return [(Segment, "truncate", truncate), (recovery, "_keep_end", keep_end)]


def hwm_regression_after_leader_change() -> list[Patch]:
    right = OrderState.__init__

    def init(self, snapshot=None, decisions=()):
        decisions = list(decisions)
        right(self, snapshot, decisions)
        if decisions and isinstance(decisions[-1], d.Cut):
            self.high_watermark = decisions[-1].prev_high_watermark

    return [(OrderState, "__init__", init)]


def truncate_below_commit_on_bad_checksum() -> list[Patch]:
    right = SegmentStorage.find

    def find(self):
        bad = [finding.first_llsn for finding in self.verify() if finding.first_llsn is not None]
        if bad:
            self.cut_back(LLSN(min(bad) - 1), LLSN(min(bad) - 1))
        return right(self)

    return [(SegmentStorage, "find", find)]


def apply_a_commit_twice() -> list[Patch]:
    right = Replica._apply

    def apply(self, context):
        again = structs.replace(context, first_llsn=LLSN(self.committed_end + 1))
        if context.last_llsn == self.committed_end and again.last_llsn <= self.durable_end:
            pending = {p.last_llsn for p in self.pending._entries}
            if again.last_llsn in pending:
                return self._apply_next(again)
        return right(self, context)

    return [(Replica, "_apply", apply)]


def serve_beyond_hwm() -> list[Patch]:
    right = SegmentStorage.read

    def read(self, from_llsn, to_llsn, bytes_max):
        part = right(self, from_llsn, to_llsn, bytes_max)
        if part.last_llsn != self.committed_end or self.committed_end == self.durable_end:
            return part
        tail = self._log.read(LLSN(part.last_llsn + 1), self.durable_end, bytes_max)
        last = part.commits[-1]
        longer = structs.replace(last, count=last.count + tail.frames[-1].header.last_llsn - part.last_llsn)
        data = memoryview(bytes(part.data) + bytes(tail.data))
        return EntryRange(data, part.frames + tail.frames, (*part.commits[:-1], longer))

    return [(SegmentStorage, "read", read)]


def history_trimmed_too_early() -> list[Patch]:
    def forgettable_end(self, stream: LogStream, now):
        reports = [self._book.of(stream.stream, node) for node in stream.members]
        return max((ur.committed_end for ur in reports if ur is not None), default=None)

    return [(Outlook, "forgettable_end", forgettable_end)]


def watermark_by_maximum() -> list[Patch]:
    return [(watermark, "min", max)]


def idle_topic_holds_the_watermark_back() -> list[Patch]:
    def one_minimum(sources):
        return min((reached for reached, _ in sources), default=watermark.NO_WATERMARK)

    return [(watermark, "combined", one_minimum)]


def voided_report_counted() -> list[Patch]:
    right = ReportBook.admit

    def admit(self, report):
        newest = self.newest(report.storage_node_id)
        admitted = right(self, report)
        if admitted is None and newest.incarnation == report.incarnation:
            for ur in report.uncommit_reports:
                self._by_stream.setdefault(ur.log_stream_id, {})[report.storage_node_id] = ur
        return admitted

    def durable_ends(self, stream):
        reports = [self._book.of(stream.stream, node) for node in stream.members]
        return tuple(None if ur is None else max(ur.durable_end, stream.committed_end) for ur in reports)

    return [
        (ReportBook, "admit", admit),
        (ReportBook, "void", lambda self, stream: None),
        (Cutter, "_durable_ends", durable_ends),
    ]


def changes_since_the_last_report() -> list[Patch]:
    def changes(self, reports):
        found = tuple(ur for ur in reports if ur != self._base[ur.log_stream_id])
        self._base.update((ur.log_stream_id, ur) for ur in found)
        return found

    return [(ReportWriter, "_changes", changes)]


def sealed_range_trimmed_before_applied() -> list[Patch]:
    right = Outlook.forgettable_end

    def forgettable_end(self, stream, now):
        return right(self, stream, now) if stream.is_open else stream.committed_end

    return [(Outlook, "forgettable_end", forgettable_end)]


def deposed_leaders_seal_obeyed() -> list[Patch]:
    right = Replica._seal

    def seal(self, event: SealReplica):
        hard = self.hard_state
        if event.epoch < hard.epoch and event.sealed_at >= self.committed_end and self.trusted:
            event = structs.replace(event, epoch=hard.epoch, leader_epoch=hard.leader_epoch)
        return right(self, event)

    return [(Replica, "_seal", seal)]


def producer_moves_before_fate_is_known() -> list[Patch]:
    right = ProducerSession.stream_closed

    def stream_closed(self, stream, stream_epoch):
        if right(self, stream, stream_epoch) and self.phase is Phase.SETTLING:
            return self.fate_known(Fate(stream, stream_epoch, self._base(), ()))
        return []

    return [(ProducerSession, "stream_closed", stream_closed)]


def refusal_believed_without_a_fence() -> list[Patch]:
    right = ProducerSession.refused

    def refused(self, tag):
        if not right(self, tag):
            return []
        self.phase = Phase.READY
        return self._withdraw(self._grant.epoch + 1)

    return [(ProducerSession, "refused", refused)]


def subscriber_misses_new_stream() -> list[Patch]:
    return [(MergeReader, "_knows", lambda self, revision: revision > 0)]


def deduplication_ignores_uncommitted() -> list[Patch]:
    right = Deduplicator.find

    def find(self, tag, kind, checksum):
        known = right(self, tag, kind, checksum)
        return known if known is None or known.glsn is not None else None

    return [(Deduplicator, "find", find)]


def excluded_replica_keeps_its_tail() -> list[Patch]:
    right = Replica._cut_tail

    def cut_tail(self, end, *, definite):
        return right(self, end, definite=definite) if definite else []

    return [(Replica, "_cut_tail", cut_tail)]


def zombie_producer_not_fenced() -> list[Patch]:
    right = Deduplicator.find

    def find(self, tag, kind, checksum):
        window = self._windows.get(tag.producer)
        if window is not None and tag.epoch < window.epoch:
            return None if tag.sequence == window.last_sequence + 1 else right(self, tag, kind, checksum)
        return right(self, tag, kind, checksum)

    return [(Deduplicator, "find", find)]


# In the shipped storage code: storage nodes run on segment files.


def sync_skips_the_disk() -> list[Patch]:
    right = MarkedFile.sync_data

    def sync_data(self):
        if self.magic != SEGMENT:
            right(self)

    return [(MarkedFile, "sync_data", sync_data)]


def failed_sync_is_tried_again() -> list[Patch]:
    right = MarkedFile.sync_data

    def sync_data(self):
        try:
            right(self)
        except StorageBroken:
            right(self)

    return [(MarkedFile, "sync_data", sync_data)]


def commits_are_not_synced() -> list[Patch]:
    def sync(self):
        self._durable_count, self.durable = self._count, self.last

    return [(CommitLog, "sync", sync)]


def small_files_are_not_synced() -> list[Patch]:
    def replace(files, path, data):
        temporary = path.with_name(path.name + ".tmp")
        files.create(temporary).pwritev([data], 0)
        files.rename(temporary, path)
        files.sync_dir(path.parent)

    return [(small_files, "replace", replace)]


def departures_ignored() -> list[Patch]:
    return [(Deduplicator, "depart", lambda self, departures: None)]


def trimmed_records_skipped_silently() -> list[Patch]:
    def skip(self, source, first_left):
        if source.arrived + 1 < first_left:
            source.arrived, source.last_llsn = GLSN(first_left - 1), None

    return [(MergeReader, "_skip", skip)]


# Publishing staged batches.


def durable_end_inside_a_group() -> list[Patch]:
    return [(GroupBounds, "whole", lambda self, end: end), *_groups_unasserted()]


def _groups_unasserted() -> list[Patch]:
    """The replica asserts itself that groups are whole."""
    return [
        *unasserted(PendingEntries, "commit", "cut"),
        *unasserted(GroupMemory, "commit", "truncate"),
        *unasserted(GroupBounds, "cut"),
        *unasserted(Replica, "report"),
    ]


def group_half_kept_on_restart() -> list[Patch]:
    def keep_end(tail, hard, committed_end):
        end = committed_end
        for entry in tail:
            if entry.epoch != hard.epoch or (hard.sealed_at is not None and entry.last_llsn > hard.sealed_at):
                break
            end = entry.last_llsn
        return end

    return [(recovery, "_keep_end", keep_end), *_groups_unasserted()]


def later_decision_replaces_the_first() -> list[Patch]:
    right, right_problem = request_handling.publish, RunRegistry._problem_of_batch

    def publish(request, state):
        run = state.runs.get(request.run)
        if run is not None and request.batch == run.batch and run.unpublished and request.parts:
            run.groups = ()
            run.batch = BatchNumber(run.batch - 1)
        return right(request, state)

    def problem(self, run, batch, open_streams):
        what = right_problem(self, run, batch, open_streams)
        return "" if what in ("the batch was decided before", "the batch before it is not published yet") else what

    return [(request_handling, "publish", publish), (RunRegistry, "_problem_of_batch", problem)]


def groups_forgotten_on_restart() -> list[Patch]:
    right = opening.replay

    def replay(dedup, files, committed_end):
        count = right(dedup, files, committed_end)
        dedup.groups.__init__()
        return count

    return [(opening, "replay", replay)]


def group_moved_before_its_fate_is_known() -> list[Patch]:
    right = Publisher.decide

    def decide(self, now, outlook):
        yield from right(self, now, outlook)
        for run in self._state.runs.publishing:
            for group in run.unpublished:
                targets = open_streams(self._state, group.topic)
                if not self._state.streams[group.stream].is_open and targets:
                    yield d.MoveGroup(run.run, run.batch, group.topic, targets[0], "in a hurry")

    return [(Publisher, "decide", decide)]


def outputs_missing_in_snapshots() -> list[Patch]:
    return [(RunRegistry, "outputs_snapshot", lambda self: ())]


def expired_rows_are_decided_on() -> list[Patch]:
    def check_parts(request, run, state):
        return None

    right = RunRegistry._problem_of_batch

    def problem(self, run, batch, open_streams):
        what = right(self, run, batch, open_streams)
        return "" if "generation" in what else what

    return [(run_requests, "_check_parts", check_parts), (RunRegistry, "_problem_of_batch", problem)]


def appender_keeps_its_catalog() -> list[Patch]:
    return [(catalog_cache, "is_out_of_date", lambda known, heard: False)]


def answers_before_replicas_have_spoken() -> list[Patch]:
    return [(FirstReports, "holds", lambda self, asked, now: False)]


def decides_before_replicas_have_spoken() -> list[Patch]:
    right = OrderLayer._decide

    def decide(self, now, *, is_publishing):
        reports = self.first_reports
        missing, reports._missing = reports._missing, set()
        try:
            return right(self, now, is_publishing=is_publishing)
        finally:
            reports._missing = missing

    return [(OrderLayer, "_decide", decide)]


def lost_hard_state_loses_the_replica() -> list[Patch]:
    right = recovery.judge

    def judge(found):
        verdict = right(found)
        return structs.replace(verdict, kept=None) if getattr(verdict, "forgot_epochs", False) else verdict

    return [(opening, "judge", judge)]
