"""The copy of the access rules at one server: its lease, what it takes, and what it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from cutwater.access.access_copy import AccessCopy
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_rules import AccessRules
from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.access_copy import AccessNews, encode_rules
from cutwater.protocol.methods import Received
from cutwater.runtime import system
from cutwater.types import Revision

pytestmark = pytest.mark.asyncio

LEASE_MS = 10_000


class Clock(system.System):
    """A clock that goes on only when it is told to."""

    now = 100.0

    def __init__(self) -> None:
        self.monotonic = lambda: self.now  # type: ignore[method-assign, misc]


class Leader:
    """Answers as the leader does. ``delay`` is called before each answer."""

    def __init__(self, rules: AccessRules) -> None:
        self.rules = rules
        self.asked: list[Revision] = []
        self.delay: Callable[[], None] = lambda: None
        self.trouble: CutwaterError | None = None

    async def ask(self, revision: Revision) -> Received[AccessNews]:
        self.asked.append(revision)
        self.delay()
        if self.trouble is not None:
            raise self.trouble
        body = b"" if revision == self.rules.revision else encode_rules(self.rules)
        return Received(AccessNews(self.rules.revision, LEASE_MS), body)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    before = system.use(clock)
    yield clock
    system.use(before)


def rules(revision: int, mode: AccessMode = AccessMode.ENFORCED) -> AccessRules:
    return AccessRules(Revision(revision), mode)


async def test_the_lease_counts_from_when_the_question_was_sent(clock: Clock) -> None:
    copy, leader = AccessCopy(), Leader(rules(1))

    def take_long() -> None:
        clock.now += 3.0

    leader.delay = take_long
    await copy.pull(leader.ask)
    assert copy.lease_until == 100.0 + 10.0, "not 113: the answer took three seconds"
    clock.now = 109.9
    assert copy.is_valid
    clock.now = 110.0
    assert not copy.is_valid
    with pytest.raises(Unavailable, match="no contact to the leader"):
        raise copy.stale()


async def test_without_answers_the_lease_ends_and_an_answer_renews_it(clock: Clock) -> None:
    copy, leader = AccessCopy(), Leader(rules(1))
    await copy.pull(leader.ask)
    leader.trouble = Unavailable("cut off")
    clock.now += 5
    with pytest.raises(Unavailable):
        await copy.pull(leader.ask)
    assert copy.lease_until == 110.0
    clock.now += 6
    assert not copy.is_valid
    leader.trouble = None
    await copy.pull(leader.ask)
    assert copy.is_valid
    assert leader.asked == [0, 1, 1], "each question says which revision is applied"


async def test_only_enforcing_mode_needs_a_lease(clock: Clock) -> None:
    for mode in (AccessMode.OFF, AccessMode.PERMISSIVE):
        copy = AccessCopy()
        copy.take(rules(1, mode))
        assert copy.is_valid
    copy.take(rules(2))
    assert not copy.is_valid


async def test_older_rules_are_not_taken_and_renew_nothing(clock: Clock) -> None:
    copy = AccessCopy()
    await copy.pull(Leader(rules(5)).ask)
    clock.now += 5
    with pytest.raises(Unavailable, match="a leader that has been replaced"):
        await copy.pull(Leader(rules(4, AccessMode.OFF)).ask)
    assert (copy.view.revision, copy.is_on, copy.lease_until) == (5, True, 110.0)


async def test_after_a_start_a_secured_server_waits_for_the_rules(clock: Clock) -> None:
    copy = AccessCopy(was_secured=True)
    assert copy.is_on
    assert not copy.is_valid
    await copy.pull(Leader(rules(7)).ask)
    assert copy.is_valid
    # A cluster in which nothing about access control was ever decided.
    copy = AccessCopy(was_secured=True)
    await copy.pull(Leader(AccessRules()).ask)
    assert not copy.is_on


async def test_a_server_that_hears_that_it_is_on_waits_for_the_rules(clock: Clock) -> None:
    copy, leader = AccessCopy(), Leader(rules(3, AccessMode.OFF))
    await copy.pull(leader.ask)
    assert (copy.applied, copy.is_on, copy.is_valid) == (3, False, True)
    copy.expect_rules()
    assert (copy.applied, copy.is_on, copy.is_valid) == (-1, True, False)
    # It was turned off meanwhile, without another change.
    await copy.pull(leader.ask)
    assert (copy.applied, copy.is_on, copy.is_valid) == (3, False, True)
    copy.expect_rules()
    leader.rules = rules(4)
    await copy.pull(leader.ask)
    assert (copy.applied, copy.is_on, copy.is_valid) == (4, True, True)
    copy.expect_rules()
    assert copy.applied == 4, "it has the rules"


async def test_the_mode_is_durable_before_the_revision_counts_as_applied(clock: Clock) -> None:
    kept: list[tuple[bool, Revision]] = []

    async def keep(secured: bool) -> None:
        kept.append((secured, copy.applied))

    copy = AccessCopy(keep=keep)
    leader = Leader(rules(3, AccessMode.OFF))
    await copy.pull(leader.ask)
    assert (kept, copy.applied) == ([], 3)
    leader.rules = rules(4)
    await copy.pull(leader.ask)
    assert (kept, copy.applied) == ([(True, 3)], 4)
    leader.rules = rules(5)
    await copy.pull(leader.ask)
    leader.rules = rules(6, AccessMode.OFF)
    await copy.pull(leader.ask)
    assert (kept, copy.applied) == ([(True, 3), (False, 5)], 6)


async def test_a_rule_that_cannot_be_kept_is_not_confirmed(clock: Clock) -> None:
    async def keep(secured: bool) -> None:
        raise Unavailable("the disk is full")

    copy = AccessCopy(keep=keep)
    leader = Leader(rules(1))
    with pytest.raises(Unavailable, match="the disk is full"):
        await copy.pull(leader.ask)
    assert (copy.applied, copy.is_on, copy.is_valid) == (0, True, False), "it acts by the rules, and confirms nothing"


async def test_changes_are_told_with_the_view_before(clock: Clock) -> None:
    told: list[tuple[Revision, Revision]] = []
    copy = AccessCopy(on_change=lambda before: told.append((before.revision, copy.view.revision)))
    for revision in (1, 1, 3, 2):
        copy.take(rules(revision))
    assert told == [(0, 1), (1, 3)]


async def test_a_nudge_asks_at_once_and_confirms_at_once() -> None:
    copy, leader = AccessCopy(), Leader(rules(0, AccessMode.OFF))
    task = asyncio.get_running_loop().create_task(copy.pull_for_ever(leader.ask, every_seconds=1_000))
    try:
        await _turns()
        leader.rules = rules(1)
        await _turns()
        assert copy.view.revision == 0
        copy.nudge(Revision(1))
        await _turns()
        assert copy.view.revision == 1
        assert leader.asked == [0, 0, 1], "the last question confirms revision 1"
        copy.nudge(Revision(1))
        await _turns()
        assert len(leader.asked) == 3, "nothing is new"
    finally:
        task.cancel()


async def test_an_unforeseen_error_does_not_end_the_questions(caplog: pytest.LogCaptureFixture) -> None:
    copy, leader = AccessCopy(), Leader(rules(0, AccessMode.OFF))

    def broken() -> None:
        raise OSError("unforeseen")

    leader.delay = broken
    task = asyncio.get_running_loop().create_task(copy.pull_for_ever(leader.ask, every_seconds=1_000))
    try:
        await _turns()
        leader.delay = lambda: None
        leader.rules = rules(1)
        copy.nudge(Revision(1))
        await _turns()
        assert (copy.view.revision, copy.is_on) == (1, True)
        assert "unforeseen" in caplog.text
    finally:
        task.cancel()


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
