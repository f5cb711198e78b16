"""Implements operators whose function takes whole Arrow batches, one per key group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument, PipelineFailed
from cutwater.pipeline.clocks.clock_steps import Ticks
from cutwater.pipeline.context import MAIN
from cutwater.pipeline.failures import stopped
from cutwater.pipeline.keyed_state.keys import key_bytes, key_group
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.operators.keyed_operator import KeyedOperator, OperatorSpec
from cutwater.pipeline.records import Records, missing_columns
from cutwater.pipeline.rows import RESERVED_COLUMN, RowType


class BatchOperator(KeyedOperator):
    """Calls the function once per key group that has records. State belongs to the key group: its number is the key."""

    def __init__(self, spec: OperatorSpec, store: KeyedStore, first: bool = True) -> None:
        super().__init__(spec, store, first)
        context = self._context
        context._timerless = context._no_event_timers = "a function of batches has no timers: use a ProcessFunction"

    def run(self, inputs: Sequence[Records], ticks: Ticks) -> dict[str, Records]:
        (records,) = inputs
        groups = self._grouped(records)
        self._begin(ticks, [list(groups)])
        made = [self._call(group, records.pick(groups[group])) for group in sorted(groups)]
        self._out[MAIN] = Records.merged(made)
        return self._out

    def _grouped(self, records: Records) -> dict[int, list[int]]:
        (read_key,) = self.spec.keys
        assert read_key is not None, "a function of batches has a key"
        groups: dict[int, list[int]] = {}
        known: dict[Any, int] = {}
        for index, row in enumerate(records.rows):
            try:
                key = read_key(row)
                group = known.get(key)
                if group is None:
                    group = known[key] = key_group(key_bytes(key), self.spec.max_parallelism)
            except Exception as error:
                raise self._stopped(error, f"the record {row!r}", records.moments[index]) from error
            groups.setdefault(group, []).append(index)
        return groups

    def _call(self, group: int, records: Records) -> Records:
        context = self._context
        entry = self.store.live[group]
        context._moment, context.timestamp, context.key = records.moments[-1], records.times[-1], group
        context._entry, context._values = entry, entry.values
        rows, made_rows = self.spec.input_rows[0], self.spec.output_rows
        call: Callable[..., Any] = self.function.process_batch
        try:
            if rows is None or made_rows is None:
                raise InvalidArgument("a function of batches needs the schemas of its input and output: declare both")
            made = call(records.to_arrow(rows), context)
            emitted = Records() if made is None else _emitted(made, made_rows)
        except Exception as error:
            context._roll_back()
            on = f"a batch of {len(records)} records of key group {group}"
            raise self._stopped(error, on, records.moments[0]) from error
        if context._undo:
            self.store.dirty.add(entry)
            context._undo.clear()
        return emitted

    def _stopped(self, error: Exception, on: str, when: int) -> PipelineFailed:
        return stopped(error, on, pipeline=self.spec.pipeline, uid=self.spec.uid, when=when, letters=False)


def _emitted(made: pa.RecordBatch | pa.Table, rows: RowType) -> Records:
    if lacking := missing_columns(made, rows):
        raise InvalidArgument(
            f"the returned batch lacks {', '.join(lacking)}: keep the reserved column {RESERVED_COLUMN}, and give "
            "every column of the schema"
        )
    return Records.returned(made, rows)
