"""The pipelines of ``test_savepoints``: one whose output is compared with ``Pipeline.test``, and one with many keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutwater.pipeline import (
    BroadcastFunction,
    BroadcastState,
    ListState,
    OperatorListState,
    PartitionFunction,
    Pipeline,
    ProcessFunction,
    Tumbling,
    UnionListState,
    ValueState,
    Watermark,
)

ROWS = "user string, amount int, at bigint"
TOTALS = "user string, n int, total int"


class Totals(ProcessFunction):
    """Counts and sums per user, and gives both again, as negative numbers, a minute after the last payment."""

    n = ValueState("int", default=0)
    recent = ListState("int", ttl="1h")
    due = ValueState("bigint")

    factor = 1

    def process(self, record: Any, ctx: Any) -> Any:
        self.n.set(self.n.get() + 1)
        self.recent.append(record.amount)
        if self.due.get() is not None:
            ctx.timers.delete(self.due.get())
        self.due.set(ctx.timestamp + 60_000)
        ctx.timers.at(self.due.get())
        return {"user": ctx.key, "n": self.n.get(), "total": self.factor * sum(self.recent.get())}

    def on_timer(self, time: int, ctx: Any) -> Any:
        self.due.clear()
        return {"user": ctx.key, "n": -self.n.get(), "total": -self.factor * sum(self.recent.get())}


class FixedTotals(Totals):
    """What it gives was wrong by a factor; and it keeps more: a wider count, and one state that is new."""

    n = ValueState("bigint", default=0)
    fresh = ValueState("string")
    factor = 10


class Limits(BroadcastFunction):
    """Lets through what is above the limit that was broadcast last."""

    limit = BroadcastState("string", "int")

    def process(self, record: Any, ctx: Any) -> Any:
        if record.amount > (self.limit.get("limit") or 0):
            yield {"user": record.user, "n": record.amount, "total": self.limit.get("limit")}

    def process_broadcast(self, record: Any, ctx: Any) -> None:
        self.limit.put("limit", record.amount)


def payments(name: str, log: str, function: Totals, out: str, *, reordered: bool = False) -> Pipeline:
    """``reordered``: the same operators in another order of the program."""
    p = Pipeline(name, log=log)
    pay = p.source("payments", schema=ROWS, event_time="at", watermark=Watermark.bounded("5s").idle_after(None))

    def totals() -> Any:
        return pay.process(key="user", function=function, uid="totals", schema=TOTALS)

    def windows() -> Any:
        return pay.window(
            key="user", window=Tumbling("20s"), aggregate={"n": "count(*)", "s": "sum(amount)"}, uid="windows"
        )

    if reordered:
        windows().sink(f"{out}-windows", uid="windows-out")
        totals().sink(out, uid="out")
    else:
        totals().sink(out, uid="out")
        windows().sink(f"{out}-windows", uid="windows-out")
    large = pay.filter(lambda row: row.amount > 90)
    pay.broadcast(large, key="user", function=Limits(), uid="limits", schema=TOTALS).sink(
        f"{out}-limits", uid="limited"
    )
    return p


class Reminder(ProcessFunction):
    """Gives every key once, at the time of its timer."""

    seen = ValueState("bigint")

    def process(self, record: Any, ctx: Any) -> None:
        pass

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        yield {"user": ctx.key, "n": self.seen.get()}
        self.seen.clear()


class Sharing(PartitionFunction):
    items = OperatorListState("string")
    rules = UnionListState("string")

    def process(self, record: Any, ctx: Any) -> None:
        if record.user.startswith("item"):
            self.items.append(record.user)
            self.rules.append(record.user)


def reminders(log: str, partitions: int) -> Pipeline:
    p = Pipeline("reminders", log=log)
    rows = p.source("clock", schema=ROWS, event_time="at", watermark=Watermark.ascending().idle_after(None))
    rows.process(key="user", function=Reminder(), uid="reminder", schema="user string, n bigint").sink(
        "told", uid="out"
    )
    rows.process_partition(function=Sharing(), parallelism=partitions, uid="sharing", schema=ROWS).sink(
        "shared", uid="shared"
    )
    return p
