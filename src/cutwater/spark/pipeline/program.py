"""Defines a pipeline as it is sent to workers: the graph with its functions, the schemas of its sources, and the
slices."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from pyspark import cloudpickle

from cutwater.pipeline.graph import Graph, SourceNode
from cutwater.pipeline.keyed_state.keys import SLICES_DEFAULT
from cutwater.pipeline.pickling import pickled_graph, unpickled_graph
from cutwater.pipeline.plan import Plan
from cutwater.pipeline.rows import RowType

# PySpark's copy of cloudpickle has no type annotations.
_dumps: Callable[[Any], bytes] = cloudpickle.dumps

_plans: dict[tuple[str, bytes, bytes], Plan] = {}
"""Plans that this process has already made. A worker serves few pipelines in its life."""

_PLANS_MAX: Final = 8
_SPREAD: Final = 1_680
"""The least number that 1 to 8, 10, 12, 14, 15 and 16 divide. Hashes with consecutive remainders modulo this number
spread evenly."""


class Program:
    """A pipeline, pickled once on the driver. The process that unpickles it makes the plan when it first needs it."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        rows: Mapping[str, RowType | None],
        *,
        parallelism: int = 1,
        slices: int = SLICES_DEFAULT,
        event_times: Mapping[str, str] | None = None,
    ) -> None:
        """``event_times`` names the column that a topic's own event time comes from."""
        self.name, self.parallelism, self.slices = name, parallelism, slices
        self.keys = balanced_keys(slices)
        """The key by which Spark groups each slice."""
        self._schemas = {topic: own and own.schema for topic, own in rows.items()}
        self._event_times = dict(event_times or {})
        self._graph = pickled_graph(name, graph)
        self._key = (name, self._graph, _dumps((self._schemas, self._event_times)))
        """Identifies the plan: the same graph on topics with other schemas is another plan."""

    @property
    def plan(self) -> Plan:
        plan = _plans.get(self._key)
        if plan is None:
            graph = unpickled_graph(self._graph)
            rows = {topic: None if schema is None else RowType(schema) for topic, schema in self._schemas.items()}
            for node in graph.of_type(SourceNode):
                own, declared = self._event_times.get(node.topic), rows[node.topic]
                # A declared schema may leave the topic's own column out: the log provides event time in any case.
                if node.event_time is None and own and declared is not None and own in declared.names:
                    node.event_time = own
            if len(_plans) >= _PLANS_MAX:
                _plans.clear()
            plan = _plans[self._key] = Plan(self.name, graph, rows, breaks_chains=True)
        return plan

    def rows_of(self, topic: str) -> RowType:
        return RowType(self._schemas[topic])

    def event_time_of(self, topic: str) -> str:
        return self._event_times.get(topic, "")

    def slice_of_key(self, key: int) -> int:
        return self.keys.index(key)


@cache
def balanced_keys(slices: int) -> list[int]:
    """Return a key for each slice, so that Spark's hash partitioning spreads the slices evenly over 1 to 8 and many
    other numbers of partitions. The keys depend only on the number of slices, because state is stored under them."""
    found: dict[int, int] = {}
    candidate = 0
    while len(found) < slices:
        found.setdefault(spark_hash(candidate) % _SPREAD, candidate)
        found = {place: key for place, key in found.items() if place < slices}
        candidate += 1
    return [found[place] for place in range(slices)]


def spark_hash(value: int) -> int:
    """Return Spark's ``hash`` of an int: Murmur3, 32 bits, seed 42, as a signed number."""
    mask = 0xFFFFFFFF

    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> 32 - bits) & mask

    word = rotated((value & mask) * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    mixed = (rotated(42 ^ word, 13) * 5 + 0xE6546B64) & mask
    mixed ^= 4
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & mask
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & mask
    mixed ^= mixed >> 16
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed


def pickled(*values: Any) -> str:
    """Return any values as text, because Spark's options are texts."""
    return b64encode(_dumps(values)).decode()


def unpickled(text: str) -> Any:
    return cloudpickle.loads(b64decode(text))
