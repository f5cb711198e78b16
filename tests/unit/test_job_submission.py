"""What commands about jobs make of their options: the name of the job, its program, and its specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutwater.cli.commands.job_submission import NO_PROGRAM, GivenProgram, SpecOptions
from cutwater.cli.io.job_output import operation_line, step_line
from cutwater.cli.io.program_names import job_name, split_entry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import Operation, OperationError, OperationKind, OperationState, steps_of
from cutwater.errors import InvalidArgument, NotFound
from cutwater.types import CutTime, JobNumber

BASE = JobSpec(NO_PROGRAM, "fraud.py")


@pytest.mark.parametrize(
    ("entry", "source", "name"),
    [
        ("clicks.py", 'p = Pipeline("per-page", log="./data")', "per-page"),
        ("clicks.py", 'p = cutwater.pipeline.Pipeline(name="per-page")', "per-page"),
        ("clicks.py", 'p: Pipeline = Pipeline("a")\nq = Pipeline("b")', "clicks"),
        ("clicks.py:q", 'p: Pipeline = Pipeline("a")\nq = Pipeline("b")', "b"),
        ("clicks.py:p", 'p: Pipeline = Pipeline("a")\nq = Pipeline("b")', "a"),
        ("clicks.py:make", 'def make():\n    return Pipeline("made")\np = Pipeline("b")', "made"),
        ("clicks.py", "p = Pipeline(NAME)", "clicks"),
        ("clicks.py", "this is no Python", "clicks"),
        ("clicks.py", "p = Pipeline()\nq = other('x')", "clicks"),
        ("jobs/clicks.py:p", None, "clicks"),
        ("shop.clicks:p", None, "clicks"),
        ("clicks", None, "clicks"),
    ],
)
def test_a_job_has_the_name_that_its_program_shows_or_that_of_its_file(
    entry: str, source: str | None, name: str
) -> None:
    assert job_name(entry, source) == name


def test_an_entry_is_a_file_and_what_in_it_is_the_pipeline() -> None:
    assert split_entry("fraud.py:p") == ("fraud.py", "p")
    assert split_entry("fraud.py") == ("fraud.py", "")
    assert split_entry("C:/fraud.py") == ("C:/fraud.py", "")


def test_a_program_is_a_file_a_directory_or_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "fraud.py").write_text('p = Pipeline("frauds")')
    found = GivenProgram.of(f"{tmp_path}/fraud.py:p", None)
    assert (found.path, found.entry, found.job) == (tmp_path / "fraud.py", "fraud.py:p", "frauds")
    inside = GivenProgram.of(str(tmp_path), "fraud.py:p")
    assert (inside.path, inside.entry, inside.job) == (tmp_path, "fraud.py:p", "frauds")
    (tmp_path / "shop-1-py3-none-any.whl").touch()
    wheel = GivenProgram.of(f"{tmp_path}/shop-1-py3-none-any.whl", "shop.fraud:p")
    assert (wheel.entry, wheel.job) == ("shop.fraud:p", "fraud")


@pytest.mark.parametrize(
    ("given", "entry", "said"),
    [
        ("gone.py", None, "there is no program 'gone.py'"),
        ("gone.py:p", None, "there is no program 'gone.py'"),
        (".", None, "say which one has the pipeline"),
        ("fraud.py", "fraud.py:p", "--entry is for directories"),
        (".:p", "fraud.py:q", "named twice"),
    ],
)
def test_a_program_that_is_not_clear_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, entry: str | None, said: str
) -> None:
    (tmp_path / "fraud.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((InvalidArgument, NotFound), match=said):
        GivenProgram.of(given, entry)


def test_options_make_a_specification() -> None:
    options = SpecOptions(
        parallelism=4,
        arg=["threshold=10", "where=a=b"],
        conf=["spark.executor.memory=4g"],
        restart="none",
        label=["disk=ssd"],
        memory="2g",
        cpus=1.5,
        savepoint_root="s3",
    )
    spec = options.spec(BASE)
    assert (spec.parallelism, spec.slots, spec.restart, spec.cpus) == (4, 1, "none", 1.5)
    assert spec.arguments == {"threshold": "10", "where": "a=b"}
    assert (spec.conf, spec.labels) == ({"spark.executor.memory": "4g"}, {"disk": "ssd"})
    assert (spec.memory_bytes, spec.checkpoint_root, spec.savepoint_root) == (2 << 30, "default", "s3")


def test_what_is_not_said_stays_as_it_was() -> None:
    before = SpecOptions(parallelism=4, arg=["a=1", "b=2"], label=["disk=ssd"]).spec(BASE)
    after = SpecOptions(arg=["b=3"], slots=2).spec(before)
    assert (after.parallelism, after.slots) == (4, 2)
    assert (after.arguments, after.labels) == ({"a": "1", "b": "3"}, {"disk": "ssd"})
    assert SpecOptions().spec(before) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (SpecOptions(arg=["threshold"]), "--arg is KEY=VALUE"),
        (SpecOptions(label=["=ssd"]), "--label is KEY=VALUE"),
        (SpecOptions(conf=["spark.master=yarn"]), "say where Spark runs with --master"),
        (SpecOptions(memory="lots"), "write a size such as 2g"),
        (SpecOptions(restart="always"), "restart"),
        (SpecOptions(arg=[f"a={'x' * 70_000}"]), "put data into the program"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_stored(options: SpecOptions, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        options.spec(BASE)


def test_operations_are_told_by_what_comes_next() -> None:
    steps = steps_of(OperationKind.UPGRADE)
    running = Operation("0" * 32, OperationKind.UPGRADE, JobNumber(1), "fraud", steps, CutTime(1), step=1)
    assert step_line(running) == "upgrade of job 'fraud', step 2 of 3: start on an agent"
    assert operation_line(running) == "upgrade, start on an agent: 2 of 3"
    failed = Operation(
        *("0" * 32, OperationKind.STOP, JobNumber(1), "fraud", steps_of(OperationKind.STOP), CutTime(1)),
        state=OperationState.FAILED,
        principal="ann",
        error=OperationError("refused", "boom"),
        finished=CutTime(1_000_000),
    )
    assert operation_line(failed) == "stop by ann, failed 1970-01-01 00:00:01: boom"
