"""Plans the next step for a log stream that needs repair: pure planning, no decisions, no messages.

The leader plans again after every change, and now and then besides. Every plan follows from the present state alone, so
a lost message or a new leader needs no special case. A plan always gives its reason, even when it is to wait.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from cutwater.core.order.history import CommitHistory
from cutwater.core.order.state import LogStream
from cutwater.core.text import counted, hold, nodes_in_words, seconds
from cutwater.types import ReplicaState, StorageNodeId, UncommitReport

ADMIT_LAG_RECORDS = 1_000
"""A learner that is at most this many records behind is admitted by a short seal."""


class RepairPlan(Struct, frozen=True):
    """The next step for one stream.

    ``chain``: open the sealed stream on these nodes. ``learners``: pairs of a learner and the source that it copies
    from. ``admit``: seal the open stream briefly so that these learners can join. ``leave``: seal it briefly so that
    this surplus member can leave. ``why``: what the stream waits for, or why the leader acts. Operators read it as the
    next step, and as the reason of the decision if there is one.
    """

    why: str
    chain: tuple[StorageNodeId, ...] = ()
    learners: tuple[tuple[StorageNodeId, StorageNodeId], ...] = ()
    admit: tuple[StorageNodeId, ...] = ()
    leave: StorageNodeId | None = None


class StreamView(Struct, frozen=True):
    """A stream, and what the leader sees of its replicas. ``fallback``: alive and with room to write. ``usable``: the
    same, and not avoided at the moment because of a failed link."""

    stream: LogStream
    history: CommitHistory
    report: Callable[[StorageNodeId], UncommitReport | None]
    alive: Callable[[StorageNodeId], bool]
    usable: Callable[[StorageNodeId], bool]
    fallback: Callable[[StorageNodeId], bool]
    invalid: Callable[[StorageNodeId], bool]
    is_unheard: Callable[[StorageNodeId], bool]
    """Whether the node counts as alive although this leader has not heard of it yet."""
    replace_after_us: int
    """How long a dead node keeps its place, if another can take it."""
    turn: int
    """Counts attempts, so that a learner whose source does not answer gets another source."""


def is_ready(stream: LogStream, report: UncommitReport | None) -> bool:
    """Whether the replica is sealed exactly where the stream is, on disk."""
    return (
        report is not None
        and report.state is ReplicaState.SEALED
        and report.epoch == stream.epoch
        and report.committed_end == report.durable_end == stream.committed_end
    )


def must_learn(view: StreamView, report: UncommitReport) -> bool:
    """Whether commits alone cannot bring the replica to the committed end: it lacks entries, or ranges are
    forgotten."""
    return report.durable_end < view.stream.committed_end or view.history.after(report.committed_end) is None


def plan_sealed(view: StreamView, *, min_replication: int, patient: bool, wanted: int) -> RepairPlan:
    """Open the stream again on all replicas that hold everything, once waiting for the others is pointless. Use at most
    ``wanted`` of them, in case a spare node was added."""
    stream = view.stream
    sources = [node for node in stream.replicas if view.alive(node) and is_ready(stream, view.report(node))]
    ready = tuple(node for node in sources if view.usable(node))
    if len(ready) < min_replication:
        ready = tuple(node for node in sources if view.fallback(node))
    ready = ready[:wanted]
    coming = [node for node in stream.replicas if node not in ready and (view.usable(node) or view.is_unheard(node))]
    # A replaced replica is needed only as long as too few others are complete.
    awaited = [node for node in coming if node not in stream.leaving or len(ready) < wanted]
    staying = [node for node in ready if node not in stream.leaving]
    learners = _learners(view, coming, sources)
    others = _told(view, [node for node in stream.replicas if node not in ready])
    if stream.final:
        return RepairPlan("it takes no more appends; its records stay readable" + others, learners=learners)
    if stream.held:
        return RepairPlan(
            f"`cutwater stream unseal {stream.stream}` lets it take appends again{others}", learners=learners
        )
    if len(ready) < max(1, min_replication):
        return RepairPlan(
            f"it opens when {max(1, min_replication)} of its replicas hold every record and can be used, now "
            f"{len(ready)} do{others}",
            learners=learners,
        )
    if awaited and patient and len(staying) < wanted:
        return RepairPlan(f"it waits a moment for {nodes_in_words(awaited)}{others}", learners=learners)
    return RepairPlan(f"{hold(ready)} every record{others}", chain=ready, learners=learners)


def plan_open(view: StreamView, *, admit: bool, wanted: int) -> RepairPlan:
    """Bring the replicas that are not members close to the end, then admit them. A replaced one is admitted only while
    there are too few members, and a replaced member counts as a copy until it leaves."""
    stream = view.stream
    missing = [node for node in stream.replicas if node not in stream.members]
    needed = missing if len(stream.members) < wanted else [node for node in missing if node not in stream.leaving]
    absent = [node for node in needed if view.usable(node)]
    sources = [node for node in stream.members if view.alive(node)]
    close: list[StorageNodeId] = []
    for node in absent:
        report = view.report(node)
        if report is not None and report.state is ReplicaState.SEALING and report.epoch == stream.epoch:
            lag = stream.committed_end - report.committed_end
            if lag <= ADMIT_LAG_RECORDS and report.durable_end == report.committed_end:
                close.append(node)
    far = [node for node in absent if node not in close]
    learners = _learners(view, far, sources)
    if close and admit and len(stream.staying) < wanted:
        return RepairPlan(
            f"it is sealed for a moment to let {nodes_in_words(close)} in", learners=learners, admit=tuple(close)
        )
    if len(stream.members) > wanted:
        return _plan_fewer(view, admit=admit, wanted=wanted)
    return RepairPlan("it takes appends meanwhile" + _told(view, missing), learners=learners)


def _plan_fewer(view: StreamView, *, admit: bool, wanted: int) -> RepairPlan:
    """Let a surplus member leave, the last of the chain, if all members run and have every record. Members that were
    replaced come last, so they leave first."""
    stream = view.stream
    unfit = [node for node in stream.members if not view.usable(node) or not _runs(view, node)]
    copies = "one copy is wanted" if wanted == 1 else f"{wanted} copies are wanted"
    if unfit:
        return RepairPlan(f"{copies}, and one leaves when all members run; {nodes_in_words(unfit)} cannot be used now")
    if not admit:
        return RepairPlan(f"{copies}, and storage node {stream.members[-1]} leaves soon")
    last = stream.members[-1]
    return RepairPlan(f"it is sealed for a moment to let storage node {last} go: {copies}", leave=last)


def _runs(view: StreamView, node: StorageNodeId) -> bool:
    """Whether the member takes part in the present epoch and has everything that is committed."""
    report, stream = view.report(node), view.stream
    return (
        report is not None
        and report.state is ReplicaState.RUNNING
        and report.epoch == stream.epoch
        and report.durable_end >= stream.committed_end
    )


def _told(view: StreamView, nodes: list[StorageNodeId]) -> str:
    """Describe what keeps each of these replicas from being a member, and what follows, as the end of a sentence."""
    return "".join(f"; storage node {node} {_tell(view, node)}" for node in sorted(nodes))


def _tell(view: StreamView, node: StorageNodeId) -> str:
    stream, report = view.stream, view.report(node)
    if node in stream.leaving:
        trouble = "" if view.alive(node) else "is dead, "
        if view.invalid(node):
            trouble = "has damaged data there, "
        return f"{trouble}was replaced and leaves when enough others hold every record"
    if not view.alive(node):
        return (
            "is dead: it joins again when it is back, and another one takes its place after "
            f"{seconds(view.replace_after_us)} of silence, if there is one"
        )
    if view.is_unheard(node):
        return "has yet to report to this leader"
    if view.invalid(node):
        if stream.replicas == (node,):
            return "has damaged data there, and no other storage node holds a copy: it goes on when that is restored"
        return "has damaged data there and copies a peer's"
    if report is None:
        return "has yet to say what it has"
    if not view.fallback(node):
        return "has no room left: it joins again when there is room on its volumes"
    if not view.usable(node):
        return "could not be reached by another node or a client: it is tried again soon"
    lag = stream.committed_end - report.committed_end
    if report.state is ReplicaState.LEARNING or must_learn(view, report):
        return f"copies what it lacks from a peer ({counted(lag, 'record')} so far), and joins then"
    return f"is {counted(lag, 'record')} behind and joins soon" if lag else "joins soon"


def _learners(
    view: StreamView, nodes: list[StorageNodeId], sources: list[StorageNodeId]
) -> tuple[tuple[StorageNodeId, StorageNodeId], ...]:
    pairs = []
    for node in nodes:
        others = [source for source in sources if source != node]
        if not others:
            continue
        report = view.report(node)
        if report is None:
            wanted = view.invalid(node)
        else:
            # A replica of an older epoch must first hear that the stream went on: the answer to its next report says
            # so.
            wanted = report.epoch == view.stream.epoch and must_learn(view, report)
            wanted = wanted or report.state is ReplicaState.LEARNING
        if wanted:
            pairs.append((node, others[view.turn % len(others)]))
    return tuple(pairs)
