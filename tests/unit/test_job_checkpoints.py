"""What a job goes on with, from what its checkpoint says and what was asked for."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cutwater.errors import Refused
from cutwater.jobs.job_file import Restored
from cutwater.jobs.messages import Ended, Moved, Progress, SavedPoint, Start, Taken, TakeSavepoint
from cutwater.savepoints.files import LocalFiles
from cutwater.savepoints.program import ProgramInfo
from cutwater.spark.job_program import ProgramRun, SavepointWish, restored, sizes
from cutwater.spark.savepoint.checkpoints import FORMAT, Checkpoint, Note, Origin

NOTE = Note(FORMAT, 1, "p", 5, 3, "log", ProgramInfo((), (), (), 1), {})


def test_a_checkpoint_keeps_the_sizes_that_it_was_made_with() -> None:
    """Also if a program that ran by itself made it, with other slices than the default."""
    assert sizes(Start("/c"), NOTE) == sizes(Start("/c", parallelism=3), NOTE) == (3, 5)
    with pytest.raises(Refused, match=r"made with parallelism 3, not 4: leave --parallelism .*take a savepoint"):
        sizes(Start("/c", parallelism=4), NOTE)


def test_a_new_checkpoint_has_the_sizes_that_are_wanted() -> None:
    assert sizes(Start("/c", parallelism=2), None) == (2, 16)
    assert sizes(Start("/c", parallelism=40), None) == (40, 40)
    assert 1 <= sizes(Start("/c"), None)[0] <= 16


UNUSED: Any = None


def test_a_savepoint_is_named_once_and_a_checkpoint_that_began_otherwise_hears_of_it(tmp_path: Path) -> None:
    """The note has what was allowed, so that a plain start goes on; and no savepoint is left out in silence."""
    checkpoint = Checkpoint(str(tmp_path), LocalFiles())

    def wish(savepoint: str, *, replay_output: bool = False, goes_on: bool = False) -> dict[str, Any]:
        start = Start(str(tmp_path), from_savepoint=savepoint, replay_output=replay_output, goes_on=goes_on)
        return ProgramRun(UNUSED, UNUSED, start, UNUSED)._beginning(checkpoint)

    whole = {"from_savepoint": "/s", "replay_output": True, "allow_non_restored_state": False}
    assert wish("/s", replay_output=True) == whole
    assert wish("/s", goes_on=True)["from_savepoint"] == "/s"
    checkpoint.write(msgspec.structs.replace(NOTE, origin=Origin("/s", "id", 7, None, may_replay=False)))
    assert wish("/s") == wish("/other/../s") == wish("file:///s") == {}
    assert wish("/s", replay_output=True) == whole
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").touch()
    assert wish("/s", replay_output=True) == {}
    assert wish("/other")["from_savepoint"] == "/other"
    checkpoint.write(NOTE)
    assert wish("/s", replay_output=True) == whole
    # A start that was refused does not stand in the way of a plain one.
    assert wish("/s", goes_on=True) == {}


class Run:
    """In the place of a pipeline that runs, which refuses savepoints until a micro-batch is done."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def savepoint(self, target: str, *, timeout: float) -> Any:
        point = self._checkpoint.point()
        made = SimpleNamespace(glsn=point.offset.glsn, run=SimpleNamespace(batch=point.batch), bytes=9)
        return SimpleNamespace(manifest=made)


def test_a_savepoint_waits_for_the_first_micro_batch(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path), LocalFiles())
    run, wish = Run(checkpoint), SavepointWish(TakeSavepoint("/s", 60), checkpoint)
    assert wish.taken(run) is None
    late = SavepointWish(TakeSavepoint("/s", 0), checkpoint).taken(run)
    assert late is not None
    assert late.error is not None
    assert "has not finished a micro-batch yet" in late.error.message
    (tmp_path / "metadata").write_text('{"id": "key"}')
    for name in ("commits", "offsets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").write_text('v1\n{}\n{"glsn": 3, "slices": 1}\n')
    assert restored(checkpoint, checkpoint.point(), None) == Restored(str(tmp_path), 3, 0)
    assert wish.taken(run) == Taken("/s", saved=SavedPoint(3, 0, 9))


@pytest.mark.parametrize("waits", [0, 2])
def test_a_run_that_ends_between_two_looks_tells_of_its_last_micro_batch(waits: int) -> None:
    """A bounded run is often over before the first look."""
    told: list[Any] = []
    left = iter([False] * waits)
    run = SimpleNamespace(wait=lambda seconds: next(left, True), progress={})
    looks = iter(Progress(batch, 2, 3, 0.0, 0, 0.0, None, 0, 0, 0.0) for batch in range(9))
    supervisor: Any = SimpleNamespace(tell=told.append, commands=queue.Queue())
    watcher = SimpleNamespace(look=lambda progress: next(looks))
    last = ProgramRun(supervisor, UNUSED, Start("/c"), UNUSED)._until_over(run, UNUSED, watcher)
    assert isinstance(last, Ended)
    assert [message.progress.batch for message in told if isinstance(message, Moved)] == list(range(waits + 1))
