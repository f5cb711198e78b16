"""The cluster: its health, nodes, log streams, topics, runs, cursors and events."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct

from cutwater.admin.jobs import JobCalls
from cutwater.admin.operations import Admin, MetadataStatus
from cutwater.client.cluster.metadata_client import no_such_topic
from cutwater.client.convert.schemas import decode_schema
from cutwater.client.convert.schemas import describe as schema_as_text
from cutwater.core import requests as r
from cutwater.core.access.access_requests import AccessSummary
from cutwater.core.jobs.job_records import JobPhase
from cutwater.core.jobs.job_requests import ListJobsRequest
from cutwater.errors import NotFound
from cutwater.protocol.metadata_api import WHO_LEADS
from cutwater.service.resources.paging import NUMBER_IN_PATH, NumberedQuery, PageQuery, number_of, page_of
from cutwater.service.routes import Page, RestCall, RestRoute, RouteCalls, get
from cutwater.types import ClusterId, CutTime, DecisionIndex, LeaderEpoch, Retention


class ClusterHealth(Struct, frozen=True):
    """The cluster as its leader sees it, as far as the caller may. ``is_healthy``: every log stream that the caller may
    describe takes appends with all its copies, and every node is alive. ``troubles`` says what is not so."""

    cluster: ClusterId
    leader_epoch: LeaderEpoch
    high_watermark: int
    cut_time: CutTime
    is_healthy: bool
    is_limited: bool
    troubles: tuple[str, ...]
    nodes: int
    nodes_alive: int
    streams: int
    streams_open: int
    access: AccessSummary | None = None


class MetadataNodes(Struct, frozen=True):
    """The nodes of the metadata repository that this service knows, as they answer now."""

    nodes: tuple[MetadataStatus, ...]


class TopicDetails(Struct, frozen=True):
    """A topic. ``columns`` are its columns as text; null for records of key and value. Times are in microseconds."""

    name: str
    number: int
    replication: int
    streams: tuple[int, ...]
    columns: str | None
    event_time: str
    retention: Retention
    trimmed_before: int
    event_time_ahead_us: int
    is_internal: bool


class TopicsQuery(PageQuery, frozen=True, forbid_unknown_fields=True):
    """``internal``: also topics that the cluster made for itself."""

    internal: bool = False


class StreamsQuery(NumberedQuery, frozen=True, forbid_unknown_fields=True):
    topic: Annotated[str, Meta(max_length=255)] = ""


class CursorPosition(Struct, frozen=True):
    """``glsn``: everything up to there is processed."""

    name: str
    glsn: int


class MetricsSummary(Struct, frozen=True):
    """A few numbers for a first look, about what the caller may see. Prometheus has all of them."""

    high_watermark: int
    cut_time: CutTime
    topics: int
    streams: int
    streams_open: int
    streams_without_a_copy: int
    nodes: int
    nodes_alive: int
    runs: int
    groups_unpublished: int
    jobs: dict[JobPhase, int]
    """How many jobs are in each phase, without phases that no job is in."""


async def describe(ask: RouteCalls) -> r.Description:
    return await ask(r.DescribeRequest(), r.Description)


async def cluster_health(call: RestCall[Any, None]) -> ClusterHealth:
    found = await describe(call.ask)
    troubles = [f"the leader has halted: {found.halted}"] if found.halted else []
    troubles += [f"storage node {node.node} is not alive" for node in found.nodes if not node.is_alive]
    troubles += [
        f"log stream {one.stream} of topic {one.topic}: {one.reason or 'copies are missing'}"
        + (f"; next: {one.next_step}" if one.next_step else "")
        for one in found.streams
        if not one.final and (one.missing or (not one.is_open and not one.held))
    ]
    return ClusterHealth(
        found.cluster,
        found.leader_epoch,
        found.high_watermark,
        found.cut_time,
        not troubles,
        found.is_limited is True,
        tuple(troubles[:100]),
        len(found.nodes),
        sum(node.is_alive for node in found.nodes),
        sum(not one.final for one in found.streams),
        sum(one.is_open for one in found.streams),
        None if found.access is UNSET else found.access,
    )


async def metadata_nodes(call: RestCall[Any, None]) -> MetadataNodes:
    async with Admin(call.ask.addresses, timeout_ms=2_000, access=call.ask.access) as admin:
        return MetadataNodes(await admin.metadata_nodes())


async def storage_nodes(call: RestCall[NumberedQuery, None]) -> Page[r.NodeDescription]:
    return page_of((await describe(call.ask)).nodes, call.query, lambda node: node.node)


async def storage_node(call: RestCall[None, None]) -> r.NodeDescription:
    number = number_of(call.path, "node")
    for node in (await describe(call.ask)).nodes:
        if node.node == number:
            return node
    raise NotFound(f"there is no storage node {number}, or you may not see it: that needs describe on the cluster")


async def log_streams(call: RestCall[StreamsQuery, None]) -> Page[r.StreamDescription]:
    found = (await describe(call.ask)).streams
    topic = call.query.topic
    return page_of((one for one in found if topic in ("", one.topic)), call.query, lambda one: one.stream)


async def log_stream(call: RestCall[None, None]) -> r.StreamDescription:
    number = number_of(call.path, "stream")
    for stream in (await describe(call.ask)).streams:
        if stream.stream == number:
            return stream
    raise NotFound(f"there is no log stream {number}, or you may not see its topic")


async def topics(call: RestCall[TopicsQuery, None]) -> Page[TopicDetails]:
    catalog = await call.ask(r.CatalogRequest(), r.Catalog)
    found = [info for info in catalog.topics if call.query.internal or not info.is_internal]
    page = page_of(found, call.query, lambda info: info.name)
    return Page(tuple(_topic(info, catalog) for info in page.items), page.next)


async def topic(call: RestCall[None, None]) -> TopicDetails:
    catalog = await call.ask(r.CatalogRequest(), r.Catalog)
    name = call.path["topic"]
    for info in catalog.topics:
        if info.name == name:
            return _topic(info, catalog)
    raise no_such_topic(name, catalog)


def _topic(info: r.TopicInfo, catalog: r.Catalog) -> TopicDetails:
    return TopicDetails(
        info.name,
        info.topic,
        info.replication,
        tuple(one.stream for one in catalog.streams if one.topic == info.topic and not one.final),
        schema_as_text(decode_schema(info.schemas[-1])) if info.schemas else None,
        info.event_time,
        info.retention,
        info.trimmed_before,
        info.event_time_ahead_us,
        info.is_internal,
    )


async def runs(call: RestCall[NumberedQuery, None]) -> Page[r.RunDescription]:
    return page_of((await describe(call.ask)).runs, call.query, lambda run: run.run)


async def run(call: RestCall[None, None]) -> r.RunDescription:
    number = number_of(call.path, "run")
    for found in (await describe(call.ask)).runs:
        if found.run == number:
            return found
    raise NotFound(f"there is no run {number}, it was forgotten, or you may not see it")


async def cursor(call: RestCall[None, None]) -> CursorPosition:
    name = call.path["cursor"]
    found = await call.ask(r.ReadCursorRequest(name), r.CursorAt)
    if found.glsn is None:
        raise NotFound(f"there is no cursor {name!r}: a consumer makes it when it first commits a position")
    return CursorPosition(name, found.glsn)


async def events(call: RestCall[NumberedQuery, None]) -> Page[r.Event]:
    query = call.query
    found = (await call.ask(r.EventsRequest(DecisionIndex(query.after)), r.Events)).events
    some = found[: query.limit]
    return Page(tuple(some), str(some[-1].index) if len(found) > len(some) else None)


async def metrics_summary(call: RestCall[None, None]) -> MetricsSummary:
    found = await describe(call.ask)
    live = [one for one in found.streams if not one.final]
    return MetricsSummary(
        found.high_watermark,
        found.cut_time,
        len({one.topic for one in live}),
        len(live),
        sum(one.is_open for one in live),
        sum(bool(one.missing) for one in live),
        len(found.nodes),
        sum(node.is_alive for node in found.nodes),
        len(found.runs),
        sum(len(run.unpublished) for run in found.runs),
        dict(sorted(Counter(job.phase for job in await JobCalls(call.ask).jobs()).items())),
    )


DESCRIBES = {"requests": (r.DescribeRequest,)}
CATALOG = {"requests": (r.CatalogRequest,), "tag": "records"}
OF_NUMBER = dict.fromkeys(("node", "stream", "run"), NUMBER_IN_PATH)

ROUTES: tuple[RestRoute, ...] = (
    get("/v1/cluster", "cluster_health", "How the cluster is", cluster_health, answer=ClusterHealth, **DESCRIBES),
    get(
        "/v1/cluster/metadata-nodes",
        "metadata_nodes",
        "The metadata nodes, and which one leads",
        metadata_nodes,
        answer=MetadataNodes,
        methods=(WHO_LEADS.name,),
    ),
    get(
        "/v1/nodes",
        "storage_nodes",
        "The storage nodes",
        storage_nodes,
        answer=Page[r.NodeDescription],
        query=NumberedQuery,
        **DESCRIBES,
    ),
    get(
        "/v1/nodes/{node}",
        "storage_node",
        "A storage node",
        storage_node,
        answer=r.NodeDescription,
        path_types=OF_NUMBER,
        **DESCRIBES,
    ),
    get(
        "/v1/streams",
        "log_streams",
        "The log streams, of one topic if it is given",
        log_streams,
        answer=Page[r.StreamDescription],
        query=StreamsQuery,
        **DESCRIBES,
    ),
    get(
        "/v1/streams/{stream}",
        "log_stream",
        "A log stream",
        log_stream,
        answer=r.StreamDescription,
        path_types=OF_NUMBER,
        **DESCRIBES,
    ),
    get("/v1/topics", "topics", "The topics", topics, answer=Page[TopicDetails], query=TopicsQuery, **CATALOG),
    get("/v1/topics/{topic}", "topic", "A topic", topic, answer=TopicDetails, **CATALOG),
    get(
        "/v1/runs",
        "runs",
        "The runs that publish",
        runs,
        answer=Page[r.RunDescription],
        query=NumberedQuery,
        **DESCRIBES,
    ),
    get("/v1/runs/{run}", "run", "A run", run, answer=r.RunDescription, path_types=OF_NUMBER, **DESCRIBES),
    get(
        "/v1/cursors/{cursor}",
        "cursor",
        "How far a consumer has come",
        cursor,
        answer=CursorPosition,
        requests=(r.ReadCursorRequest,),
        tag="records",
    ),
    get(
        "/v1/events",
        "events",
        "Recent decisions and their reasons, the oldest first",
        events,
        answer=Page[r.Event],
        query=NumberedQuery,
        requests=(r.EventsRequest,),
    ),
    get(
        "/v1/metrics",
        "metrics_summary",
        "A few numbers about the cluster",
        metrics_summary,
        answer=MetricsSummary,
        requests=(r.DescribeRequest, ListJobsRequest),
    ),
)
