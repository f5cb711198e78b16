"""Turns a request into the decisions that carry it out, after validating it against the state of the cluster."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, Struct, UnsetType, structs

from cutwater.core import requests as r
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_handling import decide_access
from cutwater.core.access.access_requests import AccessRequest
from cutwater.core.audit.audit_requests import AuditRequest
from cutwater.core.jobs.job_requests import JobRequest
from cutwater.core.jobs.leading.job_desk import JobOutcome
from cutwater.core.names import check_name, check_not_reserved, check_topic_name
from cutwater.core.order import decisions as d
from cutwater.core.order.audit_handling import check_audit, check_producer, decide_audit
from cutwater.core.order.internal_topic_requests import internal_in_words, make_internal_topics, make_job_topic
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.planning.placement import loads, place
from cutwater.core.order.program_trims import check_program_trim, is_of_programs
from cutwater.core.order.state import LogStream, Node, OrderState, ProducerState, TopicState
from cutwater.core.publish.run_requests import Outcome, drop_run, forget_output, open_run, publish, staged
from cutwater.core.text import counted
from cutwater.errors import (
    AlreadyExists,
    InvalidArgument,
    LastCopy,
    NotFound,
    NotSealed,
    ProducerFenced,
    Refused,
    Unavailable,
    WrongIdentity,
)
from cutwater.types import (
    GLSN,
    REPLICATION_DEFAULT,
    SECOND,
    CutTime,
    DecisionIndex,
    LogStreamId,
    Part,
    ProducerEpoch,
    Retention,
    Sequence,
    StorageNodeId,
    TopicId,
)

STREAMS_PER_TOPIC_MAX = 1_024
REPLICATION_MAX = 64
"""The largest number of copies that a topic may be changed to. It may exceed the number of storage nodes."""
PRODUCERS_PER_TOPIC_MAX = 10_000
"""The metadata repository remembers every producer, and so do the replicas of its log stream, with its last batches."""
MARKS_MAX = 100_000
SCHEMA_BYTES_MAX = 64 * 1024
AHEAD_US_MAX = 1_000 * 365 * 86_400 * SECOND


class Surroundings(Struct, frozen=True):
    """What the leader sees of the nodes, as far as requests need it, and the time. ``origin`` is the principal whose
    request it is, if the servers know it."""

    usable: Callable[[StorageNodeId], bool]
    ready: Callable[[LogStream, StorageNodeId], bool]
    describe: Callable[[], r.Description]
    time: CutTime
    staged_expire_after_us: int = 3_600 * SECOND
    origin: RequestOrigin | None = None
    jobs: Callable[[JobRequest, CutTime, RequestOrigin | None], JobOutcome] | None = None
    """Decides a request about jobs. The leader's own memory is part of that."""


