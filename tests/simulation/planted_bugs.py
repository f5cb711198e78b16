"""Bugs that the simulator must find, each one wrong line in the right place, and the fault profile made for it.

A bug is switched on by its name, for the length of a ``with`` block, in tests only: it replaces one method by a wrong
one, so the shipped code has no trace of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from msgspec import structs

from cutwater.core import append_fate
from cutwater.core.append_fate import AppendFate
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
from cutwater.core.publish.groups import GroupBounds
from cutwater.core.publish.publishing import Publisher
from cutwater.core.publish.run_requests import open_streams
from cutwater.core.publish.runs import RunRegistry
from cutwater.core.read import watermark
from cutwater.core.read.merge_reader import CommittedBatch, MergeReader
from cutwater.core.replica import opening, recovery
from cutwater.core.replica.deduplication import Deduplicator
from cutwater.core.replica.replica import Replica
from cutwater.format.errors import StorageBroken
from cutwater.storage.format import SEGMENT
from cutwater.storage.replica import small_files
from cutwater.storage.replica.commits import CommitLog
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.testing.simulator.options import Options
from cutwater.testing.simulator.servers.disk import ReplicaDisk, is_intact
from cutwater.testing.simulator.servers.serving import SimServing
from cutwater.types import GLSN, LLSN, BatchNumber
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.server_book import ServerBook

Patch = tuple[object, str, object]


@dataclass(frozen=True)
class PlantedBug:
    what: str
    options: Options
    patches: Callable[[], list[Patch]]


@contextmanager
def planted(bug: PlantedBug) -> Iterator[None]:
    patches = [mock.patch.object(owner, name, wrong) for owner, name, wrong in bug.patches()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# The wrong code. Each function returns what to replace by what.


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
    right_truncate, right_lose = ReplicaDisk.truncate, ReplicaDisk.lose_power

    def truncate(self, end):
        ghosts = [entry for entry in self.entries if entry.last_llsn > end]
        right_truncate(self, end)
        if ghosts:
            self.ghosts = ghosts

    def lose_power(self, rng, *, torn):
        right_lose(self, rng, torn=torn)
        for ghost in getattr(self, "ghosts", ()):
            if ghost.first_llsn == self.end + 1:
                self.entries.append(ghost)

    def keep_end(tail, hard, committed_end):
        return tail[-1].last_llsn if tail else committed_end

    return [
        (ReplicaDisk, "truncate", truncate),
        (ReplicaDisk, "lose_power", lose_power),
        (recovery, "_keep_end", keep_end),
    ]


def hwm_regression_after_leader_change() -> list[Patch]:
    right = OrderState.__init__

    def init(self, snapshot=None, decisions=()):
        decisions = list(decisions)
        right(self, snapshot, decisions)
        if decisions and isinstance(decisions[-1], d.Cut):
            self.high_watermark = decisions[-1].prev_high_watermark

    return [(OrderState, "__init__", init)]


def truncate_below_commit_on_bad_checksum() -> list[Patch]:
    right = ReplicaDisk.find

    def find(self):
        for i, entry in enumerate(self.entries):
            if not is_intact(entry):
                del self.entries[i:]
                self.contexts = [c for c in self.contexts if c.last_llsn < entry.first_llsn]
                break
        return right(self)

    return [(ReplicaDisk, "find", find)]


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
    right = SimServing._run_of

    def run_of(self, stream, entry):
        contexts = self._node.disks[stream].contexts
        if contexts and entry.last_llsn <= contexts[-1].last_llsn:
            return right(self, stream, entry)
        last = contexts[-1].last_glsn + entry.first_llsn - contexts[-1].last_llsn if contexts else 1
        return CommittedBatch(stream, entry.first_llsn, GLSN(last), 0, entry.batch)

    return [
        (SimServing, "_readable_end", lambda self, replica: replica.written_end),
        (SimServing, "_run_of", run_of),
    ]


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
        newest = self._newest.get(report.storage_node_id)
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
    return [(GroupBounds, "whole", lambda self, end: end)]


def group_half_kept_on_restart() -> list[Patch]:
    def keep_end(tail, hard, committed_end):
        end = committed_end
        for entry in tail:
            if entry.epoch != hard.epoch or (hard.sealed_at is not None and entry.last_llsn > hard.sealed_at):
                break
            end = entry.last_llsn
        return end

    return [(recovery, "_keep_end", keep_end)]


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


def epoch_change_taken_for_a_failure() -> list[Patch]:
    right = append_fate.fate_of

    def fate_of(info, epoch, known_end):
        fate = right(info, epoch, known_end)
        return AppendFate.ABSENT if fate is AppendFate.UNDECIDED else fate

    return [(append_fate, "fate_of", fate_of)]


def appender_keeps_its_catalog() -> list[Patch]:
    return [(append_fate, "is_out_of_date", lambda known, heard: False)]


STORM = Options(
    storage_nodes=4,
    metadata_nodes=3,
    streams=3,
    appenders=3,
    producers=2,
    subscribers=2,
    append_pause_us=8_000,
    message_loss=0.01,
    crash_storage_every_us=250_000,
    crash_metadata_every_us=500_000,
    fsync_us_max=5_000,
    torn_writes=True,
)


def profile(**changes: object) -> Options:
    return structs.replace(STORM, **changes)


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


BUGS: dict[str, PlantedBug] = {
    bug.__name__: PlantedBug(what, options, bug)
    for bug, what, options in (
        (
            lost_hard_state_loses_the_replica,
            "a replica whose hard state is lost begins anew, and with it go intact copies",
            profile(replication=2, bit_flip_every_us=40_000, lost_state_every_us=200_000, append_pause_us=5_000),
        ),
        (
            answers_before_replicas_have_spoken,
            "a leader whose store was rolled back shows the past as the present",
            Options(roll_back_store=True, duration_us=400_000, append_pause_us=5_000, message_delay_us_max=5_000),
        ),
        (
            decides_before_replicas_have_spoken,
            "a leader whose store was rolled back makes cuts and seals before it notices",
            Options(roll_back_store=True, duration_us=400_000, append_pause_us=5_000, message_delay_us_max=5_000),
        ),
        (report_before_sync, "a report covers what is not on disk", profile()),
        (ack_before_cut_is_stored, "commits leave before the store has the cut", profile(store_us_max=10_000)),
        (commit_by_majority, "a cut takes what most replicas have", profile(message_delay_us_max=3_000)),
        (
            skip_epoch_check,
            "entries of an older epoch are taken",
            profile(message_reordering=0.05, append_pause_us=2_000, crash_storage_every_us=0, message_loss=0.0),
        ),
        (forget_deduplication_on_restart, "deduplication state does not survive a restart", profile(message_loss=0.05)),
        (
            resurrect_truncated_tail,
            "a truncated tail comes back after a crash",
            profile(append_pause_us=20_000, fsync_us_max=10_000, crash_storage_every_us=100_000, seal_every_us=60_000),
        ),
        (hwm_regression_after_leader_change, "a new leader forgets the last cut", profile()),
        (
            truncate_below_commit_on_bad_checksum,
            "recovery cuts the log at the first bad checksum",
            profile(bit_flip_every_us=50_000),
        ),
        (apply_a_commit_twice, "a repeated commit is applied to the next records", profile(message_duplication=0.2)),
        (serve_beyond_hwm, "uncommitted records are served", profile(fsync_us_max=10_000)),
        (history_trimmed_too_early, "a range goes when the first replica has it", profile(message_loss=0.05)),
        (watermark_by_maximum, "the fastest stream decides", profile()),
        (
            idle_topic_holds_the_watermark_back,
            "an operator waits for a topic that is idle",
            profile(sinks=1, topics_come_and_go_every_us=0),
        ),
        (
            voided_report_counted,
            "what replicas said before the unseal counts after it",
            profile(message_reordering=0.2, append_pause_us=3_000, fsync_us_max=3_000, message_loss=0.0),
        ),
        (
            sealed_range_trimmed_before_applied,
            "a seal forgets the last ranges",
            profile(message_loss=0.05, crash_all_storage_every_us=300_000),
        ),
        (
            deposed_leaders_seal_obeyed,
            "a late seal of an older epoch is obeyed",
            profile(message_duplication=0.2, message_reordering=0.1, seal_every_us=80_000, fsync_us_max=2_000),
        ),
        (
            producer_moves_before_fate_is_known,
            "a producer sends again elsewhere what may be in the log",
            profile(message_loss=0.05, finalize_every_us=300_000, seal_every_us=200_000, producers=3),
        ),
        (
            refusal_believed_without_a_fence,
            "a producer gives the number of a refused batch away while another attempt of it is under way",
            profile(event_time_ahead_us=25_000, producers=3, message_delay_us_max=10_000, message_reordering=0.1),
        ),
        (
            subscriber_misses_new_stream,
            "a subscriber goes on without asking whether there are new streams",
            profile(add_stream_every_us=200_000, crash_storage_every_us=0, crash_metadata_every_us=0),
        ),
        (
            deduplication_ignores_uncommitted,
            "a retry overtakes its first attempt",
            profile(message_delay_us_max=10_000),
        ),
        (
            excluded_replica_keeps_its_tail,
            "a replica that was left out goes on with what nobody else has",
            profile(partition_every_us=150_000, append_pause_us=4_000, fsync_us_max=2_000),
        ),
        (
            zombie_producer_not_fenced,
            "an older holder of a producer's name goes on",
            profile(reopen_producer_every_us=150_000, producers=3, message_delay_us_max=5_000),
        ),
        (
            departures_ignored,
            "a producer's older self goes on in a stream that the name has left",
            profile(
                reopen_producer_every_us=200_000,
                producers=3,
                seal_every_us=150_000,
                message_loss=0.05,
                message_reordering=0.1,
                message_delay_us_max=5_000,
            ),
        ),
        (
            trimmed_records_skipped_silently,
            "a subscriber goes past trimmed records without a word",
            profile(trim_every_us=30_000),
        ),
        (
            sync_skips_the_disk,
            "a sync of entries does not reach the disk",
            profile(segment_files=True, crash_all_storage_every_us=300_000),
        ),
        (
            failed_sync_is_tried_again,
            "a sync that failed is tried again, and believed",
            profile(segment_files=True, fsync_failure=0.05, crash_all_storage_every_us=300_000),
        ),
        (
            commits_are_not_synced,
            "commit contexts count as durable when they are written",
            profile(segment_files=True),
        ),
        (
            small_files_are_not_synced,
            "hard state gets its name before it is on disk",
            profile(segment_files=True, seal_every_us=100_000),
        ),
        (
            anyone_passes_for_a_server,
            "methods for servers are answered to everyone",
            profile(forge_every_us=50_000),
        ),
        (any_key_is_a_proof, "a server of the cluster is whoever has a key", profile(forge_every_us=50_000)),
        (durable_end_inside_a_group, "a replica reports half a group", profile(sinks=2)),
        (
            group_half_kept_on_restart,
            "what is left of a group counts after a restart",
            profile(sinks=2, fsync_us_max=2_000, crash_storage_every_us=100_000),
        ),
        (
            later_decision_replaces_the_first,
            "a batch that is repeated is decided again",
            profile(sinks=2, crash_sink_every_us=60_000, message_loss=0.05),
        ),
        (
            groups_forgotten_on_restart,
            "which groups are in a stream is forgotten on restart",
            profile(
                sinks=3,
                message_loss=0.03,
                crash_all_storage_every_us=150_000,
                crash_metadata_every_us=200_000,
            ),
        ),
        (
            group_moved_before_its_fate_is_known,
            "a group is sent to another stream while the first may have it",
            profile(sinks=2, seal_every_us=60_000, message_loss=0.05),
        ),
        (
            epoch_change_taken_for_a_failure,
            "a client sends again what a sealed log stream may have taken",
            profile(seal_every_us=60_000, message_loss=0.05, append_pause_us=3_000),
        ),
        (
            appender_keeps_its_catalog,
            "a client that appends all the time never uses log streams that open later",
            Options(producers=0, add_stream_every_us=200_000, duration_us=1_000_000),
        ),
        (
            outputs_missing_in_snapshots,
            "a leader that starts from a snapshot does not know which names have published",
            profile(sinks=2, crash_sink_every_us=60_000, crash_metadata_every_us=150_000),
        ),
        (
            expired_rows_are_decided_on,
            "rows that have expired are decided on all the same",
            Options(
                sinks=2, storage_nodes=4, metadata_nodes=3, streams=3, appenders=1, producers=0, fsync_us_max=5_000
            ),
        ),
    )
}
