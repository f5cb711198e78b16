"""Makes the subscriptions of a client, and closes them together with it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.read.positions import Position, Positions, TopicNames, check_order, check_start, check_stop
from cutwater.client.read.records import ColumnLayout
from cutwater.client.subscribe.stream_readers import Selection
from cutwater.client.subscribe.subscriptions import AsyncSubscription, SubscriptionRange, check_on_malformed
from cutwater.errors import InvalidArgument
from cutwater.runtime.deadlines import Deadline


class Subscribing:
    def __init__(self, catalogs: Catalogs, nodes: Nodes, positions: Positions) -> None:
        self._catalogs, self._nodes, self._positions = catalogs, nodes, positions
        self.known: weakref.WeakSet[AsyncSubscription[Any]] = weakref.WeakSet()

    def make(
        self,
        topics: TopicNames,
        start: Position,
        stop: int | datetime | None,
        follow: bool,
        seconds: float,
        make: Any,
        columns: Sequence[str] | None,
        on_malformed: str = "error",
    ) -> AsyncSubscription[Any]:
        """Make a subscription. ``make`` converts the rows: ``make_records`` or ``make_batches``."""
        selection = Selection(topics)
        if not isinstance(follow, bool):
            raise InvalidArgument(f"follow= is True or False, not {follow!r}")
        check_start(start)
        check_stop(stop)
        check_order(start, stop)
        skips_malformed = check_on_malformed(on_malformed)

        async def resolve(selection: Selection, deadline: Deadline) -> SubscriptionRange:
            return await self._positions.resolve(selection, start, stop, follow, deadline)

        subscription: AsyncSubscription[Any] = AsyncSubscription(
            self._catalogs,
            self._nodes,
            selection,
            resolve,
            make,
            columns,
            seconds,
            from_earliest=start == "earliest",
            patience=None if follow else seconds,
            skips_malformed=skips_malformed,
        )
        self.known.add(subscription)
        return subscription

    async def table(
        self,
        batches: AsyncSubscription[pa.RecordBatch],
        topics: TopicNames,
        columns: Sequence[str] | None,
        deadline: Deadline,
    ) -> pa.Table:
        """Return everything that a subscription to these topics and columns delivers until it ends."""
        found: list[pa.RecordBatch] = []
        async with batches:
            while some := await batches.take(timeout=max(deadline.left, 0.001)):
                found += some
        if not found:
            known = Selection(topics).topics(self._catalogs.view)
            schema = self._catalogs.view.schema(known[0]) if known else TopicSchema("")
            return ColumnLayout(schema, columns).schema.empty_table()
        try:
            return pa.Table.from_batches(found, found[-1].schema)
        except pa.ArrowInvalid:
            # An older part may lack columns that were added to the schema meanwhile.
            return pa.concat_tables([pa.Table.from_batches([batch]) for batch in found], promote_options="default")

    async def close(self) -> None:
        for subscription in list(self.known):
            await subscription.close()
