from __future__ import annotations

import pytest

from cutwater.errors import Refused
from cutwater.jobs.messages import Start
from cutwater.savepoints.program import ProgramInfo
from cutwater.spark.checkpoints import FORMAT, Note
from cutwater.spark.job import sizes

NOTE = Note(FORMAT, 1, "p", 5, 3, "log", ProgramInfo((), (), (), 1), {})


def test_a_checkpoint_keeps_the_sizes_that_it_was_made_with() -> None:
    """Also if a program that ran by itself made it, with other slices than the default."""
    assert sizes(Start("/c"), NOTE) == sizes(Start("/c", parallelism=3), NOTE) == (3, 5)
    with pytest.raises(Refused, match="made with parallelism 3, not 4: leave --parallelism out"):
        sizes(Start("/c", parallelism=4), NOTE)


def test_a_new_checkpoint_has_the_sizes_that_are_wanted() -> None:
    assert sizes(Start("/c", parallelism=2), None) == (2, 16)
    assert sizes(Start("/c", parallelism=40), None) == (40, 40)
    assert 1 <= sizes(Start("/c"), None)[0] <= 16