def decide(request: r.Request, state: OrderState, around: Surroundings) -> Outcome:
    """Return the decisions, and the answer to give once they are stored. Raise if the request cannot be carried out.
    The answer is None if the request has to wait for something else to happen first."""
    check_audit(request, state, around.origin)
    if isinstance(request, AuditRequest):
        return decide_audit(request, state)
    if isinstance(request, AccessRequest):
        return decide_access(request, state.access, around.time, around.origin)
    if isinstance(request, JobRequest):
        assert around.jobs is not None
        return around.jobs(request, around.time, around.origin)
    match request:
        case r.FoundClusterRequest():
            return ((), r.Done()) if state.cluster_key else ((d.FoundCluster(request.cluster, request.key),), r.Done())
        case r.AddNodeRequest():
            return _add_node(request, state)
        case r.JoinRequest():
            if request.node not in state.nodes:
                return (), r.Joined(known=False)
            return _join(request, state), r.Joined(known=True)
        case r.RemoveNodeRequest():
            return _remove_node(request, state, around)
        case r.CreateTopicRequest():
            return _create_topic(request, state, around)
        case r.ChangeTopicRequest():
            return _change_topic(request, state)
        case r.DeleteTopicRequest():
            return _delete_topic(request, state)
        case r.AddStreamRequest():
            return _add_stream(request, state, around)
        case r.SealRequest():
            return _seal(request, state)
        case r.UnsealRequest():
            stream = _stream(state, request.stream)
            if stream.final:
                raise Refused(f"log stream {request.stream} is sealed for good: create another one")
            return ((d.Release(request.stream),) if stream.held else (), r.Done())
        case r.ReplaceRequest():
            return _replace(request, state, around)
        case r.LearnRequest():
            return _learn(request, state)
        case r.TrimRequest():
            return _trim(request, state)
        case r.OpenProducerRequest():
            check_producer(request, around.origin)
            return _open_producer(request, state)
        case r.MoveProducerRequest():
            return _move_producer(request, state)
        case r.RenewProducerRequest():
            return _renew_producer(request, state)
        case r.CommitCursorRequest():
            check_name("cursor", request.cursor)
            if request.glsn > state.high_watermark:
                raise InvalidArgument(f"cursor at GLSN {request.glsn}, but the log ends at {state.high_watermark}")
            return (d.CommitCursor(request.cursor, request.glsn),), r.Done()
        case r.ReadCursorRequest():
            return (), r.CursorAt(state.cursors.get(request.cursor))
        case r.DropCursorRequest():
            return ((d.DropCursor(request.cursor),) if request.cursor in state.cursors else (), r.Done())
        case r.OpenRunRequest():
            return open_run(request, state)
        case r.PublishRequest():
            return publish(request, state)
        case r.DropRunRequest():
            return drop_run(request, state)
        case r.ForgetOutputRequest():
            return forget_output(request, state)
        case r.StagedRequest():
            return staged(request, state, around.staged_expire_after_us)
        case r.CatalogRequest():
            return (), catalog(state)
        case r.ClockRequest():
            return (), _clock_marks(request, state)
        case r.EventsRequest():
            events = tuple(event for event in state.events if event.index > request.after)
            return (), r.Events(events, state.events[0].index if state.events else DecisionIndex(0))
        case r.DescribeRequest():
            return (), around.describe()
        case r.MakeInternalTopicsRequest():
            return make_internal_topics(request, state, around.usable, around.time)
        case r.MakeJobTopicRequest():
            return make_job_topic(request, state, around.usable, around.time)


def catalog(state: OrderState) -> r.Catalog:
    """Return what clients may know of the cluster."""
    return r.Catalog(
        revision=state.revision,
        high_watermark=state.high_watermark,
        cut_time=state.cut_time,
        topics=tuple(r.TopicInfo(**structs.asdict(topic)) for topic in state.topics.values()),
        nodes=tuple(r.NodeInfo(node.node, node.address) for node in state.nodes.values()),
        streams=tuple(
            r.StreamInfo(
                s.stream,
                s.topic,
                s.epoch,
                s.is_open,
                s.final,
                s.members,
                s.replicas,
                s.committed_end,
                s.last_glsn,
                s.created_at,
                s.created_time,
                s.final_at,
                s.start,
            )
            for s in state.streams.values()
        ),
    )


def _clock_marks(request: r.ClockRequest, state: OrderState) -> r.ClockMarks:
    if not 1 <= request.limit <= MARKS_MAX:
        raise InvalidArgument(f"ask for 1 to {MARKS_MAX} marks at once, not {request.limit}")
    marks = tuple(state.clock.marks(request.after, request.limit))
    through = marks[-1].glsn if len(marks) == request.limit else state.high_watermark
    return r.ClockMarks(marks, through)


def _topic(state: OrderState, name: str) -> TopicState:
    topic = state.topic_named(name)
    if topic is None:
        if state.access.mode is not AccessMode.OFF:
            # The caller may not be allowed to know of the others.
            raise NotFound(f"there is no topic {name!r}")
        names = ", ".join(sorted(t.name for t in state.topics.values() if not t.is_internal)) or "none"
        raise NotFound(f"there is no topic {name!r}; topics: {names}")
    return topic


def _stream(state: OrderState, stream: LogStreamId) -> LogStream:
    found = state.streams.get(stream)
    if found is None:
        raise NotFound(f"there is no log stream {stream}")
    return found


def _place(
    state: OrderState, around: Surroundings, extra: dict[StorageNodeId, int], n: int
) -> tuple[StorageNodeId, ...]:
    load = {node: count + extra.get(node, 0) for node, count in loads(state, around.usable).items()}
    nodes = place(load, n)
    if nodes is None:
        raise Unavailable(
            f"replication {n} needs {n} storage nodes, but only {len(load)} can be used: add some, or restart them"
        )
    for node in nodes:
        extra[node] = extra.get(node, 0) + 1
    return nodes


