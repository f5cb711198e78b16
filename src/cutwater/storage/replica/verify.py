"""Verification: reads every synced byte, and checks that everything is consistent.

It can run while the replica is written to. It looks only at what was durable when it began, and reads data that is
rewritten in place (marks) again before it reports damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from cutwater.errors import CutwaterError, Unavailable
from cutwater.format.entry_codec import RunningEventTime
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.storage.files import lenient_pread
from cutwater.storage.format import CONTEXT_BYTES, HEADER_BYTES, decode_context
from cutwater.storage.replica.commits import CommitLog, follows
from cutwater.storage.replica.marked_file import MarkedFile
from cutwater.storage.replica.segment import EntryPlace, Segment
from cutwater.storage.replica.segment_log import SegmentLog
from cutwater.storage.results import FrameCheck, StorageFinding, malformed
from cutwater.types import LLSN, CommitContext

LOOKS_MAX = 3

T = TypeVar("T")


class _Head(Struct, frozen=True):
    """The parts of an entry that commit contexts must match. The epoch is 0 if the entry cannot be read."""

    path: Path
    first_llsn: LLSN
    last_llsn: LLSN
    epoch: int


def verify(
    log: SegmentLog, commits: CommitLog, findings: list[StorageFinding], check: FrameCheck | None = None
) -> list[StorageFinding]:
    """Return all faults of the entries and commit contexts of a replica. ``check`` checks the content of entries."""
    findings = list(findings)
    durable_commit = commits.durable
    if log.lost is not None:
        findings.append(StorageFinding("entries", "they end too early", log.lost))
    contexts = _check_commits(commits, findings)
    _check_against_commits(_check_segments(log, findings, check), contexts, findings)
    if durable_commit is not None and durable_commit.last_llsn > log.durable_llsn:
        findings.append(StorageFinding("commits", "they go beyond the entries", LLSN(log.durable_llsn + 1)))
    return findings


def check_files(log: SegmentLog, commits: CommitLog, findings: list[StorageFinding]) -> list[StorageFinding]:
    """Return faults of headers, marks and indexes. Neither entries nor commit contexts are read."""
    findings = list(findings)
    for first in list(log.firsts):
        try:
            segment = log.segment_of(first)
        except FileNotFoundError:
            continue
        except CutwaterError as error:
            findings.append(StorageFinding(_place(error), _cause(error), first))
            continue
        _check_header(segment.marked, findings)
        findings += [StorageFinding(str(segment.path), problem) for problem, _ in _persistent(segment.index.problems)]
    try:
        for _, marked, _ in commits.files():
            _check_header(marked, findings)
    except (FileNotFoundError, DamagedFile) as error:
        findings.append(StorageFinding(_place(error, "commits"), _cause(error)))
    return findings


def _place(error: Exception, otherwise: str = "entries") -> str:
    """Return the file that an error is about."""
    if isinstance(error, DamagedEntries):
        return error.where
    return str(error.path) if isinstance(error, DamagedFile) else otherwise


def _cause(error: Exception) -> str:
    """Return only the cause, without place and advice: a finding has its own place."""
    return error.what if isinstance(error, (DamagedEntries, DamagedFile)) else str(error)


def _persistent(look: Callable[[], list[T]]) -> list[T]:
    """Return problems that remain after a few looks. Others may come from a write at the same time."""
    problems: list[T] = []
    for _ in range(LOOKS_MAX):
        problems = look()
        if not problems:
            break
    return problems


def _check_header(marked: MarkedFile, findings: list[StorageFinding]) -> None:
    problems = _persistent(marked.header_problems)
    findings += [StorageFinding(str(marked.file.path), problem) for problem in problems]


# Entries.


def _check_segments(log: SegmentLog, findings: list[StorageFinding], look: FrameCheck | None) -> Iterator[_Head]:
    running: RunningEventTime | None = None
    firsts = list(log.firsts)
    for i, first in enumerate(firsts):
        try:
            segment = log.segment_of(first)
        except FileNotFoundError as error:
            if first >= log.first_llsn:
                findings.append(StorageFinding(str(error.filename), "the segment is missing", first))
            running = None
            continue
        except CutwaterError as error:
            last = LLSN(firsts[i + 1] - 1) if i + 1 < len(firsts) else None
            findings.append(StorageFinding(_place(error), _cause(error), first, last))
            running = None
            continue
        _check_header(segment.marked, findings)
        check = _SegmentCheck(segment, findings, running, look)
        yield from check.heads()
        running = check.running


class _SegmentCheck:
    def __init__(
        self,
        segment: Segment,
        findings: list[StorageFinding],
        running: RunningEventTime | None,
        look: FrameCheck | None,
    ) -> None:
        self.segment, self.findings, self._look = segment, findings, look
        self.end = segment.durable
        self.running: RunningEventTime | None = segment.marked.header.running
        self._starts: dict[int, LLSN] = {}
        if running is not None and running != self.running:
            self._find("event time does not go on from the segment before", segment.first_llsn)

    def heads(self) -> Iterator[_Head]:
        """Check frame by frame, and yield what is to be compared with the commits."""
        at, llsn = self.segment.data_start, LLSN(self.segment.first_llsn - 1)
        try:
            for place in self.segment.places(self.segment.first_llsn):
                if place.offset >= self.end.offset:
                    break
                self._starts[place.offset] = place.first_llsn
                yield self._check_place(place)
                at, llsn = place.end, place.last_llsn
        except Unavailable:
            raise
        except CutwaterError as error:
            self._find(_cause(error), LLSN(llsn + 1), self.end.llsn)
        else:
            if (llsn, at) != self.end:
                self._find(f"it ends at LLSN {llsn}, not at {self.end.llsn}", LLSN(llsn + 1))
        # Every point must lead to its frame, and nothing else may lie between the header and the frames.
        for problem, llsn_of_point in self.segment.index.problems(self._starts, self.end.offset):
            self._find(problem, llsn_of_point)

    def _check_place(self, place: EntryPlace) -> _Head:
        segment = self.segment
        if place.header is None:
            self._find("the header is wrong", place.first_llsn, place.last_llsn)
            self.running = None
            return _Head(segment.path, place.first_llsn, place.last_llsn, 0)
        try:
            frame = segment.frame_at(place)
            problem = self._look(frame) if self._look is not None else ""
            if problem:
                self.findings.append(malformed(str(segment.path), problem, place.header))
        except Unavailable:
            # For example, this machine lacks memory. That is no finding.
            raise
        except CutwaterError as error:
            self._find(_cause(error), place.first_llsn, place.last_llsn)
        if self.running is not None and self.running != place.header.running:
            self._find("event time does not go on from the entry before", place.first_llsn, place.last_llsn)
        self.running = place.header.running.after(place.header)
        return _Head(segment.path, place.first_llsn, place.last_llsn, place.header.epoch)

    def _find(self, what: str, first: LLSN | None = None, last: LLSN | None = None) -> None:
        self.findings.append(StorageFinding(str(self.segment.path), what, first, last))


# Commit contexts.


def _check_commits(commits: CommitLog, findings: list[StorageFinding]) -> list[CommitContext | None]:
    """Return all commit contexts, with None for each damaged one."""
    found: list[CommitContext | None] = []
    try:
        for first, marked, count in commits.files():
            _check_header(marked, findings)
            _check_records(marked, first, count, found, findings)
    except (FileNotFoundError, DamagedFile) as error:
        findings.append(StorageFinding(_place(error, "commits"), _cause(error)))
    return found


def _check_records(
    marked: MarkedFile, first: LLSN, count: int, found: list[CommitContext | None], findings: list[StorageFinding]
) -> None:
    path = str(marked.file.path)
    data = lenient_pread(marked.file, count * CONTEXT_BYTES, HEADER_BYTES)
    for i in range(count):
        context = decode_context(data[i * CONTEXT_BYTES : (i + 1) * CONTEXT_BYTES], i)
        before = found[-1] if found else None
        if context is None:
            findings.append(StorageFinding(path, f"commit context {i} is wrong"))
        elif before is not None and not follows(before, context):
            findings.append(
                StorageFinding(path, f"commit context {i} does not follow the one before", context.first_llsn)
            )
        elif i == 0 and context.first_llsn != first:
            findings.append(StorageFinding(path, f"it begins with LLSN {context.first_llsn}, not {first}"))
        found.append(context)


def _check_against_commits(
    heads: Iterator[_Head], contexts: list[CommitContext | None], findings: list[StorageFinding]
) -> None:
    """Check that each commit begins and ends with an entry of its epoch, and that all together cover the entries."""
    good = [context for context in contexts if context is not None]
    complete = len(good) == len(contexts)
    i = 0
    for head in heads:
        while i < len(good) and good[i].last_llsn < head.first_llsn:
            i += 1
        if i == len(good):
            continue
        context, where = good[i], str(head.path)
        if head.first_llsn < context.first_llsn:
            if complete:
                findings.append(StorageFinding(where, "no commit covers this entry", head.first_llsn, head.last_llsn))
        elif head.epoch and head.last_llsn > context.last_llsn:
            findings.append(StorageFinding(where, "a commit ends within this entry", head.first_llsn, head.last_llsn))
        elif head.epoch and head.epoch != context.epoch:
            what = f"an entry of epoch {head.epoch} was committed in epoch {context.epoch}"
            findings.append(StorageFinding(where, what, head.first_llsn, head.last_llsn))
