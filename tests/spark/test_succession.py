"""The checkpoint of an assignment of a job begins from that of the assignment before: on a real log and real files,
without a JVM, except where files are those of Hadoop.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.client.publish.runs import InputRange, RunStart
from cutwater.errors import (
    BatchDiffers,
    CheckpointDamaged,
    CutwaterError,
    InvalidArgument,
    NotFound,
    Refused,
    RunFenced,
    Unavailable,
)
from cutwater.savepoints.files import Files, LocalFiles
from cutwater.spark.pipeline.program import Program
from cutwater.spark.savepoint import succession
from cutwater.spark.savepoint.checkpoints import Checkpoint
from cutwater.spark.savepoint.files import HadoopFiles
from cutwater.spark.savepoint.savepoint_restore import Wish, beginning
from cutwater.spark.savepoint.succession import MARK, Succession, begin_from, fence, mark_of, named_in, needed
from cutwater.types import GLSN
from tests.spark.test_starts import NO_SPARK, T0, program

ANEW = RunStart(replay=True)
OPERATOR = b'v2\n{"stateStoreInfo":[{"stateSchemaFilePaths":["%s/state/0/_stateSchema/default/0_a"]}]}'


def snapshot(*names: str) -> bytes:
    """What Spark stores of a snapshot, besides the files that it names."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        files = [{"localFileName": "1.sst", "dfsSstFileName": name, "sizeBytes": 3} for name in names]
        archive.writestr("metadata", b"v1\n" + msgspec.json.encode({"sstFiles": files}))
    return made.getvalue()


def offset(glsn: int) -> bytes:
    return b"v1\n{}\n" + msgspec.json.encode({"glsn": glsn, "slices": 4})


class Before:
    """The checkpoint of an earlier assignment, whose driver has planned, decided and noted some batches."""

    def __init__(self, log: cutwater.Client, path: Path, name: str, epoch: int = 3) -> None:
        self.log, self.path, self.name, self.epoch, self.key = log, path, name, epoch, f"key of {name}"
        self.own: Program = program(name, log)
        log.append("pays", [{"user": "a", "amount": 1, "at": T0}] * 30)
        self.files = LocalFiles()
        beginning(NO_SPARK, log, self.own, str(path), Wish(None, True, job_epoch=epoch))
        self.write("metadata", msgspec.json.encode({"id": self.key}))

    def write(self, name: str, data: bytes) -> None:
        self.files.write(str(self.path / name), data)

    def plan(self, batch: int) -> None:
        self.write(f"offsets/{batch}", offset(batch + 1))
        if not batch:
            schema = OPERATOR % self.files.qualified(str(self.path)).encode()
            self.write("state/0/_metadata/v2/0", schema)
            self.write("state/0/_stateSchema/default/0_a", b"schema")

    def keep_state(self, batch: int) -> None:
        """The state after the batch, in two stores; of the first one, there is a snapshot in between."""
        for partition in (0, 1):
            self.write(f"state/0/{partition}/{batch + 1}.changelog", b"%d %d" % (partition, batch + 1))
        if batch == 2:
            self.write("state/0/0/SSTs/a.sst", b"sst")
            self.write("state/0/0/SSTs/unfinished.sst", b"s")
            self.write("state/0/0/3.zip", snapshot("a.sst"))

    def decide(self, batch: int) -> None:
        run = self.log.open_run(self.name, self.key, start=ANEW, job_epoch=self.epoch)
        self.log.publish(run, batch, [], read=InputRange(GLSN(batch), GLSN(batch + 1)))

    def note(self, batch: int) -> None:
        self.write(f"commits/{batch}", b"v1\n{}")

    def done(self, count: int) -> Before:
        for batch in range(count):
            for step in (self.plan, self.keep_state, self.decide, self.note):
                step(batch)
        return self


def tree(path: Path, *left_out: str) -> dict[str, bytes]:
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if name not in left_out}


