"""Tells the clocks of a pipeline about log streams that are created, sealed permanently, or trimmed. Also checks that
the clocks are those of the checkpoint.

Topics may be trimmed at different positions, and a run begins where the first of them begins. If the topic of a log
stream begins later, the log knows what the log stream had said by *that* position, but not what it had said earlier. Up
to that position the log stream counts as silent, and turns idle no earlier than its last entry allows. So the watermark
is never above the true one, and from that position on the log stream has its true state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from cutwater.core.read.watermark import Punctuated, Strategy, ascending
from cutwater.core.requests import StreamInfo, TopicInfo
from cutwater.durations import shown
from cutwater.errors import Refused
from cutwater.pipeline.clocks.clock import KnownStream, LogClock
from cutwater.pipeline.clocks.rule_one import AnyClock, RuleOneLogClock
from cutwater.pipeline.graph import SourceNode
from cutwater.pipeline.plan import Plan
from cutwater.types import GLSN, MILLISECOND


class StreamPast(Struct, frozen=True):
    """What a log stream had said before ``first``, where its topic begins."""

    first: GLSN
    said: KnownStream


def unheard(said: KnownStream) -> KnownStream:
    """Return the same log stream at an earlier position: its last entry is no later, and what it had said is not
    known."""
    return KnownStream(said.topic, said.stream, said.last_commit_us, None, None, ended=said.ended)


class Streams:
    """All log streams of a pipeline's sources during one walk. ``pasts`` are those of topics that begin above the start
    of the walk."""

    def __init__(self, streams: Iterable[tuple[TopicInfo, StreamInfo]], pasts: Sequence[StreamPast]) -> None:
        self._streams = sorted(streams, key=lambda pair: pair[1].created_at)
        self._pasts = sorted(pasts, key=lambda past: past.first, reverse=True)
        self._spoke = {past.said.stream: past.said.last_commit_us for past in pasts}

    def place(self, clock: LogClock | RuleOneLogClock, glsn: int) -> None:
        """Tell a clock about log streams that existed before a position. A log stream that was sealed permanently by
        then no longer counts."""
        for topic, info in self._streams:
            if info.created_at >= glsn:
                break
            stream = int(info.stream)
            is_known = clock.knows(topic.name, stream)
            if info.final and info.final_at < glsn:
                if is_known:
                    clock.end_stream(topic.name, stream)
            elif not is_known:
                clock.add_stream(topic.name, stream, self._spoke.get(stream, info.created_time))
        while self._pasts and self._pasts[-1].first <= glsn:
            assert isinstance(clock, LogClock), "rule 1 does not wait for trimmed topics"
            clock.recall(self._pasts.pop().said)

    def finish(self, clock: LogClock | RuleOneLogClock, end: int) -> None:
        """End the walk at a position: apply what is known by then, so that the next walk need not look it up."""
        if self._pasts and self._pasts[-1].first <= end + 1:
            self.place(clock, end + 1)


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
