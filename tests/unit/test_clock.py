from __future__ import annotations

from random import Random

import pytest

from cutwater.core.read.time_marks import BLOCK_MARKS, MARK_EVERY_US, Clock, TimeMark
from cutwater.types import GLSN, SECOND, CutTime


def cuts(seed: int, count: int) -> list[tuple[GLSN, CutTime, bool]]:
    """Random cuts: mostly close together, now and then a tick or a long silence."""
    rng = Random(seed)
    glsn, time, found = 0, 1_700_000_000 * SECOND, []
    for _ in range(count):
        is_tick = rng.random() < 0.4
        glsn += 1 if is_tick else rng.randrange(1, 5_000)
        time += rng.choice((1_000, 40_000, SECOND, 4 * SECOND, 31 * SECOND))
        found.append((GLSN(glsn), CutTime(time), is_tick))
    return found


def oracle(seen: list[tuple[GLSN, CutTime, bool]]) -> list[TimeMark]:
    """The rule of the module's docstring, word for word."""
    marks: list[TimeMark] = []
    for glsn, time, is_tick in seen:
        if is_tick or not marks or time - marks[-1].time >= MARK_EVERY_US:
            marks.append(TimeMark(glsn, time))
    return marks


@pytest.mark.parametrize("seed", range(6))
def test_marks_follow_from_the_cuts_alone(seed: int) -> None:
    seen = cuts(seed, 4 * BLOCK_MARKS)
    whole, parted = Clock(), Clock()
    for i, (glsn, time, is_tick) in enumerate(seen):
        whole.note(glsn, time, is_tick=is_tick)
        parted.note(glsn, time, is_tick=is_tick)
        if i % 333 == 0:
            parted = Clock(parted.blocks, parted.recent)
    expected = oracle(seen)
    assert len(whole.blocks) >= 1
    for clock in (whole, parted):
        assert clock.marks(GLSN(0), 10**9) == expected
    rng = Random(seed)
    for _ in range(50):
        after, limit = GLSN(rng.randrange(seen[-1][0] + 2)), rng.randrange(1, 2_000)
        assert whole.marks(after, limit) == [mark for mark in expected if mark.glsn > after][:limit]
        time = CutTime(rng.randrange(seen[0][1] - 5, seen[-1][1] + 5))
        assert whole.last_until(time) == max((mark.glsn for mark in expected if mark.time <= time), default=0)


def test_trim_forgets_whole_blocks_below_and_nothing_else() -> None:
    seen = cuts(1, 6 * BLOCK_MARKS)
    clock = Clock()
    for glsn, time, is_tick in seen:
        clock.note(glsn, time, is_tick=is_tick)
    blocks = clock.blocks
    assert len(blocks) >= 3
    before = GLSN(blocks[1].last_glsn)
    clock.trim(before)
    assert clock.blocks == blocks[1:]
    assert clock.marks(GLSN(before - 1), 10**9) == [mark for mark in oracle(seen) if mark.glsn >= before]


def test_a_mark_costs_a_few_bytes() -> None:
    clock = Clock()
    for i in range(4 * BLOCK_MARKS):
        clock.note(GLSN(1 + i * 700), CutTime(1_700_000_000_000_000 + i * MARK_EVERY_US), is_tick=False)
    assert all(len(block.packed) <= 8 * BLOCK_MARKS for block in clock.blocks)