def succeeded(
    before: Before, place: Path, epoch: int = 4, *, predecessor: Path | None = None, files: Files | None = None
) -> dict[str, bytes]:
    checkpoint = Checkpoint(str(place), files or LocalFiles())
    begin_from(before.log, before.name, checkpoint, str(predecessor or before.path), epoch)
    return tree(place, MARK)


def test_it_begins_after_the_last_decided_batch_and_leaves_the_other_as_it_is(
    log: cutwater.Client, tmp_path: Path
) -> None:
    before = Before(log, tmp_path / "epoch-3", "done").done(5)
    before.plan(5)
    before.keep_state(5)
    old = tree(before.path)
    found = succeeded(before, tmp_path / "epoch-4")
    assert tree(before.path) == old
    assert set(found) == {
        "metadata",
        "cutwater.json",
        *("offsets/3", "offsets/4", "commits/4"),
        *("state/0/0/3.zip", "state/0/0/SSTs/a.sst", "state/0/0/4.changelog", "state/0/0/5.changelog"),
        *(f"state/0/1/{version}.changelog" for version in range(1, 6)),
        *("state/0/_metadata/v2/0", "state/0/_stateSchema/default/0_a"),
    }
    # Spark stores full paths: they name the new place.
    assert str(tmp_path / "epoch-4").encode() in found.pop("state/0/_metadata/v2/0")
    assert all(old[name] == data for name, data in found.items())
    assert mark_of(Checkpoint(str(tmp_path / "epoch-4"), before.files)) == Succession("epoch-3", 4, 4, True)
    with pytest.raises(RunFenced):
        before.decide(5)
    # What one directory removes stays in the other.
    shutil.rmtree(before.path / "state")
    assert (tmp_path / "epoch-4" / "state/0/0/5.changelog").read_bytes() == b"0 5"
    begin = beginning(NO_SPARK, log, before.own, str(tmp_path / "epoch-4"), Wish(job_epoch=4))
    assert begin.savepoint is None


def test_a_batch_that_is_decided_and_not_noted_is_run_again_from_the_state_before(
    log: cutwater.Client, tmp_path: Path
) -> None:
    before = Before(log, tmp_path / "epoch-3", "decided").done(2)
    for step in (before.plan, before.keep_state, before.decide):
        step(2)
    found = succeeded(before, tmp_path / "epoch-4")
    names = {name for name in found if name[0] in "oc" and name != "cutwater.json"}
    assert names == {"offsets/0", "offsets/1", "offsets/2", "commits/1"}
    assert {name for name in found if name.startswith("state/0/0/")} == {
        "state/0/0/1.changelog",
        "state/0/0/2.changelog",
    }


def test_before_the_first_batch_is_done_there_is_no_state(log: cutwater.Client, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "epoch-3", "first")
    for step in (before.plan, before.keep_state, before.decide):
        step(0)
    assert set(succeeded(before, tmp_path / "epoch-4")) == {"metadata", "cutwater.json", "offsets/0"}


def test_if_nothing_is_decided_the_run_is_opened_before_anything_starts(log: cutwater.Client, tmp_path: Path) -> None:
    """The earlier driver may come first all the same: then the copy is made anew."""
    before = Before(log, tmp_path / "epoch-3", "nothing")
    before.plan(0)
    place = tmp_path / "epoch-4"
    assert set(succeeded(before, place)) == {"metadata", "cutwater.json"}
    before.keep_state(0)
    before.decide(0)
    checkpoint = Checkpoint(str(place), before.files)
    with pytest.raises(Unavailable, match="batch 0 was decided while"):
        fence(log, before.name, checkpoint, ANEW, 4)
    with pytest.raises(RunFenced):
        before.decide(1)
    assert set(succeeded(before, place)) == {"metadata", "cutwater.json", "offsets/0"}
    fence(log, before.name, checkpoint, ANEW, 4)


