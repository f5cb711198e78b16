"""Checks the entries of one part while it is staged. Entries that cannot be read or ordered are refused, so that the
client that stages them gets the error, and not the node that must publish them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from cutwater.core.messages import PublishGroup
from cutwater.core.publish.staged import PartOrder, StagedPart
from cutwater.errors import InvalidArgument, Refused
from cutwater.format.bodies import BadBody, BodyForm, problem_with, read_checked
from cutwater.format.checksum import Buffer
from cutwater.format.entry_codec import EntryFrame, frames_in
from cutwater.runtime import system
from cutwater.storagenode.validation.content_checks import check_ahead, largest_of, malformed, needed
from cutwater.storagenode.validation.topic_forms import KnownTopics, TopicForms

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class PartChecks:
    """Checks of one part. For each message in order: ``prepare`` on the event loop, then ``check`` in a thread."""

    def __init__(self, part: StagedPart, topics: KnownTopics) -> None:
        self._part, self._topics = part, topics
        self._topic: TopicForms | None = None
        self._forms: dict[int, BodyForm] = {}
        self._last: bytes | None = None

    async def prepare(self, data: Buffer, in_thread: InThread) -> int:
        """Verify the frames, and load the schemas that they name. Return the memory needed to check them, one at a
        time."""
        order = self._part.order
        numbers = await in_thread(lambda: {frame.header.schema for frame in frames_in(data)})
        if order is not None:
            numbers = {order.number}
        for number in numbers - self._forms.keys():
            self._topic, form = await self._topics.form_of_topic(self._part.topic, number)
            self._forms[number] = form if order is None else _ordered(order, self._topic, form)
        topic = self._topic
        assert topic is not None, "a message has at least one frame"
        largest: int = await in_thread(lambda: max((needed(frame.body, topic) for frame in _verified(data)), default=0))
        return largest

    def check(self, data: Buffer) -> None:
        """Raise if any of these frames, which are verified, is invalid."""
        assert self._topic is not None, "the schemas are known"
        last, now = self._last, system.wall_time_ns() // 1_000
        for frame in _verified(data):
            if self._topic.ahead_us:
                check_ahead(self._topic, largest_of(frame.header.count), frame.header.time_max, now)
            if self._part.order is None:
                self._check(frame)
            else:
                last = self._check_ordered(frame, last)
        self._last = last

    def _check(self, frame: EntryFrame) -> None:
        assert self._topic is not None
        header = frame.header
        problem = problem_with(frame.body, self._forms[header.schema], header.count, header.time_min, header.time_max)
        if problem:
            raise malformed(self._topic, problem)

    def _check_ordered(self, frame: EntryFrame, last: bytes | None) -> bytes:
        from cutwater.format import merging  # noqa: PLC0415

        assert self._topic is not None
        header, order = frame.header, self._part.order
        assert order is not None
        if header.schema != order.number:
            raise InvalidArgument(f"an entry of schema {header.schema} is in an ordered part of schema {order.number}")
        try:
            block = read_checked(frame.body, self._forms[order.number], header.count, header.time_min, header.time_max)
        except BadBody as error:
            raise malformed(self._topic, str(error)) from None
        return merging.check_order(block, last)


def _verified(data: Buffer) -> Iterator[EntryFrame]:
    return frames_in(data, is_verified=True)


def _ordered(order: PartOrder, topic: TopicForms, form: BodyForm) -> BodyForm:
    """Return the form of the entries of an ordered part: the columns of the topic, followed by the positions."""
    from cutwater.format import merging  # noqa: PLC0415

    found = merging.form_of(order)
    if not found.rows.equals(form.schema) or order.event_time != form.event_time:
        raise InvalidArgument(
            f"an ordered part has the columns of schema {order.number} of topic {topic.name!r}, and then its positions"
        )
    return BodyForm(order.schema, order.event_time)


def check_binding(part: StagedPart, group: PublishGroup) -> None:
    """Raise if the part was staged by another principal than the publisher, and than the one for which it acts, or for
    another batch. What was staged or decided while access control was off is not bound."""
    if not part.owner or not group.publisher:
        return
    if part.owner not in (group.publisher, group.opener):
        raise Refused(
            f"staged part {part.part} was staged by another principal than the one that publishes it: stage and "
            "publish with tokens of the same principal"
        )
    if (part.run, part.batch, part.topic) != (group.run, group.batch, group.topic):
        raise Refused(
            f"staged part {part.part} is for batch {part.batch} of run {part.run}, topic number {part.topic}, and not "
            f"for batch {group.batch} of run {group.run}, topic number {group.topic}"
        )