def _create_topic(request: r.CreateTopicRequest, state: OrderState, around: Surroundings) -> Outcome:
    check_topic_name(request.name)
    if request.replication < 1:
        raise InvalidArgument(f"replication is at least 1, not {request.replication}")
    _check_settings(request.streams, request.retention, request.schema, request.event_time_ahead_us)
    if state.topic_named(request.name) is not None:
        raise AlreadyExists(
            f"topic {request.name!r} exists already: use it as it is (exist_ok, or --exist-ok, does that), or choose "
            "another name"
        )
    check_not_reserved(request.name)
    replication = request.replication
    if request.is_replication_usual:
        replication = max(1, min(REPLICATION_DEFAULT, sum(node.is_alive for node in around.describe().nodes)))
    topic = TopicId(state.last_topic + 1)
    extra: dict[StorageNodeId, int] = {}
    streams = tuple(
        d.CreateStream(
            LogStreamId(state.last_stream + 1 + i),
            topic,
            _rotate(_place(state, around, extra, replication), i),
            state.high_watermark,
            around.time,
        )
        for i in range(request.streams)
    )
    created = r.Created(topic, tuple(s.stream for s in streams))
    create = d.CreateTopic(
        topic,
        request.name,
        replication,
        request.streams,
        request.schema,
        request.event_time,
        request.retention,
        request.event_time_ahead_us,
    )
    return (create, *streams), created


def _change_topic(request: r.ChangeTopicRequest, state: OrderState) -> Outcome:
    topic = _topic(state, request.name)
    if topic.is_internal and (request.streams is not None or request.schema):
        raise Refused(
            f"{internal_in_words(topic)}: its log streams and its schema stay; change its retention or replication"
        )
    streams = topic.streams if request.streams is None else request.streams
    retention = topic.retention if request.retention is None else request.retention
    schema = b"" if request.schema in topic.schemas else request.schema
    ahead_us = request.event_time_ahead_us
    replication = topic.replication if isinstance(request.replication, UnsetType) else request.replication
    _check_settings(streams, retention, schema, ahead_us or 0)
    if not 1 <= replication <= REPLICATION_MAX and replication != topic.replication:
        raise InvalidArgument(f"replication is 1 to {REPLICATION_MAX}, not {replication}")
    if schema and not topic.schemas:
        raise Refused(f"topic {topic.name!r} has records of key and value: it cannot get a schema; create another one")
    if schema and request.schema_after != len(topic.schemas):
        raise Refused(f"the schema of topic {topic.name!r} was changed by another client: fetch it and try again")
    seals = () if request.streams is None else _seal_surplus(state, topic, streams)
    is_ahead_same = ahead_us in (None, topic.event_time_ahead_us)
    present = (topic.streams, topic.retention, b"", topic.replication)
    if (streams, retention, schema, replication) == present and is_ahead_same:
        return seals, r.Done()
    changed = UNSET if replication == topic.replication else replication
    return (d.ChangeTopic(topic.topic, streams, retention, schema, ahead_us, changed), *seals), r.Done()


def _seal_surplus(state: OrderState, topic: TopicState, wanted: int) -> tuple[d.Seal, ...]:
    """Seal surplus log streams permanently. First come sealed streams, and among these the ones that an operator holds,
    as the others open by themselves. Then come the newest open ones."""
    live = [s for s in state.streams_of(topic.topic) if not s.final]
    live.sort(key=lambda stream: (not stream.is_open, stream.held, stream.stream))
    reason = f"topic {topic.name!r} shall have {counted(wanted, 'log stream')}"
    return tuple(d.Seal(s.stream, s.epoch, s.committed_end, s.members, reason, final=True) for s in live[wanted:])


def _check_settings(streams: int, retention: Retention, schema: bytes, ahead_us: int) -> None:
    if not 1 <= streams <= STREAMS_PER_TOPIC_MAX:
        raise InvalidArgument(f"a topic has 1 to {STREAMS_PER_TOPIC_MAX} log streams, not {streams}")
    if retention.time_us < 0 or retention.bytes < 0:
        raise InvalidArgument(f"retention is 0 (without bound) or more, not {retention}")
    if len(schema) > SCHEMA_BYTES_MAX:
        raise InvalidArgument(f"a schema has at most {SCHEMA_BYTES_MAX} bytes, not {len(schema)}: use fewer columns")
    if not 0 <= ahead_us <= AHEAD_US_MAX:
        raise InvalidArgument(
            f"how far event times may be ahead is 0 (without bound) to {AHEAD_US_MAX} microseconds, not {ahead_us}"
        )