def test_a_copy_that_was_not_completed_is_made_anew_wherever_it_stopped(log: cutwater.Client, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "epoch-3", "crashes").done(4)
    wanted = {name.replace("whole", "part") for name in succeeded(before, tmp_path / "whole")}

    class Crashing(LocalFiles):
        def __init__(self, after: int) -> None:
            self.left = after

        def _step(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        def write(self, path: str, data: bytes) -> None:
            self._step()
            super().write(path, data)

        def copy(self, source: str, target: str) -> None:
            self._step()
            super().copy(source, target)

    steps = 0
    while True:
        place = tmp_path / "part" / str(steps)
        try:
            succeeded(before, place, files=Crashing(steps))
            break
        except KeyboardInterrupt:
            # Another assignment may find it like this, too: it takes the one before.
            other = succeeded(before, tmp_path / "other" / str(steps), 4, predecessor=place if steps else None)
            assert set(other) == wanted
            assert set(succeeded(before, place)) == wanted
        steps += 1
    assert steps > len(wanted)


def test_what_is_done_is_not_done_again(log: cutwater.Client, tmp_path: Path) -> None:
    before, place = Before(log, tmp_path / "epoch-3", "again").done(2), tmp_path / "epoch-4"
    succeeded(before, place)
    (place / "offsets" / "2").write_bytes(offset(3))
    shutil.rmtree(before.path)
    assert "offsets/2" in succeeded(before, place)
    for predecessor, epoch in ((before.path, 5), (tmp_path / "elsewhere", 4)):
        with pytest.raises(Refused, match=r"begun by assignment 4 from .*epoch-3"):
            succeeded(before, place, epoch, predecessor=predecessor)


def test_a_directory_in_use_and_an_assignment_without_a_number_are_refused(
    log: cutwater.Client, tmp_path: Path
) -> None:
    before = Before(log, tmp_path / "epoch-3", "in-use").done(1)
    other = Before(log, tmp_path / "epoch-4", "in-use-too")
    with pytest.raises(Refused, match="is in use, and was not begun from"):
        succeeded(before, other.path)
    with pytest.raises(InvalidArgument, match="give job_epoch"):
        succeeded(before, tmp_path / "epoch-5", 0)


def test_an_assignment_that_is_over_begins_nothing(log: cutwater.Client, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "epoch-3", "over").done(1)
    succeeded(before, tmp_path / "epoch-5", 5)
    with pytest.raises(RunFenced):
        succeeded(before, tmp_path / "epoch-4", 4)
    with pytest.raises(Refused, match="belongs to the job 'over'"):
        beginning(NO_SPARK, log, before.own, str(before.path), Wish())


def test_a_predecessor_that_is_missing_is_refused_if_anything_was_decided(log: cutwater.Client, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "epoch-3", "missing")
    assert succeeded(before, tmp_path / "epoch-4", predecessor=tmp_path / "never") == {}
    before.done(1)
    with pytest.raises(NotFound, match="has decided batch 0: is the checkpoint root there on this machine"):
        succeeded(before, tmp_path / "epoch-5", 5, predecessor=tmp_path / "never")


def _old_copy(before: Before) -> None:
    before.decide(3)


def _lost_change(before: Before) -> None:
    (before.path / "state/0/1/2.changelog").unlink()


def _lost_table(before: Before) -> None:
    (before.path / "state/0/0/SSTs/a.sst").unlink()


def _broken_snapshot(before: Before) -> None:
    before.write("state/0/0/3.zip", b"PK no zip")


def _torn_offset(before: Before) -> None:
    before.write("offsets/2", b"v1\n{")


@pytest.mark.parametrize(
    ("harm", "error", "told"),
    [
        (_old_copy, Refused, "old copy: micro-batch 3 of it is in the log"),
        (_lost_change, CheckpointDamaged, "the state after micro-batch 2 is not there"),
        (_lost_table, CheckpointDamaged, "the state after micro-batch 2 is not there"),
        (_broken_snapshot, CheckpointDamaged, "it is no snapshot of state"),
        (_torn_offset, CheckpointDamaged, "offsets/2 is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_predecessor_that_cannot_be_continued_is_refused(
    log: cutwater.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Before], None],
    error: type[CutwaterError],
    told: str,
) -> None:
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.0)
    before = Before(log, tmp_path / "epoch-3", f"harmed by{harm.__name__}".replace(" ", "-")).done(3)
    harm(before)
    with pytest.raises(error, match=told):
        succeeded(before, tmp_path / "epoch-4")
    mark = mark_of(Checkpoint(str(tmp_path / "epoch-4"), before.files))
    assert mark is not None
    assert not mark.is_done


