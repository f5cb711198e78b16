"""Bugs in publishing, in scans, in watermarks and in the removal of nodes that the simulator of shipped code must find.
Each function returns what to replace by what."""

from __future__ import annotations

from functools import partial

from msgspec import structs
from planted_bugs import Patch

from cutwater.client.append.declarations import Declared
from cutwater.client.publish import runs as client_runs
from cutwater.client.read.range_reader import _Replicas
from cutwater.client.read.watermarks import Watermarks
from cutwater.core.order import decisions as d
from cutwater.core.order import request_handling
from cutwater.core.publish import run_requests
from cutwater.core.publish.runs import RunRegistry
from cutwater.core.read.watermark import WatermarkClock
from cutwater.core.requests import Done
from cutwater.errors import LastCopy, Trimmed
from cutwater.storagenode.publish.group_entries import Source
from cutwater.storagenode.publish.publishing import Publishing
from cutwater.storagenode.serving.reading import FoundEntries
from cutwater.testing.fault_files import FaultFile
from cutwater.types import GLSN

# Publishing.


def part_of_another_attempt_published() -> list[Patch]:
    right = Publishing._source

    def source(self, part):
        found = right(self, part)
        for held in self._staging.held.values():
            other = held.part
            is_like_it = (other.run, other.batch, other.topic) == (part.run, part.batch, part.topic)
            if is_like_it and other.part != part.part and held.size == self._staging.held[part.part].size:
                read = partial(self._files.read, held)
                return Source(found.part, held.part, read, found.block_bytes, held.checked)
        return found

    return [(Publishing, "_source", source)]


def repeated_batch_decided_again() -> list[Patch]:
    right, right_problem = request_handling.publish, RunRegistry._problem_of_batch

    def publish(request, state):
        run = state.runs.get(request.run)
        if run is not None and request.batch == run.batch and not run.unpublished and request.parts:
            run.batch = type(run.batch)(run.batch - 1)
        return right(request, state)

    def problem(self, run, batch, open_streams):
        what = right_problem(self, run, batch, open_streams)
        return "" if what == "the batch was decided before" else what

    return [(request_handling, "publish", publish), (RunRegistry, "_problem_of_batch", problem)]


def parts_of_one_size_taken_for_one() -> list[Patch]:
    right = client_runs._wanted

    def wanted(parts):
        return tuple({(part.topic, part.rows): part for part in right(parts)}.values())

    return [(client_runs, "_wanted", wanted)]


def staged_parts_not_synced() -> list[Patch]:
    right = FaultFile.sync_all

    def sync_all(self):
        if "staged" not in str(self.path):
            right(self)

    return [(FaultFile, "sync_all", sync_all)]


def older_run_not_fenced() -> list[Patch]:
    right = RunRegistry._problem_of_batch

    def problem(self, run, batch, open_streams):
        what = right(self, run, batch, open_streams)
        return "" if what == "the run is over" else what

    return [
        (run_requests, "_check_fence", lambda run: None),
        (RunRegistry, "_problem_of_batch", problem),
    ]


# Scans.


def scan_complete_at_the_end_of_a_segment() -> list[Patch]:
    return [(FoundEntries, "complete", lambda self, commits, last_llsn: self.complete_through)]


def scan_goes_on_one_late_on_another_replica() -> list[Patch]:
    right = _Replicas._scan

    async def scan(self, node, asked, deadline):
        if self._turn and asked.from_glsn < asked.to_glsn:
            asked = structs.replace(asked, from_glsn=GLSN(asked.from_glsn + 1))
        return await right(self, node, asked, deadline)

    return [(_Replicas, "_scan", scan)]


def scan_goes_past_trimmed_records() -> list[Patch]:
    right = _Replicas._scan

    async def scan(self, node, asked, deadline):
        try:
            return await right(self, node, asked, deadline)
        except Trimmed as error:
            later = structs.replace(asked, from_glsn=min(error.first_left, asked.to_glsn))
            return await right(self, node, later, deadline)

    return [(_Replicas, "_scan", scan)]


# Event time.


def kept_clock_answers_for_the_past() -> list[Patch]:
    right = Watermarks._answer

    async def answer(self, question, known):
        kept = self._kept.get((question.topic.topic, question.strategy))
        if kept is not None and kept.glsn > question.glsn:
            return None, WatermarkClock.restore(kept).watermark
        return await right(self, question, known)

    return [(Watermarks, "_answer", answer)]


def idleness_not_sent_with_records() -> list[Patch]:
    return [(Declared, "with_records", lambda self, batch: structs.replace(batch, declared=self.watermark))]


# Nodes.


def node_removed_with_the_last_copy() -> list[Patch]:
    right = request_handling._remove_node

    def remove(request, state, around):
        try:
            return right(request, state, around)
        except LastCopy:
            node = request.node
            moves = [
                d.AssignReplicas(stream.stream, tuple(other for other in stream.replicas if other != node))
                for stream in state.streams_on(node)
            ]
            return (*moves, d.RemoveNode(node)), Done()

    return [(request_handling, "_remove_node", remove)]
