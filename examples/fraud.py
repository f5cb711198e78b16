"""Detects stolen cards: thieves try a card with a tiny payment, and within a minute make a huge one.

Run it: ``python examples/fraud.py``. It needs ``pip install cutwater[spark]`` and nothing else.

It shows state per user, and a timer that forgets a small payment after a minute *of event time*, even if payments come
late or out of order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import shared

from cutwater.pipeline import Pipeline, ProcessFunction, Tumbling, ValueState, Watermark

SCHEMA = "user string, amount double, card string, at timestamp"
MINUTE_MS = 60_000


class TestCharge(ProcessFunction):
    """Remembers a small payment for a minute, and raises an alert if a large one follows."""

    small = ValueState("double")
    forget_at = ValueState("bigint")

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        small = self.small.get()
        if small is not None and record.amount > 500:
            yield {"user": ctx.key, "card": record.card, "small": small, "large": record.amount, "at": record.at}
        if record.amount < 2:
            self.small.set(record.amount)
            if self.forget_at.get() is not None:
                ctx.timers.delete(self.forget_at.get())
            self.forget_at.set(ctx.timestamp + MINUTE_MS)
            ctx.timers.at(self.forget_at.get())

    def on_timer(self, time: int, ctx: Any) -> None:
        self.small.clear()
        self.forget_at.clear()


def pipeline(log: str = "") -> Pipeline:
    p = Pipeline("fraud", log=log)
    payments = p.source("payments", schema=SCHEMA, event_time="at", watermark=Watermark.bounded("5s"))
    alerts = payments.process(
        key="user",
        function=TestCharge(),
        uid="test-charge",
        schema="user string, card string, small double, large double, at timestamp",
    )
    alerts.sink("alerts", uid="alerts")
    per_minute = payments.window(
        key="user", window=Tumbling("5m"), aggregate={"payments": "count(*)", "spent": "sum(amount)"}, uid="spending"
    )
    per_minute.filter(lambda row: row.spent > 300).sink("big-spenders", uid="big-spenders")
    return p


def main() -> None:
    with shared.opened(__doc__) as (log, checkpoint):
        columns = {"user": pa.string(), "amount": pa.float64(), "card": pa.string(), "at": pa.timestamp("us", "UTC")}
        log.create_topic("payments", schema=pa.schema(columns), event_time="at")
        with log.producer("payments", id="till") as producer:
            for row in shared.rows("payments"):
                producer.send(row)
        pipeline(log.servers).run(until="now", drain=True, checkpoint=checkpoint)
        shared.show(log, "alerts")
        shared.show(log, "big-spenders")


if __name__ == "__main__":
    main()