def test_files_that_the_earlier_driver_removes_meanwhile_are_looked_for_again(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "LOOK_SECONDS", 0.0)
    before = Before(log, tmp_path / "epoch-3", "removes").done(5)

    class Replacing(LocalFiles):
        """The driver makes a snapshot, and removes what came before."""

        is_done = False

        def copy(self, source: str, target: str) -> None:
            if not self.is_done:
                self.is_done = True
                before.write("state/0/1/5.zip", snapshot())
                for version in range(1, 6):
                    (before.path / f"state/0/1/{version}.changelog").unlink()
            super().copy(source, target)

    assert "state/0/1/5.zip" in succeeded(before, tmp_path / "epoch-4", files=Replacing())


def test_a_checkpoint_whose_last_batch_ends_elsewhere_than_it_was_decided_is_refused(
    log: cutwater.Client, tmp_path: Path
) -> None:
    before = Before(log, tmp_path / "run", "differs").done(2)
    before.write("offsets/1", offset(7))
    with pytest.raises(BatchDiffers, match=r"batch 1 of run .* GLSN 2 to 2, .*GLSN 7"):
        beginning(NO_SPARK, log, before.own, str(before.path), Wish(job_epoch=3))


@pytest.mark.parametrize(
    ("entries", "version", "wanted"),
    [
        ("", 3, ""),
        ("1.changelog 2.changelog 3.changelog", 2, "1.changelog 2.changelog"),
        ("1.zip 2.changelog 3.changelog 4.zip", 3, "1.zip 2.changelog 3.changelog"),
        ("1.zip 2.zip 2.changelog 3.changelog", 3, "2.zip 3.changelog"),
        ("3.zip", 3, "3.zip"),
        (".3.zip.unfinished 1.changelog SSTs 1.changelog.crc", 1, "1.changelog"),
        ("1_a-b.changelog 1_c.changelog 2_d.zip 3_e.changelog", 2, "1_a-b.changelog 1_c.changelog 2_d.zip"),
        ("1.changelog 3.changelog", 3, None),
        ("4.zip", 3, None),
    ],
)
def test_what_a_version_of_a_store_consists_of(entries: str, version: int, wanted: str | None) -> None:
    if wanted is None:
        with pytest.raises(FileNotFoundError):
            needed(entries.split(), version)
    else:
        assert needed(entries.split(), version) == wanted.split()


def test_what_a_snapshot_names() -> None:
    assert named_in(snapshot("b.sst", "a.sst"), "x") == ["SSTs/b.sst", "SSTs/a.sst"]
    with pytest.raises(CheckpointDamaged, match="x is damaged"):
        named_in(b"", "x")


def test_it_works_on_file_systems_of_hadoop(log: cutwater.Client, spark: SparkSession, tmp_path: Path) -> None:
    before = Before(log, tmp_path / "epoch-3", "hadoop").done(4)
    wanted, files = succeeded(before, tmp_path / "local"), HadoopFiles(spark)
    place = tmp_path / "epoch-4"
    checkpoint = Checkpoint(f"file://{place}", files)
    begin_from(log, before.name, checkpoint, f"file://{before.path}", 4)
    found = {name: data for name, data in tree(place, MARK).items() if not name.endswith(".crc")}
    assert found == {name: data.replace(b"/local/", b"/epoch-4/") for name, data in wanted.items()}
    with pytest.raises(FileNotFoundError):
        files.copy(f"file://{place}/nothing", f"file://{place}/other")
    assert files.entries(f"file://{place}/nothing") == {}
