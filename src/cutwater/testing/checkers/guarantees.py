"""The guarantees, each as a named check over the history of one simulated or real cluster.

A check raises ``Violation`` with the guarantee's name. Each takes time linear in the history, up to a sort. None of
them uses the code that it checks, with two exceptions: the sequence of decisions is replayed through ``OrderState``,
which refuses contradictions, and the watermark clock is compared with a simple oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from msgspec import Struct

from cutwater.core.order import decisions as d
from cutwater.core.order.state import OrderState
from cutwater.core.read import watermark
from cutwater.core.read.time_marks import Clock
from cutwater.core.read.watermark import BoundedOutOfOrderness, WatermarkClock
from cutwater.errors import CutwaterError
from cutwater.testing.checkers.record import SimHistory, SimOutcome, Subscribed, event_times
from cutwater.testing.checkers.violation import Violation
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    Batch,
    BatchKind,
    BatchNumber,
    CommitContext,
    CutTime,
    Entry,
    Epoch,
    LogStreamId,
    ProducerTag,
    Revision,
    RunId,
    StorageNodeId,
    TopicId,
)


class ReplicaDump(Struct, frozen=True):
    """What one replica holds at the end, all of it committed."""

    node: StorageNodeId
    first_llsn: LLSN
    committed_end: LLSN
    entries: tuple[Entry, ...]
    contexts: tuple[CommitContext, ...]


class Evidence(Struct):
    """Everything that the checks use. ``written`` has every entry that any replica ever wrote, by place and epoch."""

    decisions: list[d.Decision]
    record: SimHistory
    dumps: dict[LogStreamId, list[ReplicaDump]]
    applied: dict[LogStreamId, list[CommitContext]]
    written: dict[tuple[LogStreamId, Epoch, LLSN], Batch]
    subscribed_through: GLSN
    """Subscribers had time to reach this position."""


LoggedBatch = tuple[GLSN, LogStreamId, LLSN, CutTime, Batch]


class SimLog:
    """The log that the decisions describe, with the content that replicas hold."""

    def __init__(self, evidence: Evidence) -> None:
        self.state = OrderState()
        self.cuts: list[d.Cut] = []
        self.seals: list[d.Seal] = []
        self.contexts: dict[LogStreamId, list[CommitContext]] = {}
        self.topics: dict[str, TopicId] = {}
        """Topics by name; no name is used twice."""
        self.topic_of: dict[LogStreamId, TopicId] = {}
        self.trims: dict[TopicId, list[GLSN]] = {}
        try:
            for decision in evidence.decisions:
                self.state.apply(decision)
                self._note(decision)
        except CutwaterError as error:
            raise Violation("12 one cut sequence", str(error)) from error
        self.batches: list[LoggedBatch] = []
        """Every committed batch in GLSN order."""
        for cut in self.cuts:
            for commit in cut.commits:
                self._add(commit.stream, commit.context, evidence)

    def _note(self, decision: d.Decision) -> None:
        match decision:
            case d.Cut():
                self.cuts.append(decision)
                for commit in decision.commits:
                    self.contexts.setdefault(commit.stream, []).append(commit.context)
            case d.Seal():
                self.seals.append(decision)
            case d.CreateTopic():
                self.topics[decision.name] = decision.topic
            case d.CreateStream():
                self.topic_of[decision.stream] = decision.topic
            case d.Trim():
                self.trims.setdefault(decision.topic, []).append(decision.before)

    def is_internal(self, stream: LogStreamId) -> bool:
        """Whether servers append to the log stream, and not clients."""
        topic = self.state.topics.get(self.topic_of[stream])
        return topic is not None and topic.is_internal

    def trims_of(self, topic: TopicId) -> list[GLSN]:
        return self.trims.get(topic, [GLSN(1)])

    def trimmed_before(self, stream: LogStreamId) -> GLSN:
        return self.trims_of(self.topic_of[stream])[-1]

    def gone_before(self, stream: LogStreamId) -> GLSN:
        """Return up to where a reader may be told that a record of this log stream is trimmed. If its topic is deleted,
        the position may have been one of any topic that was trimmed."""
        if self.topic_of[stream] in self.state.topics:
            return self.trimmed_before(stream)
        return max((trims[-1] for trims in self.trims.values()), default=GLSN(1))

    def _add(self, stream: LogStreamId, context: CommitContext, evidence: Evidence) -> None:
        llsn = context.first_llsn
        while llsn <= context.last_llsn:
            batch = evidence.written.get((stream, context.epoch, llsn))
            if batch is None:
                raise Violation("2 dense", f"log stream {stream} has nothing at LLSN {llsn} of epoch {context.epoch}")
            self.batches.append((context.glsn_of(llsn), stream, llsn, context.time, batch))
            llsn = LLSN(llsn + batch.count)
        if llsn != context.last_llsn + 1:
            raise Violation("8 batches", f"log stream {stream}: a batch crosses the end of commit {context}")


def check_unique(log: SimLog, evidence: Evidence) -> None:
    """1: one value per GLSN, byte-identical on every replica."""
    decided = {(stream, c.high_watermark): c for stream, contexts in log.contexts.items() for c in contexts}
    for stream, contexts in evidence.applied.items():
        for context in contexts:
            if decided.get((stream, context.high_watermark)) != context:
                raise Violation("1 unique", f"a replica of log stream {stream} applied {context}, never decided")
    content = {(stream, llsn): batch for _, stream, llsn, _, batch in log.batches}
    for stream, dumps in evidence.dumps.items():
        for dump in dumps:
            for entry in dump.entries:
                if content.get((stream, entry.first_llsn)) != entry.batch:
                    raise Violation("1 unique", f"node {dump.node} holds other bytes at {stream}/{entry.first_llsn}")
    seen: dict[GLSN, int] = {}
    for op in evidence.record.appends:
        if op.ack is not None and seen.setdefault(op.ack.glsn, op.payload) != op.payload:
            raise Violation("1 unique", f"GLSN {op.ack.glsn} was acknowledged to {seen[op.ack.glsn]} and {op.payload}")


def check_dense(log: SimLog, evidence: Evidence) -> None:
    """2: GLSN 1..HWM without holes, LLSN contiguous per stream."""
    next_glsn = 1
    for cut in log.cuts:
        for commit in cut.commits:
            if commit.context.first_glsn != next_glsn:
                raise Violation("2 dense", f"GLSN {next_glsn} is missing before {commit}")
            next_glsn += commit.context.count
        next_glsn += 1 if cut.is_tick else 0
        if next_glsn != cut.high_watermark + 1:
            raise Violation("2 dense", f"cut {cut.high_watermark} ends at {next_glsn - 1}")
    for stream, contexts in log.contexts.items():
        for before, after in pairwise(contexts):
            if after.first_llsn != before.last_llsn + 1:
                raise Violation("2 dense", f"log stream {stream} jumps from {before.last_llsn} to {after.first_llsn}")


def check_durable(log: SimLog, evidence: Evidence) -> None:
    """3: after an ack, a read of that GLSN gives that record, a retriable error, or *trimmed* after a trim request."""
    at = {glsn: (stream, llsn, batch) for glsn, stream, llsn, _, batch in log.batches}
    for op in evidence.record.appends:
        if op.ack is None:
            continue
        stream, llsn, batch = at.get(op.ack.glsn, (None, 0, None))
        if batch is None or evidence.record.op_of(batch) is not op or (stream, llsn) != (op.ack.stream, op.ack.llsn):
            raise Violation("3 durable", f"append {op.payload} was acknowledged as {op.ack}, the log has {batch}")
    _check_held(log, evidence)
    for read in evidence.record.reads:
        op, run = read.op, read.run
        assert op.ack is not None
        if run is not None and (run.first_glsn != op.ack.glsn or evidence.record.op_of(run.batch) is not op):
            raise Violation("3 durable", f"a read of GLSN {op.ack.glsn} gave {run}")
        if read.error == "trimmed" and not op.ack.glsn < read.first_left <= log.gone_before(read.stream):
            raise Violation("3 durable", f"a read of {op.ack.glsn} said trimmed before {read.first_left}, without trim")


def _check_held(log: SimLog, evidence: Evidence) -> None:
    """Check that every committed record that was not trimmed is on every current replica."""
    for stream, dumps in evidence.dumps.items():
        info, before = log.state.streams[stream], log.trimmed_before(stream)
        keep = [llsn for glsn, s, llsn, _, b in log.batches if s == stream and glsn + b.count - 1 >= before]
        for dump in dumps:
            held = {entry.first_llsn for entry in dump.entries}
            lost = [llsn for llsn in keep if llsn not in held]
            if lost or dump.committed_end != info.committed_end:
                raise Violation(
                    "3 durable",
                    f"node {dump.node} should hold log stream {stream} to {info.committed_end}, "
                    f"has {dump.first_llsn} to {dump.committed_end} without {lost[:5]}",
                )


def check_no_phantom(log: SimLog, evidence: Evidence) -> None:
    """4: an append that failed definitely never appears; one with an unknown outcome appears at most once."""
    times: dict[int, int] = {}
    for glsn, stream, _, _, batch in log.batches:
        if batch.kind is BatchKind.FENCE or log.is_internal(stream):
            continue
        op = evidence.record.op_of(batch)
        if op is None:
            raise Violation("13 damage", f"GLSN {glsn} holds bytes that no client sent: {batch}")
        times[op.payload] = times.get(op.payload, 0) + 1
    for op in evidence.record.appends:
        limit = 0 if op.outcome is SimOutcome.FAIL else 1
        if times.get(op.payload, 0) > limit:
            raise Violation(
                "4 no phantom", f"append {op.payload} ({op.outcome.value}) is there {times[op.payload]} times"
            )


def check_real_time(log: SimLog, evidence: Evidence) -> None:
    """5: an append that ended before another began has the smaller GLSN. The second one need not be acknowledged: it
    only has to be in the log."""
    ends = sorted((op for op in evidence.record.appends if op.ack is not None), key=lambda op: op.completed)
    places = [(evidence.record.op_of(batch), glsn) for glsn, _, _, _, batch in log.batches]
    highest, i = 0, 0
    for op, glsn in sorted(((op, glsn) for op, glsn in places if op is not None), key=lambda place: place[0].invoked):
        while i < len(ends) and ends[i].completed < op.invoked:
            ack = ends[i].ack
            assert ack is not None
            highest, i = max(highest, ack.glsn), i + 1
        if glsn <= highest:
            raise Violation("5 real time", f"append {op.payload} got GLSN {glsn} after {highest} was acknowledged")


def check_tail(log: SimLog, evidence: Evidence) -> None:
    """6: the tail never goes back, and is never behind what was acknowledged or seen before the request for it."""
    check_answers(evidence.record)


def check_answers(record: SimHistory) -> None:
    """6, for all answers of the metadata repository: tail, catalog and cursors are never older than seen before."""
    seen = [(tail.completed, tail.high_watermark, tail.revision) for tail in record.tails]
    seen += [(op.completed, GLSN(op.ack.glsn + op.ack.count - 1), Revision(0)) for op in record.appends if op.ack]
    seen.sort()
    highest, revision, i = GLSN(0), Revision(0), 0
    for tail in sorted(record.tails, key=lambda tail: tail.invoked):
        while i < len(seen) and seen[i][0] < tail.invoked:
            highest, revision, i = max(highest, seen[i][1]), max(revision, seen[i][2]), i + 1
        if tail.high_watermark < highest:
            raise Violation("6 tail", f"the tail was {tail.high_watermark} after {highest} had been seen")
        if tail.revision < revision:
            raise Violation("6 tail", f"the catalog was of revision {tail.revision} after {revision} had been seen")
    for read in (op for op in record.cursors if op.is_read):
        known = [op.glsn for op in record.cursors if op.cursor == read.cursor and op.completed < read.invoked]
        if known and read.glsn < max(known):
            raise Violation("6 tail", f"{read.cursor} was at {read.glsn} after it had been put to {max(known)}")


def check_subscribe(log: SimLog, evidence: Evidence) -> None:
    """7: a subscription gets exactly the log of its topics from its start, over any failover, except records that it
    was told were trimmed, and records that were left in a topic when it was deleted."""
    data = [item for item in log.batches if item[4].kind is BatchKind.DATA]
    at = {glsn: (stream, llsn, batch) for glsn, stream, llsn, _, batch in data}
    for number, seen in evidence.record.subscribers.items():
        got = [run.first_glsn for run in seen.runs]
        if any(before >= after for before, after in pairwise(got)):
            raise Violation("7 subscribe", f"subscriber {number} got records out of order, or twice")
        for run in seen.runs:
            if at.get(run.first_glsn) != (run.stream, run.first_llsn, run.batch):
                raise Violation("7 subscribe", f"subscriber {number} got {run}, which is not in the log")
        handed_on = set(got)
        for glsn, stream, _, _, batch in data:
            last = GLSN(glsn + batch.count - 1)
            if glsn not in handed_on and last <= seen.through and not _may_be_missed(log, seen, stream, last):
                raise Violation("7 subscribe", f"subscriber {number} went past GLSN {glsn} without it")
        if seen.through < evidence.subscribed_through:
            raise Violation("7 subscribe", f"subscriber {number} stands at {seen.through}")
        if any(not any(first_left in trims for trims in log.trims.values()) for _, first_left in seen.gaps):
            raise Violation("7 subscribe", f"subscriber {number} was told {seen.gaps}, trims were {log.trims}")


def _may_be_missed(log: SimLog, seen: Subscribed, stream: LogStreamId, last: GLSN) -> bool:
    topic = log.topic_of[stream]
    if seen.topics is not None and topic not in seen.topics:
        return True
    if topic not in log.state.topics and last >= seen.ended.get(topic, 0):
        return True
    return any(begin <= last < end and end in log.trims_of(topic) for begin, end in seen.gaps)


def _sent(log: SimLog) -> Iterator[tuple[GLSN, LogStreamId, ProducerTag]]:
    """Yield the batches of producers in the order of the log, without fences."""
    for glsn, stream, _, _, batch in log.batches:
        if batch.producer is not None and batch.kind is not BatchKind.FENCE:
            yield glsn, stream, batch.producer


def check_producer_order(log: SimLog, evidence: Evidence) -> None:
    """8: producer order per stream; batches are all or nothing (the log consists of whole batches, see ``SimLog``)."""
    last: dict[tuple[str, LogStreamId], int] = {}
    for glsn, stream, tag in _sent(log):
        if tag.sequence <= last.get((tag.producer, stream), 0):
            raise Violation("8 producer order", f"GLSN {glsn}: {tag} after sequence {last[tag.producer, stream]}")
        last[tag.producer, stream] = tag.sequence


def check_exactly_once(log: SimLog, evidence: Evidence) -> None:
    """9: exactly once per (producer, sequence) over retries, seals, restarts, other streams."""
    places: dict[tuple[str, int], GLSN] = {}
    for glsn, _, tag in _sent(log):
        if (tag.producer, tag.sequence) in places:
            raise Violation("9 exactly once", f"{tag} is at {places[tag.producer, tag.sequence]} and at {glsn}")
        places[tag.producer, tag.sequence] = glsn
    for op in evidence.record.appends:
        if op.producer is not None and op.ack and places.get((op.producer, op.sequence)) != op.ack.glsn:
            raise Violation("9 exactly once", f"append {op.payload} of {op.producer}/{op.sequence} is not at {op.ack}")


def check_fenced(log: SimLog, evidence: Evidence) -> None:
    """9: when a producer is open, earlier holders of its name append nothing any more."""
    for glsn, _, _, _, batch in log.batches:
        op = evidence.record.op_of(batch)
        if op is None or not op.holder:
            continue
        own = evidence.record.opens[op.holder - 1]
        for other in evidence.record.opens:
            if other.producer == op.producer and own.completed < other.invoked and other.completed < op.invoked:
                what = f"append {op.payload} of {op.producer} is at GLSN {glsn}"
                raise Violation("9 fenced", f"{what}, and began after another client had taken over its name")


def check_trim(log: SimLog, evidence: Evidence) -> None:
    """10: trim is monotone and durable."""
    for trim in evidence.record.trims:
        decided = log.trims_of(log.topics[trim.topic])[-1]
        if trim.before > decided:
            raise Violation("10 trim", f"a trim before {trim.before} was answered, the log says {decided}")
    gone: dict[tuple[StorageNodeId, LogStreamId], GLSN] = {}
    told = sorted((read for read in evidence.record.reads if read.error == "trimmed"), key=lambda read: read.completed)
    i = 0
    for read in sorted(evidence.record.reads, key=lambda read: read.invoked):
        while i < len(told) and told[i].completed < read.invoked:
            place = (told[i].node, told[i].stream)
            gone[place] = max(gone.get(place, GLSN(0)), told[i].first_left)
            i += 1
        first_left = gone.get((read.node, read.stream), GLSN(0))
        if read.run is not None and read.run.first_glsn < first_left:
            raise Violation(
                "10 trim", f"node {read.node} served GLSN {read.run.first_glsn}, trimmed before {first_left}"
            )
        if read.error == "trimmed" and not read.first_left >= first_left:
            raise Violation("10 trim", f"node {read.node} named {read.first_left} after {first_left}")


def check_sealed(log: SimLog, evidence: Evidence) -> None:
    """11: a sealed epoch never grows: nothing of it is committed, or held as committed, beyond its sealed position."""
    ends: dict[tuple[LogStreamId, Epoch], LLSN] = {}
    for seal in log.seals:
        if ends.setdefault((seal.stream, seal.epoch), seal.sealed_at) != seal.sealed_at:
            raise Violation("11 sealed", f"{seal} after {ends[seal.stream, seal.epoch]}")
    for stream, dumps in evidence.dumps.items():
        for dump in dumps:
            for entry in dump.entries:
                end = ends.get((stream, entry.epoch))
                if end is not None and entry.last_llsn > end:
                    raise Violation("11 sealed", f"node {dump.node} holds {stream}/{entry.last_llsn}, sealed at {end}")


def check_watermark(log: SimLog, evidence: Evidence) -> None:
    """Event time: the watermark of each topic at every record, and of all topics after every batch, follows the rule.
    Each topic is a source; together they feed one operator."""
    walk = _WatermarkWalk()
    batches, marks = iter(log.batches), Clock()
    for decision in evidence.decisions:
        if isinstance(decision, d.CreateStream):
            walk.create(decision)
        elif isinstance(decision, d.Seal) and decision.final:
            walk.remove(decision.stream)
        elif isinstance(decision, d.Cut):
            known = marks.recent[-1:]
            marks.note(decision.high_watermark, decision.time, is_tick=decision.is_tick)
            for commit in decision.commits:
                left = commit.context.count
                while left:
                    logged = next(batches)
                    left -= logged[4].count
                    walk.batch(logged)
            if marks.recent[-1:] != known:
                walk.mark(decision.high_watermark, decision.time)
            walk.compare(decision.high_watermark)


class _WatermarkWalk:
    """Moves the clocks of all topics and the oracle along the log, side by side."""

    def __init__(self) -> None:
        self._strategy = BoundedOutOfOrderness(50 * MILLISECOND, idle_after_us=300 * MILLISECOND)
        self._topics: dict[LogStreamId, TopicId] = {}
        self._clocks: dict[TopicId, WatermarkClock] = {}
        self._oracles: dict[TopicId, SourceOracle] = {}
        self._reached = self._expected = -(2**63)

    def create(self, created: d.CreateStream) -> None:
        topic = self._topics[created.stream] = created.topic
        self._clocks.setdefault(topic, WatermarkClock()).add_stream(created.stream, self._strategy, created.time)
        oracle = self._oracles.setdefault(topic, SourceOracle(51 * MILLISECOND, 300 * MILLISECOND))
        oracle.streams[created.stream] = (None, created.time, False)
        oracle.created.add(created.stream)

    def remove(self, stream: LogStreamId) -> None:
        topic = self._topics[stream]
        self._clocks[topic].remove_stream(stream)
        del self._oracles[topic].streams[stream]
        self._oracles[topic].created.discard(stream)

    def batch(self, logged: LoggedBatch) -> None:
        glsn, stream, _, time, batch = logged
        topic = self._topics[stream]
        clock, oracle = self._clocks[topic], self._oracles[topic]
        if batch.kind is not BatchKind.DATA:
            clock.seen(stream, glsn, batch.count, time, None, batch.declared, idle=batch.idle)
            oracle.spoke(stream, None, time, is_idle=batch.idle)
            return
        times = event_times(batch)
        seen, expected = [], []
        for i, event_time in enumerate(times):
            is_last = i == len(times) - 1
            seen.append(clock.watermark)
            expected.append(oracle.watermark)
            declared, is_idle = (batch.declared, batch.idle) if is_last else (None, False)
            clock.seen(stream, GLSN(glsn + i), 1, time, event_time, declared, idle=is_idle)
            oracle.spoke(stream, event_time, time, is_idle=is_idle)
        if seen != expected:
            raise Violation("watermark", f"records from GLSN {glsn} saw {seen}, not {expected}")

    def mark(self, glsn: GLSN, time: CutTime) -> None:
        for topic, clock in self._clocks.items():
            clock.tick(glsn, time)
            self._oracles[topic].evaluate(time)

    def compare(self, glsn: GLSN) -> None:
        for topic, clock in self._clocks.items():
            if clock.watermark != self._oracles[topic].watermark:
                wanted = self._oracles[topic].watermark
                raise Violation("watermark", f"topic {topic}: {clock.watermark} at {glsn}, not {wanted}")
        self._reached = max(
            self._reached, watermark.combined((own.watermark, own.is_idle) for own in self._clocks.values())
        )
        heads = [oracle.watermark for oracle in self._oracles.values() if not oracle.is_idle]
        every = [oracle.watermark for oracle in self._oracles.values()]
        self._expected = max(self._expected, min(heads) if heads else max(every, default=-(2**63)))
        if self._reached != self._expected:
            raise Violation("watermark", f"all topics: {self._reached} at {glsn}, not {self._expected}")


class SourceOracle:
    """Computes the watermark of one source anew at every entry and mark: the minimum of maximum − lag over the
    streams that are not idle, or the maximum over all if all are idle. Streams: newest event time, last entry, whether
    that entry declares idleness. A stream that was created since the last evaluation keeps the source from being idle,
    unless it was sealed permanently meanwhile."""

    def __init__(self, lag_us: int, idle_after_us: int) -> None:
        self.lag_us, self.idle_after_us = lag_us, idle_after_us
        self.streams: dict[LogStreamId, tuple[int | None, int, bool]] = {}
        self.created: set[LogStreamId] = set()
        self.watermark = -(2**63)
        self._idle = True

    @property
    def is_idle(self) -> bool:
        return self._idle and not self.created

    def spoke(self, stream: LogStreamId, event_time: int | None, time: CutTime, *, is_idle: bool) -> None:
        newest = self.streams[stream][0]
        if event_time is not None:
            newest = event_time if newest is None else max(newest, event_time)
        self.streams[stream] = (newest, time, is_idle)
        self.evaluate(time)

    def evaluate(self, time: CutTime) -> None:
        streams = self.streams.values()
        active = [head for head, spoke, idle in streams if not idle and time - spoke <= self.idle_after_us]
        self._idle = not active
        self.created.clear()
        spoken = [head for head, _, _ in streams if head is not None]
        if active and None not in active:
            self.watermark = max(self.watermark, min(head for head in active if head is not None) - self.lag_us)
        elif not active and spoken:
            self.watermark = max(self.watermark, max(spoken) - self.lag_us)


def check_groups(log: SimLog, evidence: Evidence) -> None:
    """Each decided batch is in its topics exactly once, whole, by one cut, contiguous, from the parts of its first
    decision, in the order of its run; rows that were staged and not decided on are not in the log."""
    record = evidence.record
    found: dict[str, list[tuple[GLSN, LogStreamId, int, int]]] = {}
    for glsn, stream, _, _, batch in log.batches:
        op = record.op_of(batch)
        if op is not None and op.part:
            found.setdefault(op.part, []).append((glsn, stream, op.payload, batch.count))
    published = {(p.run, p.batch, p.topic): p for p in evidence.decisions if isinstance(p, d.GroupPublished)}
    decided: set[tuple[RunId, BatchNumber]] = set()
    ends: dict[tuple[RunId, TopicId], GLSN] = {}
    for decision in evidence.decisions:
        if not isinstance(decision, d.DecideBatch):
            continue
        if (decision.run, decision.batch) in decided:
            raise Violation("groups", f"batch {decision.batch} of run {decision.run} was decided twice")
        decided.add((decision.run, decision.batch))
        for plan in decision.groups:
            what = f"batch {decision.batch} of run {decision.run} for topic {plan.topic}"
            rows = sorted(item for part in plan.parts for item in found.pop(part.part, []))
            if record.stolen.intersection(part.part for part in plan.parts):
                if rows:
                    raise Violation("access", f"{what} is in the log, and its part was staged by another principal")
                continue
            if not rows:
                if plan.topic in log.state.topics:
                    raise Violation("groups", f"{what} was decided and is not in the log")
                continue
            payloads = [payload for part in plan.parts for payload in record.staged[part.part]]
            if any(part.ordered for part in plan.parts):
                payloads.sort(key=record.positions.__getitem__)
            _check_group(log, what, rows, payloads)
            told = published.get((decision.run, decision.batch, plan.topic))
            if told is not None and (told.glsn, told.count) != (rows[0][0], sum(count for *_, count in rows)):
                raise Violation("groups", f"{what} is at {rows[0]}, {told} was stored")
            if rows[0][0] <= ends.get((decision.run, plan.topic), 0):
                raise Violation("groups", f"{what} is before an earlier batch")
            ends[decision.run, plan.topic] = rows[-1][0]
    if found:
        raise Violation("groups", f"rows of {sorted(found)[:3]} were never decided on and are in the log")
    for answer in record.published:
        for group in answer.topics:
            told = published.get((answer.run, answer.batch, group.topic))
            if told is None or (told.glsn, told.count) != (group.glsn, group.count):
                raise Violation("groups", f"{answer} was answered, {told} is stored")


def check_names(log: SimLog, evidence: Evidence) -> None:
    """A new run begins under a name that has published only if it requests that: its output would be there twice."""
    names: dict[RunId, str] = {}
    newest: dict[str, RunId] = {}
    published: set[str] = set()
    decided: set[RunId] = set()
    for decision in evidence.decisions:
        if isinstance(decision, d.OpenRun) and decision.name and not decision.once:
            if decision.name in published and decision.key not in evidence.record.replays:
                raise Violation("names", f"{decision} begins anew under a name that has published, without a word")
            names[decision.run] = decision.name
            newest[decision.name] = decision.run
        elif isinstance(decision, d.RaiseRunEpoch):
            name = names[decision.run]
            later = {run for run, other in names.items() if other == name and run > decision.run}
            if later & decided:
                raise Violation("names", f"{decision} returns to a run after runs {sorted(later)} have published")
            newest[name] = decision.run
        elif (
            isinstance(decision, d.DecideBatch)
            and newest.get(names.get(decision.run, ""), decision.run) != decision.run
        ):
            raise Violation("names", f"{decision} was decided after another run had taken over the name")
        elif isinstance(decision, d.DecideBatch):
            decided.add(decision.run)
        elif isinstance(decision, d.GroupPublished) and decision.run in names:
            published.add(names[decision.run])


def _check_group(log: SimLog, what: str, rows: list[tuple[GLSN, LogStreamId, int, int]], payloads: list[int]) -> None:
    if [payload for _, _, payload, _ in rows] != payloads:
        raise Violation("groups", f"{what} should be {payloads}, the log has {rows}")
    stream = rows[0][1]
    for before, after in pairwise(rows):
        if after[:2] != (before[0] + before[3], stream):
            raise Violation("groups", f"{what} is not in one piece: {before}, {after}")
    first, last = rows[0][0], rows[-1][0] + rows[-1][3] - 1
    if not any(context.first_glsn <= first and last <= context.last_glsn for context in log.contexts[stream]):
        raise Violation("groups", f"{what} was committed by several cuts")


CHECKS: dict[str, Callable[[SimLog, Evidence], None]] = {
    "1 unique": check_unique,
    "2 dense": check_dense,
    "3 durable": check_durable,
    "4 no phantom": check_no_phantom,
    "5 real time": check_real_time,
    "6 tail": check_tail,
    "7 subscribe": check_subscribe,
    "8 producer order": check_producer_order,
    "9 exactly once": check_exactly_once,
    "9 fenced": check_fenced,
    "10 trim": check_trim,
    "11 sealed": check_sealed,
    "groups": check_groups,
    "names": check_names,
    "watermark": check_watermark,
}
"""Replaying the decisions checks 12 (``SimLog``); 13 to 16 need the running cluster, see ``cluster.py``."""


def check_all(evidence: Evidence) -> SimLog:
    log = SimLog(evidence)
    for check in CHECKS.values():
        check(log, evidence)
    return log
