"""Simulated sinks: a driver and its tasks that stage rows and publish them, batch by batch.

A sink may die at any time and come back with its key, or another sink takes over its name while the old one continues.
The new one has lost the checkpoint: if its name has published, it is refused until it asks to publish the output again.
Like Spark, a sink repeats a batch that it does not know to be published, with other rows than before: the first
decision must stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutwater.core.requests import OpenRunRequest, PublishAnswer, PublishRequest, RunAnswer, RunStart, StreamInfo
from cutwater.errors import CutwaterError, OutputExists, RunFenced
from cutwater.testing.checkers.record import PublishOp
from cutwater.testing.simulator.clients import SimClient
from cutwater.testing.simulator.protocol import StageCall
from cutwater.testing.simulator.world import World
from cutwater.types import MILLISECOND, Batch, BatchNumber, Part, TopicId


class Sink(SimClient):
    """A sink. ``key`` and ``committed`` are in the checkpoint and outlive the driver."""

    def __init__(self, world: World, name: str, topics: tuple[str, ...]) -> None:
        super().__init__(world)
        self.name, self.key, self.topics = name, f"key {self.number}", topics
        self.committed = BatchNumber(-1)
        self.fenced = False
        self._replays = False
        self._run: RunAnswer | None = None
        self._staging = 0

    def on_start(self) -> None:
        self._calls.clear()
        self._run = None
        self.refresh(self._open)

    def _later(self, what: Callable[[], None], ms: int = 20) -> None:
        if not self.stopping and not self.fenced:
            self.after(int(self.rng.random() * ms * MILLISECOND), what)

    def _open(self) -> None:
        def answered(outcome: Any) -> None:
            if isinstance(outcome, RunAnswer):
                self._run = outcome
                self._later(self._next)
            elif isinstance(outcome, RunFenced):
                self.fenced = True
            else:
                if isinstance(outcome, OutputExists):
                    self._replays = True
                    self.record.replays.add(self.key)
                self._later(self._open, 60)

        self.ask(OpenRunRequest(self.name, self.key, start=RunStart(replay=self._replays)), answered)

    def _next(self) -> None:
        self.refresh(self._stage)

    # Tasks.

    def _stage(self) -> None:
        """Stage one attempt at the batch after the last one known to be published. Some tasks are repeated, and the
        rows of their first attempts are left behind."""
        parts: list[Part] = []
        self._staging += 1
        attempt = self._staging
        waiting = 0

        def staged(ok: bool) -> None:
            nonlocal waiting
            if attempt != self._staging:
                return
            waiting -= 1
            if not ok:
                self._staging += 1
                self._later(self._open, 60)
            elif waiting == 0 and self.rng.random() < 0.04:
                # The driver hangs, perhaps until the staged rows have expired.
                self.after(int(self.rng.random() * 1_200 * MILLISECOND), self._publish, tuple(parts))
            elif waiting == 0:
                self._publish(tuple(parts))

        for topic in self._choose_topics():
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                part = self._stage_part(topic, lambda ok: None) if self.rng.random() < 0.1 else None
                part = self._stage_part(topic, staged)
                if part is None:
                    self._staging += 1
                    self._later(self._next, 60)
                    return
                waiting += 1
                parts.append(part)
        if not parts:
            self._publish(())

    def _choose_topics(self) -> list[TopicId]:
        known = {topic.name: topic.topic for topic in self.catalog.topics}
        ours = [known[name] for name in self.topics if name in known]
        others = [topic for name, topic in known.items() if name not in self.topics]
        chosen = [topic for topic in ours if self.rng.random() < 0.8]
        return chosen + [topic for topic in others if self.rng.random() < 0.1]

    def _stage_part(self, topic: TopicId, done: Callable[[bool], None]) -> Part | None:
        """Stage rows of one task for one topic, on all members of an open stream."""
        streams = [info for info in self.catalog.streams if info.topic == topic and info.is_open and info.chain]
        if not streams or self._run is None:
            return None
        batch = BatchNumber(self.committed + 1)
        info: StreamInfo = streams[batch % len(streams)]
        part = f"part {len(self.record.staged) + 1}"
        payloads = self.record.staged[part] = []
        batches: list[Batch] = []
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            op = self.record.new_append(self.world.now, self.rng.choice((1, 2, 3)), self.event_time())
            op.part = part
            payloads.append(op.payload)
            batches.append(op.batch)
        call = StageCall(part, self._run.run, batch, self._run.generation, tuple(batches))
        left = len(info.chain)

        def answered(outcome: Any) -> None:
            nonlocal left
            left -= 1
            if outcome is not True:
                left = -1
                done(False)
            elif left == 0:
                done(True)

        for node in info.chain:
            self.call(("sn", node), call, 150 * MILLISECOND, answered)
        count = sum(b.count for b in batches)
        size = sum(len(b.body) for b in batches)
        generation = self._run.generation
        return Part(topic, info.stream, info.chain, part, generation, len(batches), count, size)

    # The driver's commit.

    def _publish(self, parts: tuple[Part, ...]) -> None:
        if self._run is None or self.stopping:
            return
        request = PublishRequest(self._run.run, BatchNumber(self.committed + 1), parts)

        def answered(outcome: Any) -> None:
            if isinstance(outcome, PublishAnswer):
                self.record.published.append(PublishOp(request.run, request.batch, outcome.topics))
                self.world.trace("published", self.number, request.run, request.batch, len(outcome.topics))
                if self.rng.random() < 0.9:
                    self.committed = request.batch
                # Otherwise the driver dies before its checkpoint records the batch, and repeats it.
                self._later(self._next)
            elif isinstance(outcome, RunFenced):
                self.fenced = True
            elif (outcome is None or outcome.retriable) and self.rng.random() < 0.7:
                self._later(lambda: self._publish(parts))
            else:
                self.world.trace("not published", outcome.code if isinstance(outcome, CutwaterError) else "timeout")
                self._later(self._open, 60)

        self.ask(request, answered, 250 * MILLISECOND)
