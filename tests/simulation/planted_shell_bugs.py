"""Bugs in the shipped shells, each one wrong line in the right place, and the profile of the simulator of shipped code
that is made for it.

``seed`` is the first one that finds the bug: the suite runs only this one, and `make soak` all from 0 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import planted_client_bugs as client
import planted_disk_bugs as disk
import planted_server_bugs as server
import planted_workload_bugs as work
from planted_bugs import Patch

from cutwater.testing.virtual import simulation
from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.simulation import ShippedResult, simulate_shipped


@dataclass(frozen=True)
class ShellBug:
    what: str
    seed: int
    options: ShippedOptions
    patches: Callable[[], list[Patch]]


def simulate_bug(bug: ShellBug, seed: int) -> ShippedResult:
    """Run the profile of a bug. What hangs does so for less time than in other simulations."""
    with (
        mock.patch.object(simulation, "APPEND_AGAIN_SECONDS", 10.0),
        mock.patch.object(simulation, "CONVERGE_SECONDS", 15.0),
    ):
        return simulate_shipped(seed, bug.options)


@contextmanager
def planted_in_shell(bug: ShellBug) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, wrong in bug.patches():
            stack.enter_context(mock.patch.object(owner, name, wrong))
        yield


def plant(bug: Callable[[], list[Patch]], seed: int, what: str, **changes: Any) -> tuple[str, ShellBug]:
    """Return a bug and its profile: a small cluster for a short time, with these changes."""
    usual: dict[str, Any] = {
        "storage_nodes": 2,
        "metadata_nodes": 1,
        "replication": 2,
        "seconds": 1.0,
        "producers": 0,
        "append_pause": 0.02,
        "down_seconds_max": 0.3,
        "reads_every": 0.1,
    }
    return bug.__name__, ShellBug(what, seed, ShippedOptions(**(usual | changes)), bug)


SHELL_BUGS: dict[str, ShellBug] = dict(
    (
        # The wire.
        plant(
            client.calls_forgotten_with_their_connection,
            0,
            "calls that wait when a connection breaks get no outcome",
            storage_nodes=1,
            replication=1,
            reset_every=0.03,
            kill_every=0.3,
            delay_max=0.01,
        ),
        plant(
            client.answers_dropped_after_a_reconnect,
            0,
            "a host that connects again gets no answers",
            reset_every=0.1,
            streams=1,
            appenders=1,
        ),
        plant(
            client.number_of_a_cancelled_call_reused,
            2,
            "the answer to a cancelled call goes to the next call",
            timeout=0.1,
            delay_max=0.02,
        ),
        plant(
            client.lost_call_called_unsent,
            0,
            "a call is sent again whose connection broke before the answer",
            reset_every=0.1,
            delay_max=0.01,
        ),
        plant(client.torn_item_dropped, 0, "an item of a stream that comes in two pieces is dropped", tears=1.0),
        plant(
            client.credit_leaks,
            0,
            "credit for received items is not given again",
            prompt_seconds=0.5,
            seconds=2.0,
            streams=1,
            append_pause=0.008,
        ),
        # Appends.
        plant(
            client.append_retried_after_a_lost_connection,
            0,
            "an append that may have arrived is sent again",
            kill_every=0.3,
            delay_max=0.01,
        ),
        plant(
            client.unanswered_append_taken_for_absent,
            13,
            "an append without an answer is sent again in the next epoch",
            power_every=0.3,
            delay_max=0.03,
            storage_nodes=3,
            seconds=3.5,
            down_seconds_max=3.0,
        ),
        plant(
            client.abandoned_appends_sent_along,
            6,
            "an append whose caller was told that it failed is sent with others",
            storage_nodes=1,
            replication=1,
            careful=True,
            timeout=0.3,
            kill_every=0.15,
            down_seconds_max=0.6,
            append_pause=0.05,
        ),
        plant(client.joined_appends_get_one_position, 0, "appends that share a batch get the position of the first"),
        plant(
            client.deadline_ignored_in_flight,
            0,
            "an append that was sent waits for its answer for ever",
            storage_nodes=1,
            replication=1,
            timeout=0.3,
            pause_every=0.2,
            seconds=2.5,
            careful=True,
        ),
        plant(
            client.callers_memory_sent_later,
            0,
            "records are read from the caller's memory after the call",
            careful=True,
        ),
        plant(
            client.killed_heads_appends_called_ok,
            0,
            "appends that a dead head has not answered are acknowledged",
            kill_every=0.3,
        ),
        # Producers.
        plant(
            client.group_lost_without_a_head,
            0,
            "a producer loses the sends that come while its head is not connected",
            producers=1,
            appenders=1,
            append_pause=0.06,
            kill_every=0.2,
        ),
        plant(
            client.numbered_send_called_failed,
            0,
            "a send that may appear is called failed at its deadline",
            producers=2,
            timeout=0.3,
            kill_every=0.3,
            delay_max=0.01,
        ),
        plant(
            client.flights_lost_with_their_connection,
            4,
            "a producer drops the sends that were under way when a connection breaks",
            producers=2,
            reset_every=0.1,
        ),
        plant(
            server.producers_last_number_not_told,
            0,
            "a producer uses its numbers again after a restart",
            producers=1,
            appenders=1,
            append_pause=0.1,
            kill_client_every=0.1,
        ),
        # Catalog and positions.
        plant(
            client.fresh_catalog_was_under_way,
            1,
            "a fresh catalog is one that was requested before",
            careful=True,
            reads_every=0.01,
            delay_max=0.02,
        ),
        plant(client.tail_from_the_cache, 0, "the tail comes from the catalog in the cache", reads_every=0.02),
        plant(
            client.subscription_begins_one_early,
            0,
            "a subscription that goes on begins with the last record again",
            kill_client_every=0.2,
        ),
        plant(
            client.subscription_resumes_one_late,
            0,
            "a subscription that changes nodes leaves one position out",
            reset_every=0.02,
            streams=3,
            subscribers=3,
        ),
        plant(
            client.reopened_stream_not_followed,
            0,
            "a subscription does not follow log streams that were sealed and opened again",
            storage_nodes=1,
            replication=1,
            kill_every=0.2,
        ),
        # Reads.
        plant(
            client.read_from_a_replica_that_is_behind,
            1,
            "a read believes a replica that has not come so far",
            careful=True,
            reads_every=0.01,
            sync_seconds_max=0.2,
        ),
        plant(
            client.read_complete_without_an_answer,
            0,
            "a read calls itself complete though a node did not answer",
            careful=True,
            replication=1,
            reads_every=0.02,
            timeout=0.2,
            kill_every=0.3,
            down_seconds_max=1.0,
        ),
        plant(
            server.reader_misses_commits_that_are_not_written_yet,
            0,
            "a reader is told that it has everything, before commits can be found in the files",
            reads_every=0.01,
        ),
        plant(
            server.follower_misses_a_commit_while_it_begins,
            16,
            "a commit is missed that comes while a subscription begins",
            reset_every=0.05,
            sync_seconds_max=0.01,
        ),
        plant(
            server.reader_skips_the_first_entry_of_a_segment,
            0,
            "a reader skips the first entry of a segment",
            segment_bytes=4096,
        ),
        # Files.
        plant(
            server.name_of_a_new_file_not_synced,
            0,
            "the directory of a new segment is not synced",
            power_all_every=0.4,
            segment_bytes=4096,
        ),
        plant(
            server.hard_state_renamed_before_its_sync,
            0,
            "the hard state is replaced before its data is on disk",
            power_all_every=0.3,
        ),
        plant(
            server.entries_called_durable_one_sync_early,
            0,
            "entries are acknowledged before their sync",
            power_all_every=0.4,
        ),
        plant(
            server.full_segment_not_synced,
            0,
            "the sync at the end of a segment goes to the next file",
            power_all_every=0.3,
            segment_bytes=4096,
            padding_bytes_max=1000,
        ),
        plant(
            server.commits_called_durable_without_a_sync,
            0,
            "commits are reported that are not on disk",
            power_all_every=0.4,
        ),
        plant(
            server.failed_sync_taken_for_success,
            0,
            "a sync that fails is not noticed",
            sync_failure=0.05,
            power_all_every=0.6,
            down_seconds_max=0.1,
        ),
        plant(
            server.trim_removes_one_segment_too_many,
            0,
            "a trim removes a segment that is still needed",
            trim_every=0.1,
            segment_bytes=4096,
        ),
        # Storage nodes.
        plant(server.commits_given_to_the_wrong_streams, 3, "a storage node applies a commit to another log stream"),
        plant(
            server.unsettled_appends_called_refused,
            2,
            "a head that cannot tell the outcome of an append calls it refused",
            sync_failure=0.02,
            storage_nodes=3,
        ),
        plant(
            server.learner_skips_an_entry,
            0,
            "a learner leaves out one of the entries that it is sent",
            kill_every=0.3,
            down_seconds_max=1.0,
        ),
        # Metadata nodes.
        plant(
            server.leader_speaks_before_the_store_has_it,
            0,
            "the leader passes decisions on before the store has them",
            metadata_nodes=2,
            kill_every=0.2,
            store_delay_max=0.05,
        ),
        plant(
            server.cursor_acknowledged_before_it_is_decided,
            17,
            "a cursor is acknowledged before it is decided",
            metadata_nodes=2,
            cursors_every=0.1,
            reads_every=0.01,
            kill_every=0.1,
            store_delay_max=0.01,
        ),
        # Publishing.
        plant(
            work.part_of_another_attempt_published,
            0,
            "a group has the rows of another attempt of a task",
            sinks=1,
            padding_bytes_max=0,
            append_pause=0.01,
        ),
        plant(
            work.repeated_batch_decided_again,
            0,
            "a batch that is published and repeated is decided again",
            sinks=1,
            kill_client_every=0.3,
        ),
        plant(
            work.parts_of_one_size_taken_for_one,
            0,
            "of parts with the same number of rows, only one is published",
            sinks=1,
        ),
        plant(
            work.staged_parts_not_synced,
            4,
            "staged parts are not on disk when they count as staged",
            sinks=1,
            power_all_every=0.15,
            down_seconds_max=0.1,
            append_pause=0.01,
            sync_seconds_max=0.01,
        ),
        plant(
            work.older_run_not_fenced,
            0,
            "a run publishes on after another one has taken over its name",
            sinks=3,
        ),
        # Scans.
        plant(
            work.scan_complete_at_the_end_of_a_segment,
            0,
            "an answer that ends with a segment calls itself complete",
            scans_every=0.1,
            segment_bytes=4096,
        ),
        plant(
            work.scan_goes_on_one_late_on_another_replica,
            0,
            "a scan that changes the replica leaves one position out",
            scans_every=0.05,
            kill_every=0.2,
        ),
        plant(
            work.scan_goes_past_trimmed_records,
            1,
            "a scan goes past records that were trimmed meanwhile without a word",
            scans_every=0.02,
            trim_every=0.05,
        ),
        # Event time.
        plant(
            work.kept_clock_answers_for_the_past,
            0,
            "a client tells the watermark of a later position",
            declare_every=0.05,
        ),
        plant(
            work.idleness_not_sent_with_records,
            0,
            "idleness that is declared with records gets lost",
            declare_every=0.05,
        ),
        # Nodes.
        plant(
            work.node_removed_with_the_last_copy,
            2,
            "a storage node is removed that holds the last copy of a log stream",
            storage_nodes=3,
            replication=1,
            operate_every=0.05,
            seconds=3.0,
        ),
        # Damaged disks.
        plant(
            disk.damaged_copy_taken_for_intact,
            1,
            "entries that fail their checksum are served, also as copies for repairs",
            rot_every=0.03,
            seconds=1.5,
        ),
        plant(
            disk.scrub_misses_the_last_segment,
            7,
            "a scrub does not read the newest segment",
            rot_every=0.02,
            scrub_every=0.2,
            padding_bytes_max=3_000,
            segment_bytes=256 * 1024,
            seconds=1.5,
        ),
        plant(
            disk.repair_called_done_without_a_copy,
            1,
            "a repair does not put the copy in its place",
            rot_every=0.05,
        ),
        plant(
            disk.damaged_small_files_left_alone,
            0,
            "a damaged manifest, hard state or checkpoint is not written again",
            rot_every=0.05,
        ),
        plant(
            disk.database_not_synced,
            0,
            "the database of decisions is not synced",
            store="sqlite",
            power_every=0.2,
        ),
    )
)
