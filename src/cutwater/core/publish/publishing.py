"""The leader's part in publishing: it sends decided groups to storage nodes until every group is in the log.

Nothing here has to survive the leader: the next leader finds the decided groups in the state and sends them again. The
leader makes a decision when a group is in the log, and when a sealed log stream certainly does not hold the group.
Until then it repeats its message.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, Struct, structs

from cutwater.core.messages import GroupOutcome, GroupState, PublishGroup
from cutwater.core.order import decisions as d
from cutwater.core.order.events import Asked, RequestId, Send
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.planning.cluster_view import Outlook
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.publish.run_requests import open_streams
from cutwater.core.publish.runs import Group, RunState
from cutwater.core.requests import GroupDescription, PublishRequest, RunDescription
from cutwater.types import BatchNumber, Epoch, Instant, LogStreamId, RunId, TopicId

DESCRIBED_RUNS_MAX = 1_000
PROBLEMS_MAX = 16
"""The pause between attempts stops growing after this many problems, for any value of the options."""

Key = tuple[RunId, BatchNumber, TopicId]


class _Told(Struct, frozen=True):
    """Where and when a group was last sent: the log stream, its epoch and the time."""

    stream: LogStreamId
    epoch: Epoch
    at: int
    changed: bool = False
    """Whether the group was sent to another log stream, or in another epoch, before."""
    problems: int = 0
    """Number of attempts so far that ended with a problem."""
    has_failed: bool = False
    """Whether the current attempt ended with a problem."""


class Publisher:
    """Tracks, for one leader, the groups that are being published and the requests that wait for them."""

    def __init__(self, state: OrderState, book: ReportBook, options: OrderOptions) -> None:
        self._state, self._book, self._options = state, book, options
        self._told: dict[Key, _Told] = {}
        self._outcomes: dict[Key, GroupOutcome] = {}
        """Outcomes that storage nodes sent and that no decision covers yet."""
        self._why: dict[Key, str] = {}
        self._waiting: dict[RequestId, Asked] = {}
        """Requests that wait for a batch."""
        self._until: dict[RequestId, int] = {}
        """Deadline of each request. A request that is being evaluated again keeps its deadline."""

    @property
    def is_busy(self) -> bool:
        """Whether any group is in progress. If not, ``messages`` and ``decide`` yield nothing."""
        return bool(self._state.runs.unfinished or self._told or self._why or self._outcomes)

    # Waiting requests.

    def wait(self, asked: Asked, now: Instant) -> bool:
        """Keep a request that has no answer yet. Return False if too many requests wait already."""
        if len(self._waiting) >= self._options.requests_max:
            return False
        self._waiting[asked.request_id] = asked
        self._until.setdefault(asked.request_id, now.monotonic + self._options.publish_wait_us)
        return True

    def take_ready(self, decision: d.Decision) -> list[Asked]:
        """Remove and return the requests that this decision may answer. The leader evaluates them again."""
        if isinstance(decision, (d.DeleteTopic, d.OpenRun, d.RaiseRunEpoch, d.DropRun)):
            # A group may no longer need to be published, or a run may be over.
            return self.take_waiting()
        if not isinstance(decision, d.GroupPublished):
            return []
        ready = [asked for asked in self._waiting.values() if _run_of(asked) == decision.run]
        for asked in ready:
            del self._waiting[asked.request_id]
        return ready

    def take_overdue(self, now: Instant) -> list[tuple[Asked, str]]:
        """Remove the requests whose deadline has passed. Return each with the reason why it waited."""
        late = [request for request, until in self._until.items() if now.monotonic >= until]
        for request in late:
            del self._until[request]
        overdue = [self._waiting.pop(request) for request in late if request in self._waiting]
        return [(asked, self._explain(asked)) for asked in overdue]

    def take_waiting(self) -> list[Asked]:
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def _explain(self, asked: Asked) -> str:
        run = self._state.runs.get(_run_of(asked))
        if run is None or not run.unpublished:
            return "it was just published"
        groups = "; ".join(f"log stream {group.stream}: {self._reason(run, group)}" for group in run.unpublished)
        return f"batch {run.batch} of run {run.run} is decided, but not in the log yet ({groups})"

    # Outcomes from storage nodes.

    def take(self, outcome: GroupOutcome) -> None:
        stream = self._state.streams.get(outcome.stream)
        run = self._state.runs.get(outcome.run)
        group = run.group(stream.topic) if run is not None and stream is not None else None
        if run is None or stream is None or group is None or run.batch != outcome.batch or group.is_published:
            return
        if outcome.node not in stream.replicas:
            # The node holds no replica of this log stream.
            return
        if group.stream != outcome.stream:
            # The group was moved to another log stream since. An outcome from the sealed one says nothing new.
            return
        key = (run.run, run.batch, group.topic)
        if outcome.state is GroupState.PROBLEM:
            self._why[key] = f"storage node {outcome.node} cannot publish it: {outcome.problem}"
            told = self._told.get(key)
            if told is not None and not told.has_failed and told.epoch == outcome.epoch:
                self._told[key] = structs.replace(told, problems=told.problems + 1, has_failed=True)
        else:
            self._outcomes[key] = outcome

    def decide(self, now: Instant, outlook: Outlook) -> Iterator[d.Decision]:
        """Yield the decisions that follow from the outcomes. The caller applies each one before it asks for the
        next."""
        for key, outcome in list(self._outcomes.items()):
            run = self._state.runs.get(key[0])
            group = run.group(key[2]) if run is not None and run.batch == key[1] else None
            if group is None or group.is_published or group.stream != outcome.stream:
                del self._outcomes[key]
            elif outcome.state is GroupState.PUBLISHED:
                del self._outcomes[key]
                if outcome.glsn + outcome.count - 1 <= self._state.high_watermark and outcome.count == group.rows:
                    yield d.GroupPublished(*key, outcome.glsn, outcome.count)
            else:
                yield from self._decide_move(key, group, outcome, now, outlook)

    def _decide_move(
        self, key: Key, group: Group, outcome: GroupOutcome, now: Instant, outlook: Outlook
    ) -> Iterator[d.Decision]:
        """Move a group that its sealed log stream does not hold.

        The stream cannot receive the group while it is sealed. Messages of that epoch that are still in transit are
        refused once the stream opens in the next epoch.
        """
        stream = self._state.streams[group.stream]
        if stream.is_open or stream.epoch != outcome.epoch:
            del self._outcomes[key]
            return
        targets = open_streams(self._state, group.topic)
        if self._is_lost(stream, now, outlook) and targets:
            del self._outcomes[key]
            reason = f"log stream {stream.stream} is sealed without it: {stream.reason}"
            yield d.MoveGroup(*key, targets[key[1] % len(targets)], reason)

    def _is_lost(self, stream: LogStream, now: Instant, outlook: Outlook) -> bool:
        """Whether it is pointless to wait for the stream to open."""
        return not stream.is_open and (stream.final or stream.held or outlook.is_given_up(stream, now))

    # Messages to storage nodes.

    def messages(self, now: Instant, outlook: Outlook) -> Iterator[Send]:
        """Yield the messages that are due. Everything in the state must be stored before."""
        publishing = self._state.runs.publishing
        keys = {(run.run, run.batch, group.topic) for run in publishing for group in run.unpublished}
        for known in (self._told, self._why, self._outcomes):
            for key in known.keys() - keys:
                del known[key]
        for run in publishing:
            for group in run.unpublished:
                yield from self._publish(run, group, now, outlook)

    def _publish(self, run: RunState, group: Group, now: Instant, outlook: Outlook) -> Iterator[Send]:
        key, stream = (run.run, run.batch, group.topic), self._state.streams[group.stream]
        told = self._told.get(key)
        if told is not None and now.monotonic < told.at + self._pause_us(told, stream):
            return
        if stream.is_open:
            head = stream.members[0]
            nodes = [head] if self._book.is_running(stream, head) else []
        else:
            # Every replica that is sealed at the end of the epoch knows whether it holds the group.
            nodes = list(stream.members) if self._is_lost(stream, now, outlook) else []
        if not nodes:
            return
        self._told[key] = _Told(
            stream.stream,
            stream.epoch,
            now.monotonic,
            changed=told is not None and (told.changed or _is_elsewhere(told, stream)),
            problems=told.problems if told is not None else 0,
        )
        message = PublishGroup(
            stream.stream,
            stream.epoch,
            run.run,
            run.batch,
            group.topic,
            group.parts,
            group.rows,
            run.decided,
            self._state.runs.oldest(group.topic),
            group.publisher,
            run.job_epoch,
            UNSET if run.name or run.opener == group.publisher else run.opener,
        )
        for node in nodes:
            yield Send(node, message)

    def _pause_us(self, told: _Told, stream: LogStream) -> int:
        """Return how long to wait after a group was sent before sending it again.

        A log stream that was reopened gets the group at once, but only the first time: this very group may be the
        reason why the stream is sealed again and again.
        """
        again = self._options.publish_again_us
        if not stream.is_open:
            # This message only asks whether the replica holds the group.
            return again
        if _is_elsewhere(told, stream) and not told.changed and not told.problems:
            return 0
        return min(again << min(told.problems, PROBLEMS_MAX), max(again, self._options.retry_us_max))

    # For operators.

    def describe(self) -> tuple[RunDescription, ...]:
        known = list(self._state.runs)
        # A starting query asks how far the output of its name has come. So for each name, always include the run that
        # holds it and the last run that has published, even if that run is over.
        published = {run.name: run.run for run in known if run.name and not run.once and run.batch >= 0}
        runs = [
            run
            for run in known[:-DESCRIBED_RUNS_MAX]
            if run.name and not run.once and (not run.fenced_by or published.get(run.name) == run.run)
        ]
        runs += known[-DESCRIBED_RUNS_MAX:]
        return tuple(
            RunDescription(
                run.run,
                run.name,
                run.key,
                run.generation,
                run.batch,
                run.fenced_by,
                tuple(self._describe_group(run, group) for group in run.unpublished),
                run.decided,
                run.published,
                run.job_epoch,
                run.input,
            )
            for run in runs
        )

    def _describe_group(self, run: RunState, group: Group) -> GroupDescription:
        topic = self._state.topics[group.topic].name
        return GroupDescription(topic, group.stream, group.rows, len(group.parts), self._reason(run, group))

    def _reason(self, run: RunState, group: Group) -> str:
        why = self._why.get((run.run, run.batch, group.topic))
        stream = self._state.streams[group.stream]
        if not stream.is_open:
            return f"the log stream is sealed ({stream.reason})" + (f"; before, {why}" if why else "")
        return why or f"storage node {stream.members[0]} is appending it"


def _is_elsewhere(told: _Told, stream: LogStream) -> bool:
    return (told.stream, told.epoch) != (stream.stream, stream.epoch)


def _run_of(asked: Asked) -> RunId:
    assert isinstance(asked.request, PublishRequest)
    return asked.request.run
