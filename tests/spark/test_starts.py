"""What is looked at before a pipeline starts and after it is stopped, on a real log and real files, without a JVM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.errors import InvalidArgument, PipelineFailed, Refused, Unavailable
from cutwater.jobs.messages import Savepoint as SavepointWanted
from cutwater.pipeline import Pipeline, ProcessFunction, Session, Tumbling, ValueState
from cutwater.savepoints import Manifest, Savepoint, diff, new_savepoint
from cutwater.savepoints.files import LocalFiles
from cutwater.savepoints.manifest import RunPoint
from cutwater.savepoints.program import ProgramInfo, described
from cutwater.savepoints.writing import write_savepoint
from cutwater.spark import savepoints
from cutwater.spark.checkpoints import Checkpoint, require_same_program
from cutwater.spark.job import SavepointWish
from cutwater.spark.options import Where
from cutwater.spark.pipeline_errors import WorkerFailed
from cutwater.spark.pipeline_planning import Offset
from cutwater.spark.pipeline_program import Program
from cutwater.spark.pipeline_sink import PipelineWriter
from cutwater.spark.pipeline_source import PipelineReader, RunOptions
from cutwater.spark.restoring import Beginning, Wish, beginning
from cutwater.spark.run import PipelineRun, Query, program_of
from cutwater.types import GLSN

SCHEMA = pa.schema({"user": pa.string(), "amount": pa.int64(), "at": pa.timestamp("us", "UTC")})
T0 = datetime(2026, 1, 1, tzinfo=UTC)
NO_SPARK: Any = None
UNUSED_SPARK: Any = SimpleNamespace(
    sparkContext=SimpleNamespace(addJobTag=lambda tag: None, removeJobTag=lambda tag: None)
)
"""It takes the mark of jobs that have a deadline, and no jobs."""


class Last(ProcessFunction):
    last = ValueState("bigint")

    def process(self, record: Any, ctx: Any) -> None:
        self.last.set(record.amount)


def pipeline(
    name: str, log: cutwater.Client, function: ProcessFunction | None = None, key: Any = "user", window: Any = None
) -> Pipeline:
    if "pays" not in {topic.name for topic in log.topics()}:
        log.create_topic("pays", schema=SCHEMA, event_time="at")
    p = Pipeline(name, log=log.servers)
    pays = p.source("pays")
    pays.process(key=key, function=function or Last(), uid="last", schema="user string").sink(f"{name}-out", uid="out")
    pays.window(key="user", window=window or Tumbling("10s"), aggregate={"n": "count(*)"}, uid="w").sink(
        f"{name}-windows", uid="windows"
    )
    return p


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"trigger": "abc"}, "trigger is 'abc': give whole milliseconds, a timedelta, or a text such as"),
        ({"trigger": "abc", "available_now": True}, "trigger is 'abc'"),
        ({"until": "nw"}, "until is 'nw': give 'now', a datetime with a time zone, or a GLSN"),
        ({"until": datetime(2026, 1, 1)}, "a datetime with a time zone"),
        ({"until": True}, "until is True"),
    ],
)
def test_what_is_no_trigger_and_no_end_is_told_before_anything_starts(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Pipeline("p", log="nowhere").run(**options)


def program(name: str, log: cutwater.Client, **options: Any) -> Program:
    return program_of(pipeline(name, log, **options), log, 1, 4)


def begun(log: cutwater.Client, own: Program, place: Path, savepoint: Savepoint | None = None) -> Beginning:
    wish = Wish(None if savepoint is None else savepoint.path)
    return beginning(NO_SPARK, log, own, str(place), wish)


def published(log: cutwater.Client, name: str, key: str, batch: int) -> None:
    log.publish(log.open_run(name, key), batch, [])


def seeded(target: Path, log: cutwater.Client, name: str, **changes: Any) -> Savepoint:
    """A savepoint of a pipeline, with something else in its manifest."""
    seed = new_savepoint(target / "seed", pipeline(name, log), glsn=0, states={}, schemas={"pays": SCHEMA})
    manifest: Manifest = msgspec.structs.replace(seed.manifest, log=log.cluster_key(), **changes)
    return write_savepoint(target / "savepoint", manifest, {})


def test_a_run_that_was_only_opened_does_not_hide_what_was_published_before(
    log: cutwater.Client, tmp_path: Path
) -> None:
    own = program("hides", log)
    older = seeded(tmp_path / "older", log, "hides", run=RunPoint("hides", "A", 10))
    newer = seeded(tmp_path / "newer", log, "hides", run=RunPoint("hides", "A", 57))
    bootstrapped = seeded(tmp_path / "none", log, "hides")
    published(log, "hides", "A", 57)
    log.open_run("hides", "failed at once")
    for savepoint in (older, bootstrapped):
        with pytest.raises(Refused, match="the output of 'hides' is past"):
            begun(log, own, tmp_path / "never", savepoint)
    assert begun(log, own, tmp_path / "run", newer).savepoint is not None
    published(log, "hides", "B", 0)
    with pytest.raises(Refused, match="another run than the savepoint's has published"):
        begun(log, own, tmp_path / "run", newer)


def test_the_first_micro_batch_looks_at_the_output_when_nobody_else_can_publish_any_more(
    log: cutwater.Client, tmp_path: Path
) -> None:
    own = program("races", log)
    published(log, "races", "race A", 3)
    begin = begun(log, own, tmp_path / "run", seeded(tmp_path, log, "races", run=RunPoint("races", "race A", 3)))
    writer = PipelineWriter(own, Where(servers=log.servers), frozenset(), begin.guard)
    writer.check(log.open_run("races", "race B"))
    # An old run that still lives has published between the look at the start and the first micro-batch.
    begin = begun(
        log, own, tmp_path / "run-2", seeded(tmp_path / "2", log, "races", run=RunPoint("races", "race B", -1))
    )
    published(log, "races", "race B", 0)
    writer = PipelineWriter(own, Where(servers=log.servers), frozenset(), begin.guard)
    with pytest.raises(Refused, match="its micro-batch 0 is published, and the savepoint is after micro-batch -1"):
        writer.check(log.open_run("races", "race C"))
    published(log, "races", "race C", 0)
    writer.check(log.open_run("races", "race C"))


def test_a_checkpoint_belongs_to_one_log(log: cutwater.Client, tmp_path: Path) -> None:
    checkpointed(log, tmp_path / "run", program("moved", log), [{"glsn": 1, "slices": 4}], done=1)
    begun(log, program("moved", log), tmp_path / "run")
    with (
        cutwater.open(tmp_path / "other") as other,
        pytest.raises(
            Refused, match=r"are those of another log.*remove that directory, or name another one with --checkpoint"
        ),
    ):
        begun(other, program("moved", other), tmp_path / "run")


class Recorded(Query):
    """A query that is done as soon as it is started."""

    def start(self) -> Any:
        STARTED.append(self.options)
        place = Checkpoint(self.checkpoint, LocalFiles())
        for batch in place.planned() if len(STARTED) > 1 else ():
            place.files.write(f"{self.checkpoint}/commits/{batch}", b"")
        return SimpleNamespace(id="stopped", isActive=False, stop=lambda: None, awaitTermination=lambda *_: True)


STARTED: list[RunOptions] = []


def stopped(log: cutwater.Client, place: Path, name: str, offsets: list[dict[str, Any]], done: int) -> list[RunOptions]:
    """What is run after a stop before a savepoint is taken."""
    STARTED.clear()
    own = program(name, log)
    begin = checkpointed(log, place, own, offsets, done)
    options, where = RunOptions(until=21, drain=True), Where(servers=log.servers)
    query = Recorded(NO_SPARK, own, NO_SPARK, where, options, "", str(place), None, None, begin)
    PipelineRun(query)._finish_planned()
    return STARTED[1:]


def checkpointed(
    log: cutwater.Client, place: Path, own: Program, offsets: list[dict[str, Any]], done: int
) -> Beginning:
    """A checkpoint in which so many micro-batches are planned, and so many done."""
    files, begin = LocalFiles(), begun(log, own, place)
    files.write(str(place / "metadata"), b'{"id":"stopped"}')
    for batch, offset in enumerate(offsets):
        files.write(str(place / "offsets" / str(batch)), b"v1\n{}\n" + msgspec.json.encode(offset))
    for batch in range(done):
        files.write(str(place / "commits" / str(batch)), b"")
    return begin


def test_a_stop_does_not_end_the_input_of_a_run_that_drains(log: cutwater.Client, tmp_path: Path) -> None:
    (last,) = stopped(log, tmp_path / "run", "drains", [{"glsn": 11, "slices": 4}], done=0)
    assert (last.until, last.drain) == (11, False)


def test_a_stop_finishes_what_may_still_be_published(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [{"glsn": 11, "slices": 4}, {"glsn": 15, "slices": 4}]
    (last,) = stopped(log, tmp_path / "under way", "finishes", two, done=1)
    assert last.until == 15
    assert not stopped(log, tmp_path / "done", "finishes", two, done=2)
    ends = [two[0], {"glsn": 21, "slices": 4, "ended": True}]
    assert not stopped(log, tmp_path / "ends", "finishes", ends, done=1)

    def fails(*_: Any) -> None:
        raise PipelineFailed("no", pipeline="finishes", uid="last", glsn=GLSN(12))

    monkeypatch.setattr(PipelineRun, "wait", fails)
    stopped(log, tmp_path / "fails", "finishes", two, done=1)
    published(log, "finishes", "stopped", 1)
    with pytest.raises(PipelineFailed):
        stopped(log, tmp_path / "fails and is published", "finishes", two, done=1)


def test_a_savepoint_that_cannot_be_written_is_an_error_in_words(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(log, tmp_path / "run", program("unwritten", log), [{"glsn": 1, "slices": 4}], done=1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match=r"no savepoint of .*run could be written to .*NotADirectoryError"):
        savepoints.take_savepoint(tmp_path / "run", tmp_path / "file" / "s", spark=UNUSED_SPARK)

    def unread(*_: Any) -> None:
        raise Py4JError("the state store has lost a file")

    monkeypatch.setattr(savepoints, "_written", unread)
    with pytest.raises(Unavailable, match=r"micro-batch 0 of .* could not be read, .*the state store has lost a file"):
        savepoints.take_savepoint(tmp_path / "run", tmp_path / "s", spark=UNUSED_SPARK)


def test_whatever_keeps_a_savepoint_from_being_taken_does_not_end_the_program() -> None:
    def fails(target: str, *, timeout: float) -> None:
        raise KeyError(target)

    checkpoint: Any = SimpleNamespace(committed=lambda: [])
    told = SavepointWish(SavepointWanted("s", seconds=1.0), checkpoint).taken(SimpleNamespace(savepoint=fails))
    assert told is not None
    assert told.error is not None
    assert "KeyError: 's'" in told.error.message


def test_paths_of_this_machine_may_be_written_as_addresses(tmp_path: Path) -> None:
    place = f"file://{tmp_path}"
    assert savepoints.absolute(place) == str(tmp_path)
    (tmp_path / "part").write_text("x")
    assert list(LocalFiles().settle([f"{place}/part"])) == [f"{place}/part"]


def test_a_checkpoint_keeps_the_types_of_keys_and_the_kinds_of_windows(log: cutwater.Client) -> None:
    def info(**options: Any) -> ProgramInfo:
        return described(program("kinds", log, **options).plan)

    for same in (info(window=Tumbling("20s")), info(key=lambda row: row.user)):
        require_same_program("run", info(), same)
    for changed, uid in ((info(key="amount"), "last"), (info(window=Session("10s")), "w")):
        with pytest.raises(Refused, match=f"differs in the operators {uid}: .*--from-savepoint PATH.* To begin anew, "):
            require_same_program("run", info(), changed)


def test_what_was_trimmed_after_a_savepoint_without_clocks_is_missed(log: cutwater.Client) -> None:
    own = program("misses", log)
    acks = [log.append("pays", [{"user": "a", "amount": i, "at": T0}]) for i in range(3)]
    log.trim("pays", before=acks[1].glsn + 1)
    begin = Offset(int(acks[0].glsn) - 1, own.slices)
    reader = PipelineReader(own, Where(servers=log.servers), RunOptions(begin=begin))
    try:
        start = reader.initialOffset()
        with pytest.raises(WorkerFailed, match="trimmed"):
            reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    finally:
        reader.stop()


class Fixed(Last):
    more = ValueState("string")


def test_a_program_that_never_finished_anything_can_be_corrected(log: cutwater.Client, tmp_path: Path) -> None:
    before, after = program("corrected", log), program("corrected", log, function=Fixed())
    begun(log, before, tmp_path / "run")
    begun(log, after, tmp_path / "run")
    checkpointed(log, tmp_path / "run", after, [{"glsn": 1, "slices": 4}], done=0)
    with pytest.raises(Refused, match=r"differs in the operators last: no micro-batch of it was finished.* Remove"):
        begun(log, before, tmp_path / "run")
    LocalFiles().write(str(tmp_path / "run" / "metadata"), b'{"id":"corrected"}')
    published(log, "corrected", "corrected", 0)
    with pytest.raises(Refused, match="its first micro-batch is published and not finished"):
        begun(log, before, tmp_path / "run")


def test_before_the_first_micro_batch_a_savepoint_is_a_copy_of_the_one_it_began_with(
    log: cutwater.Client, tmp_path: Path
) -> None:
    table = pa.table({"user": ["a", "b"], "last": [1, 2]})
    p = pipeline("idles", log)
    first = new_savepoint(tmp_path / "first", p, glsn=0, states={"last": table}, schemas={"pays": SCHEMA})
    begun(log, program("idles", log), tmp_path / "run", first)
    copy = savepoints.take_savepoint(tmp_path / "run", tmp_path / "copy", spark=UNUSED_SPARK)
    copy.verify()
    assert copy.manifest.id != first.manifest.id
    assert not diff(first, copy).operators
    begun(log, program("idles", log), tmp_path / "run-2", copy)
    wish = Wish(first.path, replay_output=True)
    beginning(NO_SPARK, log, program("idles", log), str(tmp_path / "run-3"), wish)
    with pytest.raises(Refused, match="which is still its state"):
        savepoints.take_savepoint(tmp_path / "run-3", tmp_path / "never", spark=UNUSED_SPARK)


def test_a_slice_of_which_nothing_was_read_is_missed() -> None:
    savepoints.require_all("last", {1, 2}, {2, 1})
    with pytest.raises(Unavailable, match="gave nothing of 'last' in 1 of 2 slices"):
        savepoints.require_all("last", {1, 2}, {2})
