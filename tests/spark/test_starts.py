"""What is looked at before a pipeline starts and after it is stopped, on a real log and real files, without a JVM."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable

import cutwater
from cutwater.client.publish.runs import RunStart
from cutwater.errors import CheckpointDamaged, InvalidArgument, OutputExists, PipelineFailed, Refused, Unavailable
from cutwater.jobs.messages import TakeSavepoint
from cutwater.jobs.restarts import is_hopeless
from cutwater.pipeline import Pipeline, ProcessFunction, Session, Tumbling, ValueState, Watermark
from cutwater.savepoints import Manifest, Savepoint, diff, new_savepoint
from cutwater.savepoints.files import LocalFiles
from cutwater.savepoints.manifest import RunPoint
from cutwater.savepoints.program import ProgramInfo, SourceInfo, described
from cutwater.savepoints.writing import write_savepoint
from cutwater.spark.job_program import SavepointWish
from cutwater.spark.options import Where
from cutwater.spark.pipeline.error_translation import WorkerFailed, translated
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.runner import PipelineRun, Query, checked, sizes_of
from cutwater.spark.pipeline.source import PipelineReader, SourceRunOptions
from cutwater.spark.savepoint import savepoints
from cutwater.spark.savepoint.checkpoints import Checkpoint, require_same_program
from cutwater.spark.savepoint.savepoint_restore import Beginning, Wish, beginning
from cutwater.types import GLSN
from tests.spark.pipeline_kit import program_of

SCHEMA = pa.schema({"user": pa.string(), "amount": pa.int64(), "at": pa.timestamp("us", "UTC")})
T0 = datetime(2026, 1, 1, tzinfo=UTC)
NO_SPARK: Any = None
UNUSED_SPARK: Any = SimpleNamespace(
    sparkContext=SimpleNamespace(addJobTag=lambda tag: None, removeJobTag=lambda tag: None),
    dataSource=SimpleNamespace(register=lambda source: None),
)
"""It takes the mark of jobs that have a deadline, and formats, and no jobs."""


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
    pays = p.source("pays", watermark=Watermark.ascending())
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


def published(log: cutwater.Client, name: str, key: str, batch: int, position: int | None = None) -> None:
    """A micro-batch with a row, by the run with this key, whatever the name has published."""
    run = log.open_run(name, key, start=RunStart(replay=True))
    log.publish(run, batch, [log.stage(run, batch, f"{name}-out", [{"user": "a"}])], position=position)


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
    log.open_run("hides", "failed at once", start=RunStart(replay=True))
    for savepoint in (older, bootstrapped):
        with pytest.raises(
            OutputExists, match=r"'hides' has published 1 row, .*savepoint would publish rows of that input"
        ):
            begun(log, own, tmp_path / "never", savepoint)
    assert begun(log, own, tmp_path / "run", newer).savepoint is not None
    published(log, "hides", "B", 0)
    with pytest.raises(OutputExists, match="'hides' has published 2 rows"):
        begun(log, own, tmp_path / "run", newer)


def test_the_first_micro_batch_is_refused_if_the_output_has_moved_since_the_start(
    log: cutwater.Client, tmp_path: Path
) -> None:
    own = program("races", log)
    published(log, "races", "race A", 3, position=0)
    begin = begun(log, own, tmp_path / "run", seeded(tmp_path, log, "races", run=RunPoint("races", "race A", 3)))
    log.open_run("races", "race B", start=begin.start)
    # An old run that still lives has published between the look at the start and the first micro-batch.
    read = int(log.tail())
    point = RunPoint("races", "race B", -1)
    begin = begun(log, own, tmp_path / "run-2", seeded(tmp_path / "2", log, "races", run=point, glsn=read))
    published(log, "races", "race B", 0, position=read)
    with pytest.raises(OutputExists, match="'races' has published 2 rows"):
        log.open_run("races", "race C", start=begin.start)
    published(log, "races", "race B", 1)
    assert log.find_runs("races")[-1].key == "race B", "nobody was fenced"


def test_a_lost_checkpoint_does_not_publish_a_second_time(log: cutwater.Client, tmp_path: Path) -> None:
    """Without the checkpoint of before, a name that has published begins anew only on purpose."""
    own = program("loses", log)
    run = log.open_run("loses", "lost")
    log.publish(run, 0, [log.stage(run, 0, "loses-out", [{"user": "a"}])], position=3)
    place = tmp_path / "run"
    with pytest.raises(OutputExists, match=rf"'loses' has published 1 row.*up to GLSN 3, and the checkpoint {place}"):
        begun(log, own, place)
    assert not place.exists(), "a refused start leaves nothing"
    with pytest.raises(OutputExists):
        beginning(NO_SPARK, log, own, str(place), Wish(), "3")
    for made, wish, start in (
        ("4", Wish(), "4"),
        ("latest", Wish(), "latest"),
        ("replay", Wish(None, True), "earliest"),
    ):
        begin = beginning(NO_SPARK, log, own, str(tmp_path / made), wish, start)
        log.check_run("loses", "new", start=begin.start)
    # What is planned counts, and not what a later start says.
    checkpointed(log, tmp_path / "planned", own, [{"glsn": 5, "slices": 4, "since": 2}], done=0)
    with pytest.raises(OutputExists):
        beginning(NO_SPARK, log, own, str(tmp_path / "planned"), Wish(), "4")
    # A checkpoint whose run the log knows goes on, whatever was published.
    checkpointed(log, tmp_path / "known", own, [{"glsn": 5, "slices": 4, "since": 2}], done=0, key="lost")
    begun(log, own, tmp_path / "known")


def test_a_checkpoint_belongs_to_one_log(log: cutwater.Client, tmp_path: Path) -> None:
    checkpointed(log, tmp_path / "run", program("moved", log), [{"glsn": 1, "slices": 4}], done=1)
    begun(log, program("moved", log), tmp_path / "run")
    with (
        cutwater.open(tmp_path / "other") as other,
        pytest.raises(Refused, match=r"are those of another log.*name another directory with --checkpoint"),
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


STARTED: list[SourceRunOptions] = []


def stopped(
    log: cutwater.Client, place: Path, name: str, offsets: list[dict[str, Any]], done: int
) -> list[SourceRunOptions]:
    """What is run after a stop before a savepoint is taken."""
    STARTED.clear()
    own = program(name, log)
    begin = checkpointed(log, place, own, offsets, done)
    options, where = SourceRunOptions(until=21, drain=True), Where(servers=log.servers)
    query = Recorded(NO_SPARK, own, NO_SPARK, where, options, "", str(place), None, None, begin)
    PipelineRun(query)._finish_planned()
    return STARTED[1:]


def checkpointed(
    log: cutwater.Client, place: Path, own: Program, offsets: list[dict[str, Any]], done: int, key: str = ""
) -> Beginning:
    """A checkpoint in which so many micro-batches are planned, and so many done."""
    files, begin = LocalFiles(), beginning(NO_SPARK, log, own, str(place), Wish(None, replay_output=True))
    key = key or f"stopped {place}"
    files.write(str(place / "metadata"), msgspec.json.encode({"id": key}))
    for batch, offset in enumerate(offsets):
        files.write(str(place / "offsets" / str(batch)), b"v1\n{}\n" + msgspec.json.encode(offset))
    for batch in range(done):
        files.write(str(place / "commits" / str(batch)), b"v1\n{}")
    if done:
        # What is done was decided before, also without rows.
        log.publish(log.open_run(own.name, key, start=RunStart(replay=True)), done - 1, [])
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
    published(log, "finishes", f"stopped {tmp_path / 'fails and is published'}", 1)
    with pytest.raises(PipelineFailed):
        stopped(log, tmp_path / "fails and is published", "finishes", two, done=1)


def test_a_savepoint_that_cannot_be_written_is_an_error_in_words(
    log: cutwater.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(log, tmp_path / "run", program("unwritten", log), [{"glsn": 1, "slices": 4}], done=1)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        Unavailable, match=r"no savepoint of .*run could be written to .*(NotADirectoryError|FileExistsError)"
    ):
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
    told = SavepointWish(TakeSavepoint("s", seconds=1.0), checkpoint).taken(SimpleNamespace(savepoint=fails))
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
    for changed, told in (
        (info(key="amount"), "the types of the key of operator 'last': string before, integer now"),
        (info(window=Session("10s")), "window of operator 'w': tumbling before, session now"),
        (
            info(function=Fixed()),
            r"states \(name, kind, type\) of operator 'last': last value bigint before, last value bigint, more value",
        ),
    ):
        with pytest.raises(Refused, match=rf"differs: {told}.*\. A changed program starts from a .* To begin anew, "):
            require_same_program("run", info(), changed)
    fewer = msgspec.structs.replace(info(), operators=info().operators[:1])
    with pytest.raises(Refused, match="operator 'w' was there before, and is not now"):
        require_same_program("run", info(), fewer)
    with pytest.raises(Refused, match="operator 'w' is new"):
        require_same_program("run", fewer, info())
    elsewhere = msgspec.structs.replace(info(), sources=(SourceInfo("bills", ""),))
    with pytest.raises(Refused, match="sources: pays before, bills now"):
        require_same_program("run", info(), elsewhere)


def test_what_was_trimmed_after_a_savepoint_without_clocks_is_missed(log: cutwater.Client) -> None:
    own = program("misses", log)
    acks = [log.append("pays", [{"user": "a", "amount": i, "at": T0}]) for i in range(3)]
    log.trim("pays", before=acks[1].glsn + 1)
    begin = PipelineOffset(int(acks[0].glsn) - 1, own.slices)
    reader = PipelineReader(own, Where(servers=log.servers), SourceRunOptions(begin=begin))
    try:
        start = reader.initialOffset()
        left = acks[1].glsn + 1
        told = rf"of topic 'pays' was trimmed: the first one left is {left}\. .*--from-savepoint.*--start {left}"
        with pytest.raises(WorkerFailed, match=told):
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
    with pytest.raises(Refused, match=r"of operator 'last': .*No micro-batch of it was finished.* Remove"):
        begun(log, before, tmp_path / "run")
    LocalFiles().write(str(tmp_path / "run" / "metadata"), b'{"id":"corrected"}')
    published(log, "corrected", "corrected", 0)
    with pytest.raises(Refused, match="Its first micro-batch is published and not finished"):
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


# What is refused creates nothing, and says what to do.


def kept(log: cutwater.Client) -> set[str]:
    return {topic.name for topic in log.topics()}


def copied(name: str, log: cutwater.Client, *topics: str) -> Pipeline:
    p = Pipeline(name, log=log.servers)
    pays = p.source("pays")
    for topic in topics:
        pays.sink(topic, uid=topic)
    return p


def test_refused_starts_create_no_topics(log: cutwater.Client, tmp_path: Path) -> None:
    """Whatever is wrong: options, schemas, another program in the checkpoint, output that is there already."""
    own = program("creates", log)
    run = log.open_run("creates", "created")
    log.publish(run, 0, [log.stage(run, 0, "creates-out", [{"user": "a"}])], position=1)
    checkpointed(log, tmp_path / "other", own, [{"glsn": 1, "slices": 4}], done=1, key="created")
    before = kept(log)
    p = copied("creates", log, "never-a", "never-b")
    wrong: list[tuple[Pipeline, dict[str, Any], type[Exception], str]] = [
        (p, {"until": 10**9}, InvalidArgument, "the log ends at"),
        (p, {"start": "tomorrow"}, InvalidArgument, "start is 'tomorrow'"),
        (p, {"start": 10**9}, InvalidArgument, "start is 1000000000, but the log ends at"),
        (p, {}, OutputExists, "'creates' has published 1 row"),
        (p, {"checkpoint": tmp_path / "other"}, Refused, "operator 'last' was there before, and is not now"),
        (
            copied("bad", log, "never-a", "not a name"),
            {},
            InvalidArgument,
            "'not a name' cannot be the name of a topic",
        ),
    ]
    two = Pipeline("two", log=log.servers)
    pays = two.source("pays")
    pays.map(lambda r: {"a": 1}, "a bigint").sink("never-c", uid="a")
    pays.map(lambda r: {"b": 1}, "b bigint").sink("never-c", uid="b")
    wrong.append((two, {}, InvalidArgument, "the topic 'never-c' has no column 'b'"))
    for refused, options, error, told in wrong:
        with pytest.raises(error, match=told):
            refused.run(**{"spark": UNUSED_SPARK, "checkpoint": tmp_path / "new", **options})
        assert kept(log) == before, options
        assert not (tmp_path / "new" / "cutwater.json").exists()


def test_another_parallelism_than_that_of_the_checkpoint_is_refused(log: cutwater.Client, tmp_path: Path) -> None:
    own = program("sized", log)
    checkpointed(log, tmp_path / "run", own, [{"glsn": 1, "slices": 4}], done=1, key="sized")
    checkpoint = Checkpoint(str(tmp_path / "run"), LocalFiles())
    assert sizes_of(checkpoint, None, None) == sizes_of(checkpoint, 1, 4) == (1, 4)
    options = {"spark": UNUSED_SPARK, "checkpoint": tmp_path / "run"}
    with pytest.raises(Refused, match=r"made with parallelism 1, not 3: .*take a savepoint"):
        pipeline("sized", log).run(parallelism=3, **options)
    with pytest.raises(Refused, match=r"is cut into 4 slices, not 8: .*savepoint"):
        pipeline("sized", log).run(slices=8, **options)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metadata", b'{"id":"3'),
        ("metadata", None),
        ("offsets/1", b"v1\n{}"),
        ("offsets/1", b""),
        ("offsets/1", b'v1\n{}\n{"glsn": 4, "sli'),
        ("offsets/1", None),
        ("commits/1", b""),
        ("commits/1", b'v1\n{"next'),
        ("cutwater.json", b'{"format": "cut'),
    ],
)
def test_a_damaged_checkpoint_is_a_definite_error_that_names_the_file(
    log: cutwater.Client, tmp_path: Path, file: str, content: bytes | None
) -> None:
    own = program("damaged", log)
    offsets = [{"glsn": 1, "slices": 4}, {"glsn": 4, "slices": 4}]
    checkpointed(log, tmp_path / "run", own, offsets, done=2, key="a key of its own")
    begun(log, own, tmp_path / "run")
    place = tmp_path / "run" / file
    if content is None:
        place.unlink()
    else:
        place.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=rf"{place} is damaged: .*Put back a copy.*--from-savepoint") as raised:
        begun(log, own, tmp_path / "run")
    assert is_hopeless(raised.value)
    assert not raised.value.retriable


@pytest.mark.parametrize(
    ("text", "file"),
    [
        (
            "[STREAM_FAILED] Query [id = 1] terminated with exception: [CANNOT_LOAD_STATE_STORE."
            "CANNOT_READ_STREAMING_STATE_FILE] An error occurred during loading state. Error reading streaming state "
            "file of file:/c/run/state/0/0/2.changelog does not exist. If the stream job is restarted",
            "/c/run/state/0/0/2.changelog",
        ),
        ("Failed to read log file file:/c/run/commits/3. Incomplete log file in the offset", "/c/run/commits/3"),
        ("[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY] Cannot restart streaming query", "/c/run/state"),
        ("[STREAMING_CHECKPOINT_MISSING_METADATA_FILE] Checkpoint location file:/c/run is in", "/c/run"),
        (
            "[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state.  SQLSTATE: 58030",
            "/c/run/state",
        ),
    ],
)
def test_damage_that_only_spark_sees_is_told_alike(text: str, file: str) -> None:
    with (
        pytest.raises(CheckpointDamaged, match=rf"^{file} is damaged: Spark cannot read it"),
        translated("p", "/c/run"),
    ):
        raise StreamingQueryException(text)


def test_what_spark_may_overcome_stays_worth_another_start() -> None:
    with pytest.raises(Unavailable, match="run the pipeline again"), translated("p", "/c/run"):
        raise StreamingQueryException("[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] Connection to the name node timed out")


def test_a_function_that_cannot_be_sent_to_workers_is_named_with_what_it_uses(log: cutwater.Client) -> None:
    lock = threading.Lock()

    def guarded(row: Any) -> Any:
        with lock:
            return {"user": row.user}

    p = Pipeline("locked", log=log.servers)
    p.source("pays").map(guarded, "user string").sink("never-locked", uid="out")
    with pytest.raises(
        InvalidArgument,
        match=r"pipeline 'locked', map-1: .*guarded cannot be sent to Spark's workers: cannot pickle .*it uses 'lock' "
        r"\(lock\)\. .*make them in the worker",
    ):
        program_of(p, log, 1, 4)
    assert "never-locked" not in kept(log)

    class Holding(Last):
        def __init__(self) -> None:
            self.lock = lock

    with pytest.raises(InvalidArgument, match=r"an object of .*Holding cannot be sent .*it uses 'lock' \(lock\)"):
        program("holds", log, function=Holding())


def test_event_time_that_is_no_time_in_the_topic_is_told_before_spark_starts(log: cutwater.Client) -> None:
    pipeline("times", log)

    def own(event_time: str | None, schema: str | None = None) -> Program:
        p = Pipeline("times", log=log.servers)
        watermark = Watermark.ascending()
        p.source("pays", schema=schema, event_time=event_time, watermark=watermark).sink("times-out", uid="out")
        return checked(p, log, 1, 4)

    with pytest.raises(InvalidArgument, match="'times', source pays: event time is the column 'user', whose type is s"):
        own("user")
    with pytest.raises(InvalidArgument, match="names the column 'when', which is not there: there are user string"):
        own("when")
    assert own("amount").plan.name == own(None).plan.name == "times"
    # The topic's own event time needs no column in the declared schema.
    assert own(None, "user string").plan.name == "times"


def test_a_sink_into_its_own_source_is_warned_of(log: cutwater.Client, tmp_path: Path) -> None:
    p = copied("loops", log, "pays")
    told = "pipeline 'loops' writes to the topic 'pays', which it reads: .*another topic, unless this is meant"
    # It is not refused: what ends it is the end of the log here.
    with pytest.warns(UserWarning, match=told), pytest.raises(InvalidArgument, match="the log ends at"):
        p.run(spark=UNUSED_SPARK, checkpoint=tmp_path / "run", until=10**9)


def test_a_source_topic_that_was_created_again_is_refused_before_anything_starts(
    log: cutwater.Client, tmp_path: Path
) -> None:
    log.create_topic("again", schema=SCHEMA, event_time="at")

    def own() -> Program:
        p = Pipeline("recreated", log=log.servers)
        p.source("again").sink("recreated-out", uid="out")
        return program_of(p, log, 1, 4)

    number = int(log.topic("again").number)
    offset = {"glsn": 2, "slices": 4, "topics": {"again": number}}
    checkpointed(log, tmp_path / "run", own(), [offset], done=1, key="recreated")
    seed = new_savepoint(tmp_path / "seed", pipeline("recreated", log), glsn=0, states={}, schemas={"pays": SCHEMA})
    changes = {"log": log.cluster_key(), "glsn": 2, "topics": {"again": number, "no source any more": 99}}
    taken = write_savepoint(tmp_path / "savepoint", msgspec.structs.replace(seed.manifest, **changes), {})
    wish = Wish(taken.path, allow_non_restored_state=True)
    begun(log, own(), tmp_path / "run")
    assert beginning(NO_SPARK, log, own(), str(tmp_path / "fits"), wish).offset == PipelineOffset(
        2, 4, topics={"again": number}
    )
    log.delete_topic("again")
    log.create_topic("again", schema=SCHEMA, event_time="at")
    told = rf"'again' was deleted and created again: it was topic number {number} when GLSN 2 .*--start 3"
    with pytest.raises(Refused, match=told):
        begun(log, own(), tmp_path / "run")
    with pytest.raises(Refused, match=told):
        beginning(NO_SPARK, log, own(), str(tmp_path / "never"), wish)
