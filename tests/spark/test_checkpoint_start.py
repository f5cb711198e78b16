"""Which checkpoint an assignment of a job goes on from, whatever agents before it have left behind: on a real log and
real files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cutwater
from cutwater.agent.job.checkpoint_start import begin_checkpoint
from cutwater.errors import NotFound
from cutwater.savepoints.files import LocalFiles
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.spark.savepoint.succession import MARK, Succession, fence, mark_of
from cutwater.types import JobEpoch
from tests.spark.test_succession import ANEW, Before


def checkpoint(line: Path, epoch: int) -> Checkpoint:
    return Checkpoint(str(line / f"epoch-{epoch}"), LocalFiles())


def begun(before: Before, line: Path, epoch: int, given: int | None = None) -> Succession | None:
    """Begin an assignment. Returns the name of its predecessor."""
    place = checkpoint(line, epoch)
    begin_checkpoint(before.log, before.name, place, JobEpoch(epoch), "" if given is None else f"{line}/epoch-{given}")
    return mark_of(place)


def test_the_last_one_that_has_begun(log: cutwater.Client, tmp_path: Path) -> None:
    line = tmp_path / "begun-3"
    before = Before(log, line / "epoch-3", "line").done(2)
    (line / "epoch-4").mkdir()
    (line / "epoch-4" / "cutwater.lock").touch()
    # A later assignment is no business of this one.
    (line / "epoch-20").mkdir()
    assert begun(before, line, 6, 4) == Succession("epoch-3", 6, 1, True)
    # One that could not complete its copy.
    checkpoint(line, 8).files.write(f"{line}/epoch-8/{MARK}", b'{"predecessor":"epoch-6","job_epoch":8,"batch":1}')
    assert begun(before, line, 9, 8) == Succession("epoch-8", 9, 1, True)
    assert {file.name for file in (line / "epoch-9" / "offsets").iterdir()} == {"0", "1"}


def test_what_was_chosen_once_stays(log: cutwater.Client, tmp_path: Path) -> None:
    line = tmp_path / "begun-3"
    before = Before(log, line / "epoch-3", "stays").done(1)
    assert begun(before, line, 6) == Succession("epoch-3", 6, 0, True)
    # An earlier agent wakes up and begins.
    checkpoint(line, 5).files.write(f"{line}/epoch-5/{MARK}", b'{"predecessor":"epoch-3","job_epoch":5}')
    assert begun(before, line, 6) == Succession("epoch-3", 6, 0, True)


def test_one_that_copied_and_opened_nothing_is_passed_over(log: cutwater.Client, tmp_path: Path) -> None:
    """The assignment before it went on meanwhile, and has published its first batch."""
    line = tmp_path / "begun-3"
    before = Before(log, line / "epoch-3", "overtaken")
    before.plan(0)
    assert begun(before, line, 4) == Succession("epoch-3", 4, -1, True)
    before.keep_state(0)
    before.decide(0)
    assert begun(before, line, 5) == Succession("epoch-4", 5, 0, True)
    assert (line / "epoch-5" / "offsets" / "0").exists()
    fence(log, before.name, checkpoint(line, 5), ANEW, 5)


def test_a_line_begins_unless_it_has_published(log: cutwater.Client, tmp_path: Path) -> None:
    old, line = tmp_path / "begun-3", tmp_path / "begun-5"
    before = Before(log, old / "epoch-3", "begins").done(2)
    # From a savepoint: what was published before that line does not matter.
    assert begun(before, line, 5) is None
    assert begun(before, line, 6, 5) is None
    # A note, and no query yet.
    (line / "epoch-6").mkdir(parents=True)
    (line / "epoch-6" / "cutwater.json").write_bytes((old / "epoch-3" / "cutwater.json").read_bytes())
    assert begun(before, line, 7, 6) == Succession("epoch-6", 7, -1, True)
    assert (line / "epoch-7" / "cutwater.json").exists()
    run = log.open_run("begins", "another key", start=ANEW, job_epoch=8)
    log.publish(run, 0, [])
    for file in (path for path in line.rglob("*") if path.is_file()):
        file.unlink()
    with pytest.raises(
        NotFound, match=r"no checkpoint in .*begun-5/epoch-9, and run .* has decided batch 0: is the che"
    ):
        begun(before, line, 9, 8)


def test_a_checkpoint_that_is_in_no_line(log: cutwater.Client, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "elsewhere" / "old", "elsewhere").done(1)
    place = checkpoint(tmp_path / "begun-4", 4)
    begin_checkpoint(log, before.name, place, JobEpoch(4), str(before.path))
    assert mark_of(place) == Succession(str(before.path), 4, 0, True)
