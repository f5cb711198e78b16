"""A checkpoint from before rule 2, killed between plan and commit of a micro-batch: that one is replayed under rule 1,
the next one is planned under rule 2. The fixtures were made by ``rule_one/make.py`` with the code of before.
"""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import cutwater
from cutwater.core.read.watermark import RULE
from cutwater.errors import InvalidArgument, Refused
from cutwater.pipeline import Pipeline
from cutwater.pipeline.clocks.clock import ClockSnapshot
from cutwater.pipeline.clocks.rule_one import RuleOneSnapshot
from cutwater.spark.options import where_of
from cutwater.spark.pipeline.offsets import PipelineOffset
from cutwater.spark.pipeline.planning import PipelinePlanner, Walk
from cutwater.spark.savepoint.checkpoints import Origin
from cutwater.spark.savepoint.savepoint_restore import _offset
from cutwater.types import GLSN
from tests.spark.pipeline_kit import placed, program_of, written
from tests.spark.rule_one import program
from tests.times import at_us


def unpacked(name: str, target: Path) -> Path:
    with tarfile.open(Path(program.__file__).with_name(name)) as archive:
        archive.extractall(target)
    rebase(target / "checkpoint")
    return target


def rebase(checkpoint: Path) -> None:
    """Spark notes absolute paths of the schemas of its state. No other file of a checkpoint says where it lies."""
    for file in checkpoint.glob("state/*/_metadata/v2/*"):
        version, text = file.read_text().split("\n")
        said = json.loads(text)
        for store in said["stateStoreInfo"]:
            within = [path.split("/checkpoint/")[1] for path in store["stateSchemaFilePaths"]]
            store["stateSchemaFilePaths"] = [(checkpoint / path).as_uri() for path in within]
        file.write_text(f"{version}\n{json.dumps(said)}")


@pytest.fixture(name="place")
def planned(tmp_path: Path) -> Path:
    return unpacked("planned.tar.xz", tmp_path)


def offset(place: Path, batch: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "checkpoint" / "offsets" / str(batch)).read_text().split("\n")[2])
    return found


@contextmanager
def planner_of(place: Path, pipeline: Pipeline | None = None) -> Iterator[tuple[cutwater.Client, PipelinePlanner]]:
    with cutwater.open(place / "log") as log:
        made = program_of(pipeline or program.made(str(place / "log")), log, 1, 1)
        planner = PipelinePlanner(where_of({"servers": log.servers}), made, "earliest", 10**6)
        yield log, planner
        planner.close()


def steps_of(walk: Walk) -> dict[str, Any]:
    ticks = walk.ticks
    return {
        "watermarks": {",".join(sorted(t)): [s.before, s.moments, s.values] for t, s in ticks.watermarks.items()},
        "times": [ticks.times.before, ticks.times.moments, ticks.times.values],
        "seen": [[r.stream, r.first, r.last, {",".join(t): rows for t, rows in r.seen.items()}] for r in walk.ranges],
    }


def test_a_planned_micro_batch_is_replayed_under_its_rule_and_the_next_one_is_not(place: Path) -> None:
    assert not (place / "checkpoint" / "commits" / "1").exists()
    start, end = PipelineOffset.of(offset(place, 0)), PipelineOffset.of(offset(place, 1))
    assert (start.rule, end.rule) == (1, 1)
    assert isinstance(end.clock, RuleOneSnapshot)
    with planner_of(place) as (log, planner):
        walk = planner.walk(start, end)
        expected = json.loads((place / "steps.json").read_text())
        assert json.loads(json.dumps(steps_of(walk))) == expected
        assert walk.clock == end.clock
        assert end.clock.operators[-1].watermark == 49_999_000, "both log streams are idle, and nothing moves"
        log.append("readings", b"", key=b"k", timestamp=at_us(10_000_000), stream=log.topic("readings").streams[0])
        following = planner.next(end, GLSN(log.tail()), drain=False, limited=False)
        assert following.rule == RULE
        assert isinstance(following.clock, ClockSnapshot)
        # The log has ticked since, while both log streams were idle: the one that had come to 100 s tells the time.
        assert following.clock.watermark_ms == 99_999
        again = planner._walk(planner._begun(end, following, end.glsn), GLSN(following.glsn), GLSN(following.glsn))
        planned = planner.walk(end, following)
        assert steps_of(again) == steps_of(planned), "planned once more after a crash, it is the same"
        assert steps_of(planned)["watermarks"]["readings"][0] == 49_999, "it rises at a position, not in between"
        assert planned.ticks.watermarks[frozenset({"readings"})].last == 99_999


def test_the_clocks_of_an_old_savepoint_go_on_under_the_present_rule(place: Path) -> None:
    """A note of an older version has the clocks of a savepoint as they were, and an offset that is made of it the
    present rule.
    """
    end = PipelineOffset.of(offset(place, 1))
    clock = PipelineOffset.of(offset(place, 0)).clock
    origin = _offset(
        Origin("savepoint", "id", PipelineOffset.of(offset(place, 0)).glsn, clock, may_replay=False), end.slices
    )
    assert isinstance(origin.clock, RuleOneSnapshot)
    with planner_of(place) as (_, planner):
        following = planner.next(PipelineOffset.of(origin.plain()), GLSN(end.glsn), drain=False, limited=False)
        assert following.rule == RULE
        assert isinstance(following.clock, ClockSnapshot)
        # A first micro-batch that was planned under rule 1 is replayed with the clocks as they were.
        assert planner.walk(origin, end).clock == end.clock


