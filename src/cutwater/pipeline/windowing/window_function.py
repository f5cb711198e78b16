"""Implements windows as a process function: the rows of a key go into windows, and timers emit results and clean up.

The rules, which are Flink's:

1.  A window is *complete* when the watermark has reached its end − 1, and *over* when it has reached that plus the
    allowed lateness. A row goes into those of its windows that are not over. If there is none, it is late: it goes to
    the side output for late rows, or is dropped and counted.
2.  Under the watermark trigger a window emits its result when it becomes complete, and again at once for each row that
    it gets after that. Other triggers replace this one.
3.  A session absorbs the sessions that it overlaps or touches, in the order of their starts, and then the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.pipeline.context import LATE, MAIN, Context
from cutwater.pipeline.functions import ProcessFunction
from cutwater.pipeline.keyed_state.state import State, StateHolder, put_raw, remove_raw
from cutwater.pipeline.rows import Row
from cutwater.pipeline.values import decoded, encoded
from cutwater.pipeline.windowing.aggregates import Aggregate
from cutwater.pipeline.windowing.windows import GLOBAL, Span, Trigger, Window

Panes = dict[Span, tuple[tuple[Any, ...], int, int | None]]
"""The windows of a key: accumulators, rows since the last result, time of a pending processing-time trigger."""


class WindowState(State):
    """The windows of a key, as state. A row of the stored list is one window."""

    kind = "windows"

    def __init__(self, aggregates: Sequence[Aggregate]) -> None:
        super().__init__(pa.null())
        self.name = "windows"
        self._aggregates = aggregates

    @property
    def stored_type(self) -> pa.DataType:
        accumulators = [pa.field(f"acc{i}", part.stored_type or pa.null()) for i, part in enumerate(self._aggregates)]
        plain = [pa.field(name, pa.int64()) for name in ("start", "end", "pending", "fires_at")]
        return pa.list_(pa.struct([*plain, *accumulators]))

    def bind(self, holder: StateHolder, slot: int) -> BoundWindows:
        return BoundWindows(holder, slot)

    def packed(self, raws: Sequence[Any]) -> pa.Array:
        """Pack column by column, because a dict per window costs more than the window."""
        ends = list(accumulate((len(raw) if raw else 0 for raw in raws), initial=0))
        panes = [(*span, *pane) for raw in raws if raw for span, pane in sorted(raw.items())]
        starts, stops, accs, pending, fires_at = zip(*panes, strict=True) if panes else ((),) * 5
        fields = list(self.stored_type.value_type)
        plain = [pa.array(values, pa.int64()) for values in (starts, stops, pending, fires_at)]
        sums = [
            encoded([part.pack(acc[i]) for acc in accs], field.type)
            for i, (part, field) in enumerate(zip(self._aggregates, fields[4:], strict=True))
        ]
        return pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()),
            pa.StructArray.from_arrays([*plain, *sums], fields=fields),
            type=self.stored_type,
            mask=pa.array([not raw for raw in raws], pa.bool_()),
        )

    def unpacked(self, column: pa.Array) -> list[Any]:
        panes = column.flatten()
        starts, stops, pending, fires_at, *stored = panes.flatten()
        sums = [list(map(part.unpack, decoded(values))) for part, values in zip(self._aggregates, stored, strict=True)]
        accs: Iterable[tuple[Any, ...]] = zip(*sums, strict=True)
        spans = zip(starts.to_pylist(), stops.to_pylist(), strict=True)
        pairs = zip(spans, zip(accs, pending.to_pylist(), fires_at.to_pylist(), strict=True), strict=True)
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_pylist()
        return [dict(islice(pairs, length)) if length else None for length in lengths]

    def plain(self, raw: Any, watermark: int) -> Any:
        if raw is None:
            return None
        return {
            span: tuple(part.result(acc) for part, acc in zip(self._aggregates, accs, strict=True))
            for span, (accs, _, _) in sorted(raw.items())
        }


class BoundWindows:
    """The windows of the current key."""

    def __init__(self, holder: StateHolder, slot: int) -> None:
        self._holder = holder
        self._slot = slot

    def get(self) -> Panes:
        return self._holder._values[self._slot] or {}

    def put(self, span: Span, pane: tuple[tuple[Any, ...], int, int | None]) -> None:
        put_raw(self._holder, self._slot, span, pane)

    def remove(self, span: Span) -> None:
        remove_raw(self._holder, self._slot, span)


class WindowFunction(ProcessFunction):
    """Windows over a keyed stream. The operator binds ``windows``, like a state that a user declares."""

    windows: Any

    def __init__(
        self,
        window: Window,
        trigger: Trigger,
        lateness_ms: int,
        aggregates: Mapping[str, Aggregate],
        key_values: Callable[[Any], Sequence[Any]],
        write_time: Callable[[int], Any],
        make_row: Callable[[Sequence[Any]], Row],
        late_output: bool,
    ) -> None:
        self.window = window
        self.trigger = trigger
        self.lateness_ms = lateness_ms
        self.aggregates = list(aggregates.values())
        self.on_late: Callable[[bool], None] | None = None
        """Called for each late row with whether it was dropped."""
        self.skip_incomplete = False
        """Set while processing rows that were already added to their incomplete windows."""
        self._key_values = key_values
        self._make_row = make_row
        # Many keys have the same windows.
        self._write_time = lru_cache(maxsize=1_024)(write_time)
        self._late_output = late_output

    def process(self, record: Row, ctx: Context) -> None:
        watermark = ctx.watermark
        late = True
        for span in self.window.spans(ctx.timestamp):
            if self.skip_incomplete and span[1] - 1 > watermark:
                late = False
                continue
            if self.window.merges:
                span = self._merged(span, ctx, watermark)  # noqa: PLW2901 - the row's window is the one that it ends up in
            if span != GLOBAL and span[1] - 1 + self.lateness_ms <= watermark:
                continue
            late = False
            self.add(span, [record], ctx, watermark)
            self._trigger_on_row(span, watermark, ctx)
        # A row that falls between sliding windows belongs to none, and is late only if its own time is.
        if late and ctx.timestamp + self.lateness_ms <= watermark:
            self.take_late(record, ctx)

    def add(self, span: Span, rows: Sequence[Row], ctx: Context, watermark: int) -> None:
        """Add rows to a window, and set the window's timers if it is new."""
        pane = self.windows.get().get(span)
        if pane is None:
            accs = tuple([part.add(part.create(), rows) for part in self.aggregates])
            self.windows.put(span, (accs, len(rows), None))
            self._set_timers(span, ctx, watermark)
        else:
            accs = tuple([part.add(acc, rows) for part, acc in zip(self.aggregates, pane[0], strict=True)])
            self.windows.put(span, (accs, pane[1] + len(rows), pane[2]))

    def take_late(self, record: Row, ctx: Context) -> None:
        if self._late_output:
            ctx.output(LATE, record)
        if self.on_late is not None:
            self.on_late(not self._late_output)

    def _trigger_on_row(self, span: Span, watermark: int, ctx: Context) -> None:
        accs, pending, fires_at = self.windows.get()[span]
        if self.trigger.kind == "watermark":
            if span[1] - 1 <= watermark:
                self._fire(span, ctx)
        elif self.trigger.kind == "count":
            if pending >= self.trigger.every:
                self._fire(span, ctx)
        elif fires_at is None:
            now, every = ctx.processing_time, self.trigger.every
            fires_at = now - now % every + every
            self.windows.put(span, (accs, pending, fires_at))
            ctx.timers.at_processing_time(fires_at)

    def on_timer(self, time: int, ctx: Context) -> None:
        for span in self._spans():
            if span == GLOBAL:
                continue
            if span[1] - 1 == time and self.trigger.kind == "watermark":
                self._fire(span, ctx)
            if span[1] - 1 + self.lateness_ms <= time:
                self._remove(span, ctx)

    def on_processing_timer(self, time: int, ctx: Context) -> None:
        for span in self._spans():
            if self.windows.get()[span][2] == time:
                self._fire(span, ctx)

    def _spans(self) -> Iterator[Span]:
        return iter(sorted(self.windows.get()))

    def _fire(self, span: Span, ctx: Context) -> None:
        accs = self.windows.get()[span][0]
        results = [part.result(acc) for part, acc in zip(self.aggregates, accs, strict=True)]
        is_global = span == GLOBAL
        times = (None, None) if is_global else (self._write_time(span[0]), self._write_time(span[1]))
        row = self._make_row((*self._key_values(ctx.key), *times, *results))
        ctx._emitted.append((MAIN, ctx.timestamp if is_global else span[1] - 1, row))
        if self.trigger.purge:
            self._remove(span, ctx)
        elif self.trigger.kind != "watermark":
            self.windows.put(span, (accs, 0, None))

    def _set_timers(self, span: Span, ctx: Context, watermark: int) -> None:
        """Set the future timers of a window. A complete window emits its result at each row, without a timer."""
        for time in self._times(span):
            if time > watermark:
                ctx.timers.at(time)

    def _times(self, span: Span) -> set[int]:
        """Return when a window is complete, if it emits its result then, and when it is over."""
        if span == GLOBAL:
            return set()
        over = span[1] - 1 + self.lateness_ms
        return {span[1] - 1, over} if self.trigger.kind == "watermark" else {over}

    def _remove(self, span: Span, ctx: Context) -> None:
        """Remove a window, and its timers unless another window of the key has the same ones."""
        fires_at = self.windows.get()[span][2]
        self.windows.remove(span)
        left = self.windows.get()
        if fires_at is not None and all(pane[2] != fires_at for pane in left.values()):
            ctx.timers.delete_processing_time(fires_at)
        times = self._times(span)
        if left:
            times -= {time for other in left for time in self._times(other)}
        for time in times:
            ctx.timers.delete(time)

    def _merged(self, span: Span, ctx: Context, watermark: int) -> Span:
        """Return the session into which a new one merges, or the new one itself. Absorbed sessions are removed."""
        found = [other for other in self._spans() if other[0] <= span[1] and span[0] <= other[1]]
        whole = (min(span[0], *(o[0] for o in found)), max(span[1], *(o[1] for o in found))) if found else span
        if not found or found == [whole]:
            return whole
        panes = [self.windows.get()[other] for other in found]
        accs = panes[0][0]
        for pane in panes[1:]:
            accs = tuple([part.merge(a, b) for part, a, b in zip(self.aggregates, accs, pane[0], strict=True)])
        fires_at = min((pane[2] for pane in panes if pane[2] is not None), default=None)
        for other in found:
            self._remove(other, ctx)
        self.windows.put(whole, (accs, sum(pane[1] for pane in panes), fires_at))
        if fires_at is not None:
            ctx.timers.at_processing_time(fires_at)
        self._set_timers(whole, ctx, watermark)
        return whole
