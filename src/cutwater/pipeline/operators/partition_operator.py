"""Implements ``process_partition``: a function of one of n partitions of a stream without keys, with state per
partition.

Records go to partitions in turn, by their positions. So what a partition sees depends on n; this is the only feature
whose result may depend on it. When n changes, a *list* state is divided again, and each partition gets all of a *union*
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.keyed_state.state import ListState
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.operators.keyed_operator import KeyedOperator, OperatorSpec
from cutwater.pipeline.position import glsn_of
from cutwater.pipeline.records import Records
from cutwater.pipeline.rows import Row


class OperatorListState(ListState):
    """A list per partition. When the number of partitions changes, its elements are divided evenly, in order."""

    kind = "operator list"


class UnionListState(ListState):
    """A list per partition. When the number of partitions changes, each one gets the elements of all."""

    kind = "union list"


def partition_of(when: int, partitions: int) -> int:
    return glsn_of(when) % partitions


class PartitionOperator(KeyedOperator):
    """Runs the partitions of one slice. A partition is a key, and the position of a record determines its partition."""

    def __init__(self, spec: OperatorSpec, store: KeyedStore, first: bool = True) -> None:
        super().__init__(spec, store, first)
        context = self._context
        context.partitions = spec.partitions
        context._timerless = context._no_event_timers = "a partition has no key: only keyed operators have timers"

        def own_partition(_: Row) -> int:
            context.partition = partition_of(context._moment, spec.partitions)
            return context.partition

        self._read_keys = [own_partition]

    def run(self, inputs: Sequence[Records], ticks: Ticks) -> dict[str, Records]:
        self._begin(ticks, [range(self.spec.partitions)])
        return self._run_through(inputs, [repeat(None)])