def _add_node(request: r.AddNodeRequest, state: OrderState) -> Outcome:
    """Add a node. A known node keeps its address: only the node itself, which can prove its identity, changes it."""
    known = state.nodes.get(request.node)
    if known is None:
        new = d.AddNode(request.node, request.address, request.key, request.volumes, request.server_key)
        return (new,), r.Done()
    renews = request.renews and request.server_key not in ("", known.server_key) and known.key == request.key != ""
    _check_keys(known, request.key, "" if renews else request.server_key)
    if known.address and request.address not in ("", known.address):
        raise Refused(
            f"storage node {known.node} belongs to the cluster already and listens at {known.address}: a node that was "
            "moved says so itself, when it is started elsewhere with its volumes; one that is lost is removed first"
        )
    node = Node(
        known.node,
        known.address or request.address,
        known.key or request.key,
        known.volumes or request.volumes,
        request.server_key if renews else known.server_key or request.server_key,
    )
    changed = d.AddNode(node.node, node.address, node.key, node.volumes, node.server_key, renews=renews)
    return ((), r.Done()) if known == node else ((changed,), r.Done())


def _join(request: r.JoinRequest, state: OrderState) -> tuple[d.AddNode, ...]:
    known = state.nodes[request.node]
    _check_keys(known, request.key, request.server_key)
    if known.server_key and not request.server_key:
        raise WrongIdentity(f"storage node {known.node} has not proved that it is this node")
    if not known.server_key and request.asked_at != (known.address or None):
        # The node was added, or added again elsewhere, while its key was fetched.
        raise Unavailable(
            f"storage node {known.node} was added to the cluster a moment ago, and its key was not yet fetched from "
            f"{known.address or 'its address'}: ask again"
        )
    node = Node(known.node, request.address, request.key or known.key, request.volumes, request.server_key)
    return () if known == node else (d.AddNode(*structs.astuple(node)),)


def _check_keys(known: Node, key: str, server_key: str) -> None:
    if (known.key and key and known.key != key) or (known.server_key and server_key and known.server_key != server_key):
        raise WrongIdentity(
            f"storage node {known.node} of this cluster has another key: this one has its number but not its data. "
            "Start it with the volumes it had, or with another --id"
        )


def _learn(request: r.LearnRequest, state: OrderState) -> Outcome:
    stream = _stream(state, request.stream)
    if request.node not in stream.replicas:
        raise InvalidArgument(f"storage node {request.node} is not a replica of log stream {request.stream}")
    if request.node in stream.members:
        raise Refused(f"the replica of log stream {request.stream} on storage node {request.node} is complete already")
    return (), r.Done()


def _rotate(nodes: tuple[StorageNodeId, ...], by: int) -> tuple[StorageNodeId, ...]:
    """Rotate the nodes, so that every node becomes the head of some streams: heads do a little more work."""
    by %= len(nodes)
    return nodes[by:] + nodes[:by]


def _add_stream(request: r.AddStreamRequest, state: OrderState, around: Surroundings) -> Outcome:
    topic = _topic(state, request.topic)
    if topic.is_internal:
        raise Refused(f"{internal_in_words(topic)}, with one log stream")
    live = sum(1 for s in state.streams_of(topic.topic) if not s.final)
    if live >= STREAMS_PER_TOPIC_MAX:
        raise Refused(f"topic {request.topic!r} has {live} log streams already, {STREAMS_PER_TOPIC_MAX} is the most")
    stream = LogStreamId(state.last_stream + 1)
    nodes = _rotate(_place(state, around, {}, min(topic.replication, max(1, len(state.nodes)))), stream)
    create = d.CreateStream(stream, topic.topic, nodes, state.high_watermark, around.time, "asked for by an operator")
    change = d.ChangeTopic(topic.topic, topic.streams + 1, topic.retention)
    return (change, create), r.Created(topic.topic, (stream,))


