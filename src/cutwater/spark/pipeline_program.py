"""A pipeline as it is sent to workers: the graph with its functions, the schemas of its sources, and the slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark import cloudpickle

from cutwater.pipeline.graph import Graph
from cutwater.pipeline.plan import Destination, Plan
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import RowType

_plans: dict[bytes, Plan] = {}
"""Plans that this process has made already; a worker serves few pipelines in its life."""

_PLANS_MAX = 8


class Program:
    """Pickled once, on the driver; whoever unpickles it makes the plan when it is first needed."""

    def __init__(
        self, name: str, graph: Graph, rows: Mapping[str, RowType | None], slices: int, keys: list[int]
    ) -> None:
        self.slices, self.keys = slices, keys
        self._pickled = cloudpickle.dumps((name, graph, {topic: own and own.schema for topic, own in rows.items()}))

    @property
    def plan(self) -> Plan:
        plan = _plans.get(self._pickled)
        if plan is None:
            name, graph, schemas = cloudpickle.loads(self._pickled)
            rows = {topic: None if schema is None else RowType(schema) for topic, schema in schemas.items()}
            if len(_plans) >= _PLANS_MAX:
                _plans.clear()
            plan = _plans[self._pickled] = Plan(name, graph, rows)
        return plan

    def slice_of_key(self, key: int) -> int:
        return self.keys.index(key)

    def envelopes(self, arrived: dict[Destination, list[Records]], index: int) -> Iterator[tuple[int, int, int, bytes]]:
        from cutwater.spark.pipeline_operator import envelopes

        return envelopes(self.plan, self.slices, self.keys, arrived, index)


def balanced_keys(slices: int, partitions: int) -> list[int]:
    """A key for each slice, such that Spark's hash partitioning gives every partition as many slices as the others."""
    room = [slices // partitions + (i < slices % partitions) for i in range(partitions)]
    found: list[int] = []
    candidate = 0
    while len(found) < slices:
        partition = spark_hash(candidate) % partitions
        if room[partition]:
            room[partition] -= 1
            found.append(candidate)
        candidate += 1
    return found


def spark_hash(value: int) -> int:
    """What Spark's ``hash`` of an int is: Murmur3, 32 bits, seed 42, as a signed number."""
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


def pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
