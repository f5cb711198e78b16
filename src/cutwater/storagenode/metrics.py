"""Exports the counters of a storage node in the Prometheus format. Does nothing until metrics are requested."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cutwater.access.access_metrics import access_metrics
from cutwater.access.quota_metrics import quota_metrics
from cutwater.runtime.counter_metrics import counter_metrics
from cutwater.storagenode.counters import BOUNDS_SECONDS, Histogram
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.server import StorageNodeServer
from cutwater.types import LogStreamId, NodeState, ReplicaState
from cutwater.wire.listen.certificate_metrics import certificate_metrics
from cutwater.wire.listen.gate_metrics import gate_metrics

PREFIX = "cutwater_sn_"


class NodeCollector(Collector):
    """Reads from another thread than the one that counts. Each number is consistent by itself, but they may be of
    different moments."""

    def __init__(self, server: StorageNodeServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        drivers = list(self._server.node.replicas.items())
        yield from self._counters()
        yield from self._node()
        yield from gate_metrics(PREFIX, self._server.gate)
        yield from quota_metrics(PREFIX, self._server.access.control.quotas.counters)
        yield from access_metrics(PREFIX, self._server.access.control)
        yield from certificate_metrics(PREFIX, self._server.options.tls)
        yield from self._volumes()
        yield from _queues(drivers)
        yield from _replicas(drivers)
        yield _latency("entry_sync", "Syncs of entries", [d.writer.entry_syncs for _, d in drivers])
        yield _latency("commit_sync", "Syncs of commit contexts", [d.writer.context_syncs for _, d in drivers])

    def _counters(self) -> Iterator[Metric]:
        counters, scrub = self._server.node.counters, self._server.scrubber.progress
        yield from counter_metrics(PREFIX, counters)
        for name, text, value in (
            ("scrub_passes", "Times that everything here was read and checked", scrub.passes),
            ("scrub_bytes", "Bytes that were read to be checked", scrub.bytes),
            ("scrub_findings", "Damage that was found by reading everything", scrub.findings),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        outcomes = CounterMetricFamily(
            PREFIX + "append_outcomes", "How appends ended: acknowledged, or an error's code", labels=["outcome"]
        )
        for outcome, count in sorted(counters.outcomes.copy().items()):
            outcomes.add_metric([outcome], count)
        yield outcomes

    def _node(self) -> Iterator[Metric]:
        server, node = self._server, self._server.node
        waiting, waiting_bytes = node.appends_waiting
        for name, text, value in (
            ("read_only", "1 if the node takes no appends for want of room", node.state is NodeState.READ_ONLY),
            ("incarnation", "Number of starts", node.incarnation),
            ("leader_epoch", "Newest leader epoch that was heard of", node.leader_epoch),
            ("metadata_joined", "Nodes of the metadata repository that hear the reports", server.metadata_joined),
            (
                "unreadable_replicas",
                "Replicas whose files cannot be opened",
                len(node.unreadable.keys() - node.leftovers),
            ),
            ("leftover_replicas", "Replicas that other nodes hold instead now", len(node.leftovers)),
            ("damaged_places", "Places that are known to be damaged and not repaired", len(server.damage)),
            ("scrub_replicas", "Replicas that the present pass of the scrub checks", server.scrubber.progress.replicas),
            ("scrub_replicas_done", "Those of them that are checked", server.scrubber.progress.replicas_done),
            ("appends_waiting", "Appends that wait for their commit", waiting),
            ("appends_waiting_bytes", "Bytes of those appends", waiting_bytes),
            ("staged_parts", "Staged parts that are here, complete or not", server.staging.parts),
            ("staged_bytes", "Bytes of those parts", server.staging.bytes),
            ("staged_bytes_max", "How many bytes may be staged here", server.staging.bytes_max),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)

    def _volumes(self) -> Iterator[Metric]:
        total = GaugeMetricFamily(PREFIX + "volume_bytes", "Size of a volume", labels=["volume"])
        free = GaugeMetricFamily(PREFIX + "volume_free_bytes", "Room left on a volume", labels=["volume"])
        for room in self._server.room.rooms:
            total.add_metric([room.path], room.total_bytes)
            free.add_metric([room.path], room.free_bytes)
        yield total
        yield free


def _queues(drivers: list[tuple[LogStreamId, ReplicaDriver]]) -> Iterator[Metric]:
    backlog = GaugeMetricFamily(PREFIX + "backlog_bytes", "Entries that wait for the disk", labels=["stream"])
    events = GaugeMetricFamily(PREFIX + "events_waiting", "Events that wait for a barrier", labels=["stream"])
    for stream, driver in drivers:
        backlog.add_metric([str(stream)], driver.writer.backlog_bytes)
        events.add_metric([str(stream)], driver.events_waiting)
    yield backlog
    yield events


def _replicas(drivers: list[tuple[LogStreamId, ReplicaDriver]]) -> Iterator[Metric]:
    states = GaugeMetricFamily(PREFIX + "replica_state", "1 for the state a replica is in", labels=["stream", "state"])
    trusted = GaugeMetricFamily(PREFIX + "replica_trusted", "1 if the data can be relied on", labels=["stream"])
    ends = [
        GaugeMetricFamily(PREFIX + f"replica_{name}", text, labels=["stream"])
        for name, text in (
            ("first_llsn", "Where the entries begin"),
            ("committed_llsn", "Where the committed records end"),
            ("durable_llsn", "Where the durable records end"),
            ("epoch", "Epoch of the log stream"),
        )
    ]
    for stream, driver in drivers:
        replica = driver.replica
        for state in ReplicaState:
            states.add_metric([str(stream), state.name], replica.state is state)
        trusted.add_metric([str(stream)], replica.trusted)
        numbers = (replica.first_llsn, replica.committed_end, replica.durable_end, replica.hard_state.epoch)
        for family, value in zip(ends, numbers, strict=True):
            family.add_metric([str(stream)], value)
    yield states
    yield trusted
    yield from ends


def _latency(name: str, text: str, histograms: list[Histogram]) -> Metric:
    """Sum the histograms of all replicas."""
    family = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text)
    counts = [sum(column) for column in zip(*(list(h.counts) for h in histograms), strict=True)]
    total = 0
    buckets = []
    for bound, count in zip(
        (*map(str, BOUNDS_SECONDS), "+Inf"), counts or [0] * (len(BOUNDS_SECONDS) + 1), strict=True
    ):
        total += count
        buckets.append((bound, total))
    family.add_metric([], buckets, sum(h.seconds for h in histograms))
    return family