def _delete_topic(request: r.DeleteTopicRequest, state: OrderState) -> Outcome:
    topic = _topic(state, request.name)
    if topic.is_internal:
        raise Refused(f"{internal_in_words(topic)} and would make it again; `cutwater topic trim` removes old records")
    seals = tuple(
        d.Seal(s.stream, s.epoch, s.committed_end, s.members, "its topic is deleted", final=True)
        for s in state.streams_of(topic.topic)
        if not s.final
    )
    return (*seals, d.DeleteTopic(topic.topic)), r.Done()


def _seal(request: r.SealRequest, state: OrderState) -> Outcome:
    stream = _stream(state, request.stream)
    answer = r.SealedAt(stream.epoch, stream.committed_end, stream.last_glsn)
    if stream.final or (stream.held and not request.final):
        return (), answer
    seal = d.Seal(
        stream.stream,
        stream.epoch,
        stream.committed_end,
        stream.members,
        "sealed by an operator",
        final=request.final,
        held=not request.final,
    )
    return (seal,), answer


def _remove_node(request: r.RemoveNodeRequest, state: OrderState, around: Surroundings) -> Outcome:
    if request.node not in state.nodes:
        raise NotFound(f"there is no storage node {request.node}")
    moves = []
    for stream in state.streams_on(request.node):
        left = tuple(node for node in stream.replicas if node != request.node)
        if not stream.final and request.node in stream.leaving:
            way_out = f"let it open (`cutwater stream unseal {stream.stream}`)" if stream.held else "wait for that"
            raise Refused(
                f"storage node {request.node} leaves log stream {stream.stream} when that is open and enough others "
                f"hold every record: {way_out} (`cutwater stream describe {stream.stream}` says what is missing)"
            )
        if not stream.final:
            raise Refused(
                f"storage node {request.node} is a replica of log stream {stream.stream}: replace it there first"
            )
        if not any(around.ready(stream, node) for node in left):
            raise LastCopy(
                f"storage node {request.node} holds the last copy of log stream {stream.stream} that is known to be "
                "complete: bring another one up first"
            )
        leaving = tuple(node for node in stream.leaving if node != request.node)
        moves.append(d.AssignReplicas(stream.stream, left, leaving=leaving))
    for run in state.runs.publishing:
        parts = (part for group in run.unpublished for part in group.parts)
        if any(request.node in part.holders and not _others(part, request.node, state) for part in parts):
            raise LastCopy(
                f"storage node {request.node} holds the last copy of rows of batch {run.batch} of run {run.run}, which "
                "is decided and not in the log yet: wait until it is published"
            )
    return (*moves, d.RemoveNode(request.node)), r.Done()


def _others(part: Part, node: StorageNodeId, state: OrderState) -> bool:
    """Whether another node of the cluster also holds the part."""
    return any(holder != node and holder in state.nodes for holder in part.holders)


def _replace(request: r.ReplaceRequest, state: OrderState, around: Surroundings) -> Outcome:
    stream = _stream(state, request.stream)
    if request.new not in state.nodes or (request.new in stream.replicas and request.new not in stream.leaving):
        raise InvalidArgument(f"storage node {request.new} cannot become a replica of log stream {request.stream}")
    if request.old not in stream.replicas:
        raise InvalidArgument(f"storage node {request.old} is not a replica of log stream {request.stream}")
    if request.old in stream.leaving:
        raise InvalidArgument(
            f"storage node {request.old} leaves log stream {request.stream} already, when enough others hold every "
            "record: nothing is to be done"
        )
    if stream.is_open:
        raise NotSealed(f"log stream {request.stream} is open: seal it before you replace a replica")
    holders = [node for node in stream.replicas if node != request.old and around.ready(stream, node)]
    if not holders:
        raise LastCopy(
            f"without storage node {request.old} no replica of log stream {request.stream} is known to hold every "
            "committed record: wait for the others, or let one learn first"
        )
    replicas = tuple(request.new if node == request.old else node for node in stream.replicas if node != request.new)
    leaving = tuple(node for node in stream.leaving if node != request.new)
    if request.old in stream.members or around.ready(stream, request.old):
        # A complete copy does not go before the new one is complete: the others may fail meanwhile. A member holds
        # everything even if it has yet to report again after the seal.
        replicas, leaving = (*replicas, request.old), (*leaving, request.old)
    return (d.AssignReplicas(request.stream, replicas, leaving=leaving),), r.Done()


