"""Defines the offsets of a pipeline's query, as Spark stores them in its checkpoint: a position, and the clocks there.
Also checks that the topics and the clocks of a program are those of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from cutwater.core.read.watermark import RULE, Punctuated, Strategy, ascending, require_known_rule
from cutwater.durations import shown
from cutwater.errors import InvalidArgument, NotFound, Refused
from cutwater.pipeline.clocks.clock import ClockSnapshot
from cutwater.pipeline.clocks.rule_one import AnyClock, with_rule
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.plan import Plan
from cutwater.types import MILLISECOND


class PipelineOffset(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An offset: everything at or below ``glsn`` is done.

    ``slices``: the number of slices that state is cut into. ``is_new``: nothing was done yet, so records that were
    trimmed before do not count as lost. ``ended``: the input ended there. ``firings``: how many timers that are
    registered at the end of the input fire, per key and operator. ``since``: in the end of the first micro-batch, the
    beginning of that micro-batch, as in ``spark.source.offsets``. ``rule``: the watermark rule with which the
    micro-batch up to here was planned. ``began``: the clocks where the micro-batch begins, if its start does not have
    them.
    """

    glsn: int
    slices: int
    clock: AnyClock | None = None
    is_new: bool = False
    ended: bool = False
    since: int | None = None
    firings: int = 0
    rule: int = RULE
    began: ClockSnapshot | None = None
    topics: dict[str, int] = {}
    """The numbers of the topics that were read. A topic that is created again under its name has another number."""
    trimmed: dict[str, int] = {}
    """The first positions of topics that were trimmed above the start of the micro-batch when the run began. Records
    before them do not count as lost."""

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        return {**made, "rule": self.rule}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PipelineOffset:
        whole = {"rule": 1, **given, "clock": with_rule(given.get("clock"))}
        require_known_rule(whole["rule"], "this checkpoint")
        try:
            return msgspec.convert(whole, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"{given} is no offset of a pipeline ({error}): does this checkpoint belong to one, and was it made by "
                "this version of Cutwater, or an older one?"
            ) from error


def require_same_topics(pipeline: str, offset: PipelineOffset, topics: Mapping[str, int]) -> None:
    """Refuse to go on from an offset if one of its topics was deleted or created again. ``topics`` has the numbers of
    the existing topics."""
    for name, before in offset.topics.items():
        if name not in topics:
            raise NotFound(
                f"pipeline {pipeline!r} reads the topic {name!r}, which was deleted: create it again and start with a "
                "new checkpoint, or change the program"
            )
        if before != topics[name]:
            raise Refused(
                f"pipeline {pipeline!r}: the topic {name!r} was deleted and created again: it was topic number "
                f"{before} when GLSN {offset.glsn} was read, and is number {topics[name]} now. What was not read of it "
                "is gone, and state and watermarks are those of the old one. To read the new one, start with a new "
                f"checkpoint (--checkpoint, checkpoint=…) after that position (--start {offset.glsn + 1}, "
                f"start={offset.glsn + 1})"
            )


def require_same_clocks(plan: Plan, sources: Mapping[str, SourceNode], clock: AnyClock) -> None:
    """Refuse a program whose watermarks differ from those of the checkpoint. State that was made under some watermarks
    would be inconsistent under others."""
    way_out = (
        "run the program as it was, or start from a savepoint (--from-savepoint), or name a new checkpoint "
        "(--checkpoint)"
    )
    for topic, strategy in clock.strategies.items():
        node = sources.get(topic)
        now = None if node is None or node.watermark is None else node.watermark.strategy
        if now == strategy:
            continue
        is_now = "the source is not read now" if node is None else f"it is {_shown(now)} now"
        hint = ""
        if now is None and strategy == ascending():
            hint = "give that source watermark=Watermark.ascending(), which was the default before; or "
        raise Refused(
            f"pipeline {plan.name!r}: the watermark of the source {topic!r} was {_shown(strategy)} when this "
            f"checkpoint was made, and {is_now}: {hint}{way_out}"
        )
    for operator in clock.operators:
        if frozenset(operator.topics) not in {*plan.source_sets, frozenset(sources)}:
            raise Refused(
                f"pipeline {plan.name!r}: no operator is fed from exactly {', '.join(operator.topics)} any more, as "
                f"one was when this checkpoint was made: {way_out}"
            )


def _shown(strategy: Strategy | None) -> str:
    if strategy is None:
        return "without a clock"
    kind = "punctuated" if isinstance(strategy, Punctuated) else f"bounded {shown(strategy.bound_us // MILLISECOND)}"
    return f"{kind}, idle after {shown(strategy.idle_after_us // MILLISECOND)}"
