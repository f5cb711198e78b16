"""What users derive their functions from. An operator works on a copy of the function, one per slice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.pipeline.context import Context
from cutwater.pipeline.rows import Row

Emitted: TypeAlias = Iterable[Any] | None
"""What a call emits: rows or dicts, yielded or in a list; one dict or row by itself; or nothing."""


class _WithTimers:
    def on_timer(self, time: int, ctx: Context) -> Emitted:
        """The watermark, which is ``ctx.watermark``, has reached the time of a timer of ``ctx.key``."""
        return None

    def on_processing_timer(self, time: int, ctx: Context) -> Emitted:
        """Processing time has reached the time of a timer of ``ctx.key``."""
        return None


class ProcessFunction(_WithTimers):
    """A function of the records of one keyed stream."""

    def process(self, record: Row, ctx: Context) -> Emitted:
        raise NotImplementedError


class CoProcessFunction(_WithTimers):
    """A function of two keyed streams, which share keys, state, timers and one clock."""

    def process1(self, record: Row, ctx: Context) -> Emitted:
        """A record of the stream that ``connect`` was called on."""
        raise NotImplementedError

    def process2(self, record: Row, ctx: Context) -> Emitted:
        """A record of the stream that was connected to it."""
        raise NotImplementedError


class BroadcastFunction(_WithTimers):
    """A function of a keyed stream and of a second one that all keys see, in ``BroadcastState``."""

    def process(self, record: Row, ctx: Context) -> Emitted:
        raise NotImplementedError

    def process_broadcast(self, record: Row, ctx: Context) -> Emitted:
        """A record that all keys see from the next position on. It runs once per slice, so it must have no effects
        other than state and output; what it emits is taken once.
        """
        raise NotImplementedError


class PartitionFunction:
    """A function of one of ``parallelism`` partitions of a stream without keys. It has list and union state."""

    def process(self, record: Row, ctx: Context) -> Emitted:
        raise NotImplementedError


class BatchFunction:
    """A function of whole Arrow batches: all records of one key group in a micro-batch, in order.

    The batch has the reserved column ``_cw``, which a returned batch must keep: its rows inherit the positions that it
    holds. State is kept per key group; for state per key, use a ``MapState``. How the records of a key group are
    divided into batches is not defined, so the function must give the same answer for every division.
    """

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch | pa.Table | None:
        raise NotImplementedError
