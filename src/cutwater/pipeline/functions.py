"""Defines the base classes of users' functions. An operator works on a copy of the function, one per slice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.pipeline.context import Context
from cutwater.pipeline.rows import Row

Emitted: TypeAlias = Iterable[Any] | None
"""What a call emits: rows or dicts, yielded or in a list; one dict or row by itself; or nothing."""


class _WithTimers:
    def on_timer(self, time: int, ctx: Context) -> Emitted:
        """Handle a timer of ``ctx.key``: the watermark, which is ``ctx.watermark``, has reached its time."""
        return None

    def on_processing_timer(self, time: int, ctx: Context) -> Emitted:
        """Handle a timer of ``ctx.key``: processing time has reached its time."""
        return None


class ProcessFunction(_WithTimers, ABC):
    """A function of the records of one keyed stream."""

    @abstractmethod
    def process(self, record: Row, ctx: Context) -> Emitted:
        """Process a record of the stream."""


class CoProcessFunction(_WithTimers, ABC):
    """A function of two keyed streams, which share keys, state, timers and one clock."""

    @abstractmethod
    def process1(self, record: Row, ctx: Context) -> Emitted:
        """Process a record of the stream that ``connect`` was called on."""

    @abstractmethod
    def process2(self, record: Row, ctx: Context) -> Emitted:
        """Process a record of the stream that was connected to it."""


class BroadcastFunction(_WithTimers, ABC):
    """A function of a keyed stream and of a second one that all keys see, in ``BroadcastState``."""

    @abstractmethod
    def process(self, record: Row, ctx: Context) -> Emitted:
        """Process a record of the keyed stream."""

    @abstractmethod
    def process_broadcast(self, record: Row, ctx: Context) -> Emitted:
        """Process a record that all keys see from the next position on. This runs once per slice, so it must have no
        effects other than state and output; its output is taken once."""


class PartitionFunction(ABC):
    """A function of one of ``parallelism`` partitions of a stream without keys. It has list and union state."""

    @abstractmethod
    def process(self, record: Row, ctx: Context) -> Emitted:
        """Process a record of the partition."""


class BatchFunction(ABC):
    """A function of whole Arrow batches: all records of one key group in a micro-batch, in order.

    The batch has the reserved column ``_cw``, which a returned batch must keep: its rows inherit the positions in it.
    State is kept per key group; for state per key, use a ``MapState``. How the records of a key group are divided into
    batches is not defined, so the function must return the same result for every division.
    """

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch | pa.Table | None:
        """Process a batch and return its result, or None."""