def test_the_same_offset_is_given_back_as_it_was_written(place: Path) -> None:
    """Spark compares texts: another one would be a micro-batch with nothing in it."""
    end = PipelineOffset.of(offset(place, 1))
    with planner_of(place) as (_, planner):
        assert planner.next(end, GLSN(end.glsn), drain=False, limited=False) is end


def test_a_source_without_its_watermark_is_refused_with_the_one_of_before(place: Path) -> None:
    p = Pipeline("rule-one", log=str(place / "log"))
    p.source("readings").sink("out2", uid="out")
    end = PipelineOffset.of(offset(place, 1))
    with planner_of(place, p) as (_, planner), pytest.raises(Refused, match=r"bounded 0ms, idle after 1s .* without a"):
        planner.next(end, None, drain=False, limited=False)
    text = json.dumps(offset(place, 1)).replace('"idle_after_us": 1000000', '"idle_after_us": 30000000')
    old = PipelineOffset.of(json.loads(text))
    with (
        planner_of(place, p) as (_, planner),
        pytest.raises(Refused, match=r"give that source .*Watermark.ascending\(\)"),
    ):
        planner.next(old, None, drain=False, limited=False)


def test_unknown_rules_and_fields_are_refused(place: Path) -> None:
    known = offset(place, 1)
    with pytest.raises(Refused, match="under rule 3 of the watermark, and this version of Cutwater knows 1 and 2"):
        PipelineOffset.of(known | {"rule": 3})
    for wrong in ({"what": 1}, {"clock": {**known["clock"], "what": 1}}, {"clock": {**known["clock"], "rule": 7}}):
        with pytest.raises(InvalidArgument, match="is no offset of a pipeline"):
            PipelineOffset.of(known | wrong)
    made = PipelineOffset(3, 1, ClockSnapshot(0, (), ()))
    assert made.plain()["rule"] == RULE
    assert PipelineOffset.of(made.plain()) == made
    with pytest.raises(InvalidArgument, match="is no offset of a pipeline"):
        PipelineOffset.of({**made.plain(), "clock": {**made.plain()["clock"], "streams": []}})


def test_what_spark_had_planned_is_replayed_as_the_version_of_before_does(tmp_path: Path) -> None:
    place = unpacked("killed.tar.xz", tmp_path)
    assert not (place / "checkpoint" / "commits" / "1").exists()
    with planner_of(place) as (_, planner):
        walk = planner.walk(PipelineOffset.of(offset(place, 0)), PipelineOffset.of(offset(place, 1)))
    assert json.loads(json.dumps(steps_of(walk))) == json.loads((place / "steps.json").read_text())


def test_a_killed_run_goes_on_under_both_rules(tmp_path: Path, spark: SparkSession) -> None:
    """On Spark. The first window has records of 10 and 20 s, which are done; 50 and 55 s, planned under rule 1;
    and 58 s, not planned yet. All log streams are silent before 55 s and before 58 s, and one has come to 100 s.
    Rule 1 does not move in a silence, so 55 s counts. Rule 2 goes on to 100 s in a silence, so 58 s is late. Both rules
    together give 4 records. Rule 1 alone gives 5, rule 2 alone 3.
    """
    place = unpacked("killed.tar.xz", tmp_path)
    checkpoint = place / "checkpoint"
    planned = (checkpoint / "offsets" / "1").read_text()
    with cutwater.open(place / "log") as log:
        deadline = time.monotonic() + 60
        while log.tail() <= offset(place, 1)["glsn"]:
            assert time.monotonic() < deadline, "the log's clock does not tick"
            time.sleep(0.1)
        log.append("readings", b"", key=b"k", timestamp=at_us(58_000_000), stream=log.topic("readings").streams[1])
        p = program.made(log.servers)
        assert written(log, "out") == []
        p.run(spark=spark, checkpoint=checkpoint, available_now=True, parallelism=1, slices=1)
        assert (checkpoint / "offsets" / "1").read_text() == planned
        assert sorted(path.name for path in (checkpoint / "commits").glob("[0-9]*")) == ["0", "1", "2"]
        assert PipelineOffset.of(offset(place, 1)).rule == 1
        assert PipelineOffset.of(offset(place, 2)).rule == RULE
        assert [counted(row) for row in written(log, "out")] == [(0, 4)]
        p.run(spark=spark, checkpoint=checkpoint, until="now", drain=True, parallelism=1, slices=1)
        assert [counted(row) for row in written(log, "out")] == [(0, 4), (60, 1)]
        (run,) = log.find_runs("rule-one")
        assert run.key == json.loads((checkpoint / "metadata").read_text())["id"], "the run of the old version goes on"
        anew = p.test(placed(log, p))
        assert [counted(row) for row in anew["out"]] == [(0, 3), (60, 1)], "under rule 2 from the beginning"


def counted(row: dict[str, Any]) -> tuple[int, int]:
    """When the window begins, in seconds, and its records."""
    return int(row["window_start"].timestamp()), row["n"]
