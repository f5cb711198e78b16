"""A checkpoint that does not fit its log, or that lies in another place than before, at the start of a pipeline: on a
real log and real files, without a JVM.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cutwater
from cutwater.errors import Refused, RunFenced
from cutwater.savepoints.files import LocalFiles
from cutwater.spark.savepoint.checkpoints import Checkpoint
from tests.spark.test_starts import T0, begun, checkpointed, program, published

ONE = {"glsn": 1, "slices": 4}


def test_an_old_copy_of_a_checkpoint_is_refused_at_the_start(log: cutwater.Client, tmp_path: Path) -> None:
    """Also one that is just one micro-batch old, and would plan that one anew: it would be taken for a repeated one."""
    own, place = program("copied-back", log), tmp_path / "run"
    log.append("pays", [{"user": "a", "amount": 1, "at": T0}])
    checkpointed(log, place, own, [ONE], done=0)
    begun(log, own, place)
    published(log, "copied-back", f"stopped {place}", 0)
    begun(log, own, place)
    (place / "offsets" / "0").unlink()
    with pytest.raises(Refused, match="old copy: micro-batch 0 of it is in the log, and none is planned there"):
        begun(log, own, place)
    for batch in range(2):
        (place / "offsets" / str(batch)).write_bytes(b"v1\n{}\n" + msgspec.json.encode(ONE))
    (place / "commits").mkdir()
    (place / "commits" / "0").write_bytes(b"v1\n{}")
    published(log, "copied-back", f"stopped {place}", 1)
    # Decided, and not noted as done: it is repeated.
    begun(log, own, place)
    (place / "offsets" / "1").unlink()
    with pytest.raises(Refused, match=r"micro-batch 1 of it is in the log, .*planned there is 0.*--from-savepoint"):
        begun(log, own, place)


def test_a_checkpoint_ahead_of_its_log_is_refused(tmp_path: Path) -> None:
    """A data directory that was copied has the same cluster key, so both copies have one place for checkpoints."""
    with cutwater.open(tmp_path / "data") as log:
        own = program("ahead", log)
        log.append("pays", [{"user": "a", "amount": 1, "at": T0}])
        checkpointed(log, tmp_path / "run", own, [ONE], done=1, key="k")
        begun(log, own, tmp_path / "run")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    with cutwater.open(tmp_path / "data") as log:
        published(log, "ahead", "k", 1)
        files = LocalFiles()
        for batch, offset in enumerate([ONE, {"glsn": int(log.tail()), "slices": 4}]):
            files.write(str(tmp_path / "run" / "offsets" / str(batch)), b"v1\n{}\n" + msgspec.json.encode(offset))
            files.write(str(tmp_path / "run" / "commits" / str(batch)), b"v1\n{}")
        begun(log, own, tmp_path / "run")
    with cutwater.open(tmp_path / "copy") as log:
        with pytest.raises(Refused, match=r"ahead of this log: it has read up to GLSN \d+, and the log ends at"):
            begun(log, own, tmp_path / "run")
        for _ in range(5):
            log.append("pays", [{"user": "a", "amount": 1, "at": T0}])
        with pytest.raises(Refused, match="micro-batch 1 is done there, and 0 is the last one in the log"):
            begun(log, own, tmp_path / "run")
        files.write(str(tmp_path / "run" / "metadata"), msgspec.json.encode({"id": "unknown"}))
        with pytest.raises(
            Refused, match=r"and the log has none of them\. .* give the pipeline a checkpoint of its own"
        ):
            begun(log, own, tmp_path / "run")


def test_a_driver_of_before_that_goes_on_meanwhile_is_no_old_copy(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, place, find_runs = program("goes-on", log), tmp_path / "run", log.find_runs
    checkpointed(log, place, own, [ONE], done=1, key="of a driver that goes on")

    def find_later(name: str) -> Any:
        """It plans a micro-batch and has it decided just before the log is asked."""
        (place / "offsets" / "1").write_bytes(b"v1\n{}\n" + msgspec.json.encode(ONE))
        published(log, "goes-on", "of a driver that goes on", 1)
        return find_runs(name)

    monkeypatch.setattr(log, "find_runs", find_later)
    begun(log, own, place)


def test_a_run_that_is_over_and_not_told_of_any_more_is_told_as_such(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log tells of the last runs only. One that it does not tell of does not make it an old copy."""
    own, place, find_runs = program("over", log), tmp_path / "run", log.find_runs
    checkpointed(log, place, own, [ONE], done=1, key="over")
    published(log, "over", "newer", 0)
    monkeypatch.setattr(log, "find_runs", lambda name: [run for run in find_runs(name) if run.key != "over"])
    with pytest.raises(RunFenced, match="publishes under the name 'over' now"):
        begun(log, own, place)


def test_a_checkpoint_that_was_moved_names_its_new_place(
    log: cutwater.Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark notes whole paths of state schemas, of this run and of runs before."""
    own, old, files = program("moves", log), tmp_path / "old", LocalFiles()
    checkpointed(log, old, own, [{"glsn": 2, "slices": 4}] * 2, done=2, key="moved")

    def schemas(place: Path) -> dict[str, Any]:
        """A note of the second micro-batch, and what it says besides."""
        paths = [f"file:{place}/state/0/_stateSchema/default/{name}" for name in ("0_state", '1_é"')]
        return {"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [{"stateSchemaFilePaths": paths}, {}]}

    for batch in (9, 10):
        files.write(f"{old}/state/0/_metadata/v2/{batch}", b"v2\n" + msgspec.json.encode(schemas(old)))
    files.write(f"{old}/state/0/_metadata/v2/.10.crc", b"of the old text")
    assert (Checkpoint(str(old), files).moved_from(), Checkpoint(str(old), files).follow_move()) == (None, None)
    (tmp_path / "state").mkdir()
    new = old.rename(tmp_path / "state" / "new")
    assert Checkpoint(str(new), files).moved_from() == f"file:{old}"
    begun(log, own, new)
    for batch in (9, 10):
        version, note = (new / f"state/0/_metadata/v2/{batch}").read_bytes().split(b"\n")
        assert (version, msgspec.json.decode(note)) == (b"v2", schemas(new))
    assert not (new / "state/0/_metadata/v2/.10.crc").exists()
    assert f"{new} was moved or copied from file:{old}" in caplog.text
    caplog.clear()
    begun(log, own, new)
    assert not caplog.text


def test_a_note_of_state_that_spark_removes_meanwhile_tells_nothing(tmp_path: Path) -> None:
    """It is asked for to explain another error, which must not be hidden."""
    notes = tmp_path / "state/0/_metadata/v2"
    notes.mkdir(parents=True)
    (notes / "3").symlink_to(notes / "removed after it was listed")
    assert Checkpoint(str(tmp_path), LocalFiles()).moved_from() is None
