"""Compares sensor readings with limits that change while the pipeline runs.

Run it: ``python examples/sensors.py``. It needs ``pip install cutwater[spark]`` and nothing else.

It shows broadcast state. A rule applies to exactly the readings that come after it in the log, on every worker and
after every crash, because both topics share one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import shared

import cutwater
from cutwater.pipeline import BroadcastFunction, BroadcastState, Pipeline, ValueState, Watermark

READINGS = "sensor string, kind string, value double, at timestamp"
RULES = "kind string, above double"


class Limits(BroadcastFunction):
    """Reports when a sensor goes above the limit of its kind, and when it comes back."""

    limits = BroadcastState("string", "double")
    is_high = ValueState("boolean", default=False)

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        limit = self.limits.get(record.kind)
        high = limit is not None and record.value > limit
        if high != self.is_high.get():
            self.is_high.set(high)
            state = "high" if high else "normal"
            yield {"sensor": ctx.key, "state": state, "value": record.value, "limit": limit, "at": record.at}

    def process_broadcast(self, record: Any, ctx: Any) -> None:
        if record.above is None:
            self.limits.remove(record.kind)
        else:
            self.limits.put(record.kind, record.above)


def pipeline(log: str = "") -> Pipeline:
    p = Pipeline("sensors", log=log)
    readings = p.source("readings", schema=READINGS, event_time="at", watermark=Watermark.ascending())
    rules = p.source("rules", schema=RULES)
    alerts = readings.broadcast(
        rules,
        key="sensor",
        function=Limits(),
        uid="limits",
        schema="sensor string, state string, value double, limit double, at timestamp",
    )
    alerts.sink("sensor-alerts", uid="alerts")
    return p


def fill(log: cutwater.Client) -> None:
    """Append readings, and between them the rules, each after the number of readings that it names."""
    columns = {"sensor": pa.string(), "kind": pa.string(), "value": pa.float64(), "at": pa.timestamp("us", "UTC")}
    log.create_topic("readings", schema=pa.schema(columns), event_time="at")
    log.create_topic("rules", schema=pa.schema({"kind": pa.string(), "above": pa.float64()}))
    readings = shared.rows("readings")
    sent = 0
    for rule in shared.rows("rules"):
        if rule["after"] > sent:
            log.append("readings", readings[sent : rule["after"]])
            sent = rule["after"]
        log.append("rules", [{"kind": rule["kind"], "above": rule["above"]}])
    log.append("readings", readings[sent:])


def main() -> None:
    with shared.opened(__doc__) as (log, checkpoint):
        fill(log)
        pipeline(log.servers).run(until="now", drain=True, checkpoint=checkpoint)
        shared.show(log, "sensor-alerts")


if __name__ == "__main__":
    main()
