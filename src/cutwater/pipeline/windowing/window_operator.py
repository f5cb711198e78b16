"""Implements the operator of windows: a keyed operator with a faster path for rows that only add to a window.

A row that comes before its window is complete changes only the window's accumulators. The window's result is not needed
before the step at which it becomes complete. So all these rows of a micro-batch can be gathered by key and window, and
added at once before anything else happens, as long as each window gets its rows in the order of their positions. The
remaining rows are for windows that are already complete: they are processed one by one, between the timers (ADR 0029).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter

from cutwater.pipeline.clocks.clock_steps import NO_TIME, Ticks
from cutwater.pipeline.context import KeyEntry
from cutwater.pipeline.keyed_state.store import KeyedStore
from cutwater.pipeline.operators.keyed_operator import KeyedOperator, OperatorSpec
from cutwater.pipeline.records import Entries, Records
from cutwater.pipeline.rows import Row
from cutwater.pipeline.windowing.window_function import WindowFunction
from cutwater.pipeline.windowing.windows import Sliding, Span


class WindowOperator(KeyedOperator):
    """Runs a ``WindowFunction``. ``gathers``: rows may be added many at a time."""

    def __init__(self, spec: OperatorSpec, store: KeyedStore, first: bool = True) -> None:
        super().__init__(spec, store, first)
        self._windows: WindowFunction = self.function
        self._windows.on_late = self._count_late
        # A failure on a row must be undone alone, so user code and rows of unknown types are processed one by one.
        self.gathers = (
            isinstance(self._windows.window, Sliding)
            and self._windows.trigger.kind == "watermark"
            and all(part.is_builtin for part in self._windows.aggregates)
            and not spec.dead_letters
            and spec.input_rows[0] is not None
            and isinstance(spec.keys[0], attrgetter | itemgetter)
        )

    def run(self, inputs: Sequence[Records], ticks: Ticks) -> dict[str, Records]:
        if not self.gathers:
            return super().run(inputs, ticks)
        (records,), (found,) = inputs, self._begin(ticks, self._keys(inputs))
        entries = [entry for entry in found if entry is not None]
        left = self._gather(records, entries)
        return self._run_through([records.pick(left)], [[entries[index] for index in left]])

    def _gather(self, records: Records, entries: Sequence[KeyEntry]) -> list[int]:
        """Add the rows to all their windows that are not complete. Returns the rows that also have other windows."""
        gathered: dict[tuple[KeyEntry, Span], list[Row]] = {}
        firsts: list[int] = []
        left: list[int] = []
        steps = self._events.steps
        moments, values, step = steps.moments, steps.values, 0
        watermark, upcoming = steps.before, moments[0] if moments else None
        spans_of = self._windows.window.spans
        arrived = zip(records.moments, records.times, records.rows, entries, strict=True)
        for index, (when, time, row, entry) in enumerate(arrived):
            while upcoming is not None and upcoming < when:
                watermark = values[step]
                step += 1
                upcoming = moments[step] if step < len(moments) else None
            spans = spans_of(time)
            complete = not spans
            for span in spans:
                if span[1] - 1 <= watermark:
                    complete = True
                    continue
                place = (entry, span)
                rows = gathered.get(place)
                if rows is None:
                    gathered[place] = [row]
                    firsts.append(when)
                else:
                    rows.append(row)
            if complete:
                left.append(index)
        self._add_gathered(gathered, firsts)
        return left

    def _add_gathered(self, gathered: dict[tuple[KeyEntry, Span], list[Row]], firsts: list[int]) -> None:
        context, store, add = self._context, self.store, self._windows.add
        for ((entry, span), rows), when in zip(gathered.items(), firsts, strict=True):
            context._moment, context.key, context._entry, context._values = when, entry.key, entry, entry.values
            context.timestamp = span[1] - 1
            try:
                # The window is not complete, so all its timers are in the future.
                add(span, rows, context, NO_TIME)
            except Exception as error:
                self._failed(error, when, b"", row=rows[0])
            context._undo.clear()
            store.dirty.add(entry)
        self._windows.skip_incomplete = True

    def _run_through(self, inputs: Sequence[Records], entries: Sequence[Entries]) -> dict[str, Records]:
        try:
            return super()._run_through(inputs, entries)
        finally:
            self._windows.skip_incomplete = False

    def _count_late(self, is_dropped: bool) -> None:
        # A late row changes nothing, so a call that drops one cannot fail after it.
        if is_dropped:
            self.dropped_late += 1
        else:
            self.late_sent += 1
