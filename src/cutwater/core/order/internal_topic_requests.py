"""Decides how internal topics are made: see ``core.internal_topics``."""

from __future__ import annotations

from collections.abc import Callable

from cutwater.core import requests as r
from cutwater.core.internal_topics import OF_JOBS, InternalTopic, way_out
from cutwater.core.names import check_topic_name, is_reserved
from cutwater.core.order import decisions as d
from cutwater.core.order.planning.placement import ReplicaCounts, loads, place
from cutwater.core.order.state import OrderState, TopicState
from cutwater.core.publish.run_requests import Outcome
from cutwater.errors import InvalidArgument, Refused, Unavailable
from cutwater.types import CutTime, LogStreamId, StorageNodeId, TopicId


def internal_in_words(topic: TopicState) -> str:
    return f"topic {topic.name!r} is internal: the cluster keeps it for itself"


def make_internal_topics(
    request: r.MakeInternalTopicsRequest, state: OrderState, usable: Callable[[StorageNodeId], bool], time: CutTime
) -> Outcome:
    """Make the topics that do not exist; the others stay as they are, since operators may have changed them. If a
    user's topic has one of the names, nothing is made."""
    known = {topic.name: topic for topic in state.topics.values()}
    definitions = {definition.name: definition for definition in request.topics}
    found = {name: known.get(name) for name in definitions}
    taken = [topic for topic in found.values() if topic is not None and not topic.is_internal]
    if taken:
        ways = (f"Topic {t.name!r}: {way_out(t.name, is_typed=bool(t.schemas))}" for t in taken)
        raise Refused(
            "the cluster needs topics with reserved names that users took with an earlier version. Nothing was "
            f"changed. {'. '.join(ways)}"
        )
    missing = [definition for name, definition in definitions.items() if found[name] is None]
    load = loads(state, usable) if missing else {}
    decisions: list[d.Decision] = []
    numbers = {name: topic.topic for name, topic in found.items() if topic is not None}
    for i, definition in enumerate(missing):
        topic, stream = TopicId(state.last_topic + 1 + i), LogStreamId(state.last_stream + 1 + i)
        nodes = _choose_nodes(definition, load)
        decisions.append(_create(definition, topic))
        decisions.append(d.CreateStream(stream, topic, nodes, state.high_watermark, time))
        numbers[definition.name] = topic
    reserved = tuple(sorted(name for name, topic in known.items() if is_reserved(name) and not topic.is_internal))
    return tuple(decisions), r.InternalTopics(tuple(numbers[name] for name in found), reserved)


def make_job_topic(
    request: r.MakeJobTopicRequest, state: OrderState, usable: Callable[[StorageNodeId], bool], time: CutTime
) -> Outcome:
    definition = OF_JOBS.get(request.topic)
    if definition is None:
        raise InvalidArgument(f"{request.topic!r} is no internal topic of jobs: these are {', '.join(OF_JOBS)}")
    return make_internal_topics(r.MakeInternalTopicsRequest((definition,)), state, usable, time)


def _choose_nodes(definition: InternalTopic, load: ReplicaCounts) -> tuple[StorageNodeId, ...]:
    """Choose as many nodes as there are, up to the replication. Repair adds other copies when there are more."""
    nodes = place(load, min(definition.replication, len(load)))
    if not nodes:
        raise Unavailable(
            f"no storage node can be used for the internal topic {definition.name!r}: add one, or restart them"
        )
    for node in nodes:
        load[node] += 1
    return nodes


def _create(definition: InternalTopic, topic: TopicId) -> d.CreateTopic:
    check_topic_name(definition.name)
    if not is_reserved(definition.name):
        raise InvalidArgument(f"the name of an internal topic begins with '_': {definition.name!r} does not")
    return d.CreateTopic(
        topic,
        definition.name,
        definition.replication,
        schema=definition.schema,
        event_time=definition.event_time,
        retention=definition.retention,
        is_internal=True,
    )
