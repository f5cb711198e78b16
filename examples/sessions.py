"""Groups clicks into visits, which end after a minute without a click, and handles clicks that come after their visit
has been counted.

Run it: ``python examples/sessions.py``. It needs ``pip install cutwater[spark]`` and nothing else.

It shows sessions that merge when a late click closes the gap between them, a result that is emitted again within the
allowed lateness, and a topic for the rows that came even later, so that they are not lost.
"""

from __future__ import annotations

import pyarrow as pa
import shared

from cutwater.pipeline import Pipeline, Session, Watermark

SCHEMA = "visitor string, page string, at timestamp"


def pipeline(log: str = "") -> Pipeline:
    p = Pipeline("sessions", log=log)
    clicks = p.source("clicks", schema=SCHEMA, event_time="at", watermark=Watermark.bounded("5s"))
    visits = clicks.window(
        key="visitor",
        window=Session("60s"),
        aggregate={"clicks": "count(*)", "entry": "first(page)", "exit": "last(page)"},
        allowed_lateness="30s",
        uid="visits",
    )
    visits.sink("visits", uid="visits-out")
    visits.late.sink("late-clicks", uid="late-clicks")
    visits.filter(lambda row: row.exit == "/pay").sink("purchases", uid="purchases")
    return p


def main() -> None:
    with shared.opened(__doc__) as (log, checkpoint):
        columns = {"visitor": pa.string(), "page": pa.string(), "at": pa.timestamp("us", "UTC")}
        log.create_topic("clicks", schema=pa.schema(columns), event_time="at")
        with log.producer("clicks", id="web") as producer:
            for row in shared.rows("clicks"):
                producer.send(row)
        pipeline(log.servers).run(until="now", drain=True, checkpoint=checkpoint)
        shared.show(log, "visits")
        shared.show(log, "late-clicks")
        shared.show(log, "purchases")


if __name__ == "__main__":
    main()
