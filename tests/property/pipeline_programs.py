"""Random pipelines and random logs. Every stream has the columns k, t, v, so that anything can follow anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pipeline_oracle import Place

from cutwater.pipeline import (
    BroadcastFunction,
    BroadcastState,
    CoProcessFunction,
    ListState,
    MapState,
    Pipeline,
    ProcessFunction,
    Session,
    Sliding,
    Stream,
    Tumbling,
    ValueState,
    Watermark,
)

SCHEMA = "k string, t bigint, v bigint"
AGGREGATES = {
    "n": "count(*)", "total": "sum(v)", "least": "min(v)", "most": "max(v)", "mean": "avg(v)", "one": "first(v)",
    "other": "last(v)", "all": "collect_list(v)",
}  # fmt: skip


class Busy(ProcessFunction):
    """Uses every kind of state, timers before and after the watermark, side outputs, and fails now and then."""

    count = ValueState("bigint", default=0)
    recent = ListState("bigint", ttl=15)
    seen = MapState("bigint", "bigint")
    expiring = ValueState("bigint", ttl=7)

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        self.count.set(self.count.get() + 1)
        self.recent.append(record.v)
        self.seen.put(record.v % 4, record.t)
        ctx.timers.at(ctx.timestamp + record.v % 9 - 3)
        yield {"k": ctx.key, "t": ctx.timestamp, "v": self.count.get() + (self.expiring.get() or 0)}
        if (record.v + self.salt) % 7 == 0:
            raise ArithmeticError(f"seven at {ctx.glsn}")
        self.expiring.set(record.v)
        if record.v % 5 == 0:
            ctx.timers.delete(ctx.timestamp + 1)
            self.seen.remove(1)
        if record.v % 3 == 0:
            ctx.output("third", {"k": ctx.key, "t": ctx.watermark % 1_000, "v": len(self.recent.get())})
            ctx.timers.at_processing_time(ctx.processing_time + record.v)

    def on_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        if self.count.get() % 4 == 1:
            self.count.set(self.count.get() + 1)
            ctx.timers.at(time - self.count.get() % 3)
            ctx.timers.at(time + 6)
        if self.salt % 3 == 0:
            # As a heartbeat has it: when the input ends, only so many fire.
            ctx.timers.at(time + 4)
        if self.count.get() % 6 == 5:
            self.seen.put(9, time)
            raise ArithmeticError(f"timer {time}")
        yield {"k": ctx.key, "t": time, "v": sum(v for _, v in self.seen.items()) + ctx.glsn}
        if self.count.get() > 5:
            self.count.clear()
            self.seen.remove(2)

    def on_processing_timer(self, time: int, ctx: Any) -> Iterator[Any]:
        self.recent.clear()
        ctx.timers.at(time)
        yield {"k": ctx.key, "t": ctx.processing_time, "v": ctx.watermark % 1_000}


class Both(CoProcessFunction):
    """Remembers the one side, and answers with it on the other."""

    left = ListState("bigint")

    def process1(self, record: Any, ctx: Any) -> Any:
        self.left.append(record.v)
        ctx.timers.at(ctx.timestamp + 4)

    def process2(self, record: Any, ctx: Any) -> Any:
        return [{"k": ctx.key, "t": record.t, "v": v} for v in self.left.get()[-2:]]

    def on_timer(self, time: int, ctx: Any) -> Any:
        values = self.left.get()
        self.left.clear()
        return {"k": ctx.key, "t": time, "v": len(values)}


class Rules(BroadcastFunction):
    """'A rule at GLSN b applies to exactly the records after b.'"""

    rules = BroadcastState("bigint", "bigint")
    applied = ValueState("bigint", default=0)

    def process(self, record: Any, ctx: Any) -> Any:
        self.applied.set(self.applied.get() + 1)
        yield {"k": ctx.key, "t": self.applied.get(), "v": sum(v for _, v in self.rules.items())}

    def process_broadcast(self, record: Any, ctx: Any) -> Any:
        self.rules.put(record.v % 3, record.t)
        yield {"k": "rule", "t": ctx.timestamp, "v": ctx.glsn}


def split(row: Any) -> list[dict[str, Any]]:
    return [{"k": row.k + "ab"[i % 2], "t": row.t + i, "v": row.v // 2} for i in range(row.v % 3)]


def program(choice: random.Random) -> Pipeline:
    """A pipeline over one or two topics, with up to seven nodes and a sink for every stream."""
    p = Pipeline("random", max_parallelism=choice.choice([1, 5, 128]))
    streams = [
        p.source(topic, schema=SCHEMA, event_time="t", watermark=_watermark(choice))
        for topic in ("one", "two")[: choice.randint(1, 2)]
    ]
    for number in range(choice.randint(1, 5)):
        streams += _step(choice, streams, f"op{number}")
    for number, stream in enumerate(streams):
        stream.sink("all", uid=f"sink{number}")
    return p


def _watermark(choice: random.Random) -> Watermark:
    made = choice.choice(
        [Watermark.bounded(choice.randint(0, 12)), Watermark.ascending(), Watermark.punctuated()]
    )  # fmt: skip
    return made.idle_after(choice.choice([None, 20, 60]))


def _step(choice: random.Random, streams: list[Stream], uid: str) -> list[Stream]:
    one, two = choice.choice(streams), choice.choice(streams)
    kind = choice.choice("map filter flat_map union process process window window session connect broadcast".split())
    if kind == "map":
        return [one.map(lambda r: {"k": r.k, "t": r.t, "v": r.v + 1}, SCHEMA)]
    if kind == "filter":
        return [one.filter(lambda r: r.v % 4 != 1)]
    if kind == "flat_map":
        return [one.flat_map(split, SCHEMA)]
    if kind == "union":
        return [one.union(two)]
    if kind == "process":
        made = one.process(key="k", function=Busy(choice.randint(0, 6)), uid=uid, schema=SCHEMA, dead_letters=True)
        letters = made.dead_letters.map(lambda r: {"k": r.key or "", "t": r.time, "v": r.source_glsn}, SCHEMA)
        return [made, made.side("third", SCHEMA), letters]
    if kind == "connect":
        return [one.connect(two, key="k", function=Both(), uid=uid, schema=SCHEMA)]
    if kind == "broadcast":
        return [one.broadcast(two, key="k", function=Rules(), uid=uid, schema=SCHEMA)]
    window: Any = Session(choice.randint(1, 8)) if kind == "session" else _fixed(choice)
    made = one.window(
        key="k", window=window, aggregate=AGGREGATES, allowed_lateness=choice.choice([0, 0, 5, 30]), uid=uid
    )
    made.sink("windows", uid=f"{uid}-raw")
    short = made.map(lambda r: {"k": r.k, "t": r.window_start, "v": r.total}, SCHEMA)
    return [short, made.late] if choice.random() < 0.5 else [short]


def _fixed(choice: random.Random) -> Sliding:
    size = choice.randint(2, 12)
    if choice.random() < 0.5:
        return Tumbling(size, offset=choice.randint(0, size - 1))
    return Sliding(size, choice.randint(1, 6))


def log_of(choice: random.Random, topics: list[str], length: int) -> list[Place]:
    """Records in disorder on up to three streams per topic, heartbeats, ticks and gaps of time."""
    places: list[Place] = []
    glsn, cut, time = 0, 0, 0
    width = choice.randint(1, 3)
    for _ in range(length):
        glsn += choice.choice([1, 1, 1, 3])
        cut += choice.choice([0, 0, 1, 5, 5, 40 if choice.random() < 0.2 else 2])
        topic, stream = choice.choice(topics), choice.randint(1, width)
        declared = time - choice.randint(0, 9) if choice.random() < 0.5 else None
        kind = choice.random()
        if kind < 0.08:
            places.append(Place(glsn, cut))
        elif kind < 0.15:
            places.append(Place(glsn, cut, topic, stream, declared=declared, idle=choice.random() < 0.3))
        else:
            time += choice.choice([0, 1, 1, 2, 6])
            own = time - choice.choice([0, 0, 0, 3, 10, 25])
            row = (choice.choice("abcde"), own, choice.randint(0, 30))
            places.append(Place(glsn, cut, topic, stream, row, own, declared, choice.random() < 0.05))
    return places