def _trim(request: r.TrimRequest, state: OrderState) -> Outcome:
    topic = _topic(state, request.topic)
    if request.before > state.high_watermark + 1:
        raise InvalidArgument(f"trim before GLSN {request.before}, but the log ends at {state.high_watermark}")
    if request.before <= topic.trimmed_before:
        return (), r.Done()
    if is_of_programs(topic):
        check_program_trim(state, request.before)
    return (d.Trim(topic.topic, GLSN(request.before)),), r.Done()


def _open_producer(request: r.OpenProducerRequest, state: OrderState) -> Outcome:
    check_name("producer", request.producer)
    topic = _topic(state, request.topic)
    producer = state.producers.get(request.producer)
    if producer is not None:
        if producer.session == request.session:
            return (), r.ProducerGrant(producer.epoch, producer.stream, producer.last_sequence)
        if state.streams[producer.stream].topic != topic.topic:
            raise InvalidArgument(f"producer {request.producer!r} belongs to another topic: choose another name")
        grant = r.ProducerGrant(ProducerEpoch(producer.epoch + 1), producer.stream, producer.last_sequence)
    else:
        names = sum(1 for known in state.producers.values() if state.streams[known.stream].topic == topic.topic)
        if names >= PRODUCERS_PER_TOPIC_MAX:
            raise Refused(
                f"topic {topic.name!r} has {names} producers already, which is the most, and their names are kept as "
                "long as it lives: open one of these again instead of making up names, or use another topic"
            )
        grant = r.ProducerGrant(ProducerEpoch(1), _choose_stream(state, topic, None), Sequence(0))
    return (d.OpenProducer(request.producer, grant.epoch, grant.stream, request.session),), grant


def _move_producer(request: r.MoveProducerRequest, state: OrderState) -> Outcome:
    producer, is_done = _held(request, state)
    if is_done:
        return (), r.ProducerGrant(producer.epoch, producer.stream, producer.last_sequence)
    stream = state.streams[producer.stream]
    if stream.is_open or stream.epoch != request.stream_epoch:
        raise NotSealed(
            f"log stream {stream.stream} is not sealed in epoch {request.stream_epoch}, so the fate of the producer's "
            "batches there is not settled: go on there, or ask again once it is sealed"
        )
    target = _choose_stream(state, state.topics[stream.topic], stream.stream)
    grant = r.ProducerGrant(ProducerEpoch(producer.epoch + 1), target, request.last_sequence)
    return (d.MoveProducer(request.producer, grant.epoch, target, request.last_sequence),), grant


def _renew_producer(request: r.RenewProducerRequest, state: OrderState) -> Outcome:
    """Open the name once more for its holder, unless another session has opened it meanwhile."""
    producer, is_done = _held(request, state)
    if is_done:
        return (), r.ProducerGrant(producer.epoch, producer.stream, producer.last_sequence)
    grant = r.ProducerGrant(ProducerEpoch(producer.epoch + 1), producer.stream, producer.last_sequence)
    return (d.OpenProducer(request.producer, grant.epoch, grant.stream, request.session),), grant


def _held(request: r.MoveProducerRequest | r.RenewProducerRequest, state: OrderState) -> tuple[ProducerState, bool]:
    """Return the producer, and whether the session already has the epoch that it asks for. Raise unless the session
    holds the name.

    A session that has the epoch repeats its request because the first answer was lost: it asks for nothing else before
    it knows the next epoch.
    """
    producer = state.producers.get(request.producer)
    if producer is None:
        raise NotFound(f"there is no producer {request.producer!r}: open it; if it was open, its topic was deleted")
    is_done = producer.epoch == request.epoch + 1
    if producer.session != request.session or not (is_done or producer.epoch == request.epoch):
        raise ProducerFenced(f"producer {request.producer!r} was opened again (epoch {producer.epoch}): stop using it")
    return producer, is_done


def _choose_stream(state: OrderState, topic: TopicState, not_this: LogStreamId | None) -> LogStreamId:
    """Return the open stream with the fewest producers."""
    counts = {s.stream: 0 for s in state.streams_of(topic.topic) if s.is_open and s.stream != not_this}
    if not counts:
        raise Unavailable(f"no log stream of topic {topic.name!r} takes appends now")
    for producer in state.producers.values():
        if producer.stream in counts:
            counts[producer.stream] += 1
    return min(counts, key=lambda stream: (counts[stream], stream))
