"""From a file to its pipeline, and from options to what a supervisor is asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutwater.cli.commands import pipeline
from cutwater.cli.commands.pipeline import OneJob, PipelineRunOptions
from cutwater.cli.io.pipeline_output import Display, progress_line
from cutwater.core.jobs.job_spec import split_entry
from cutwater.errors import CutwaterError, InvalidArgument, Refused, Unavailable
from cutwater.jobs.checkpoint_hold import Hold
from cutwater.jobs.job_file import Job, JobDirectory, JobState, ProgramFailure, Restored
from cutwater.jobs.locks import LOCK_FILE
from cutwater.jobs.messages import Answer, Failed, Lines, Progress, Stop, Told, line
from cutwater.jobs.program_file import load_pipeline

HEAD = "from cutwater.pipeline import Pipeline\n"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """A file that is loaded is a module like others."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("program", "pipeline_file_")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("p = Pipeline('a')\nsame = p", ""),
        ("one, p = Pipeline('b'), Pipeline('a')", "p"),
        ("def make(): return Pipeline('a')", "make"),
        ("from beside import p", ""),
    ],
)
def test_the_pipeline_of_a_file(file: Path, text: str, name: str) -> None:
    (file.parent / "beside.py").write_text(HEAD + "p = Pipeline('a')")
    file.write_text(HEAD + text)
    try:
        assert load_pipeline(str(file), name).name == "a"
    finally:
        sys.modules.pop("beside", None)


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("", "", "program.py has no pipeline: none of its variables is a Pipeline"),
        ("def made() -> Pipeline: ...", "", "program.py has no pipeline: .*say .*program.py:made"),
        (
            "p, q = Pipeline('a'), Pipeline('b')",
            "",
            r"several pipelines: p \('a'\), q \('b'\); say which .*program.py:p",
        ),
        ("\nx = nothing", "", "program.py, line 3: NameError: name 'nothing' is not defined"),
        ("\nimport no_such_module", "", "program.py, line 3: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "", "program.py, line 2: "),
        ("Pipeline('')", "", "program.py, line 2: a pipeline's name is ''"),
        ("raise SystemExit", "", "program.py, line 2: it ended the process; put what runs"),
        ("x = 3", "x", "'x' in .*program.py is int, not a Pipeline"),
        ("x = 3", "y", "program.py has no 'y'"),
        ("def f():\n    return 1 / 0", "f", "program.py, line 3: ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(file: Path, text: str, name: str, told: str) -> None:
    file.write_text(HEAD + text)
    with pytest.raises(CutwaterError, match=told):
        load_pipeline(str(file), name)


def test_the_name_after_a_file() -> None:
    assert split_entry("a/b.py:p") == ("a/b.py", "p")
    assert split_entry("a/b.py") == ("a/b.py", "")
    assert split_entry("a:b/c.py") == ("a:b/c.py", "")


def test_options_of_a_run() -> None:
    asked = PipelineRunOptions(until="17", drain=True, parallelism=3, restart="none").asked("a/f.py:p", Path("jobs"))
    assert (asked.file, asked.variable, asked.root) == (
        str(Path("a/f.py").absolute()),
        "p",
        str(Path("jobs").absolute()),
    )
    assert (asked.start.until, asked.start.drain, asked.start.parallelism) == (17, True, 3)
    asked = PipelineRunOptions(available_now=True, checkpoint="c", from_savepoint="hdfs://h/s").asked("f.py", Path())
    assert (asked.start.until, asked.start.from_savepoint) == ("now", "hdfs://h/s")
    assert asked.start.checkpoint == str(Path("c").absolute())
    assert PipelineRunOptions(until="@2026-01-01").asked("f.py", Path()).start.until == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (PipelineRunOptions(available_now=True, until="now"), "say one or the other"),
        (PipelineRunOptions(drain=True), "say which, with --until"),
        (PipelineRunOptions(allow_non_restored_state=True), "is about --from-savepoint: name one"),
        (PipelineRunOptions(until="soon"), "'soon' is no position: .*; or 'now'"),
        (PipelineRunOptions(start="yesterday"), "--start is 'earliest', 'latest' or a GLSN from 1 on, not 'yesterday'"),
        (
            PipelineRunOptions(trigger="abc"),
            "--trigger is 'abc': give whole milliseconds, .* or a text such as '500ms'",
        ),
        (PipelineRunOptions(trigger="abc", available_now=True), "--trigger is 'abc'"),
        (PipelineRunOptions(restart="often"), "'often' is no restart strategy"),
    ],
)
def test_options_that_make_no_sense(options: PipelineRunOptions, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        options.asked("f.py", Path())


def test_a_command_tells_of_no_savepoint_that_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JobDirectory(tmp_path, "p").save(Job("p", "/c"))
    monkeypatch.setattr(pipeline, "ask", lambda *_: Answer())
    with pytest.raises(Unavailable, match="'p' tells of no savepoint: `cutwater pipeline describe p` shows"):
        OneJob("p", tmp_path).saved(Stop("/s", 1))


def test_a_job_that_runs_claims_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until a micro-batch is done, nothing is known of it; and where nobody answers, not even that."""
    restored = Restored("/s", 7)
    JobDirectory(tmp_path, "p").save(Job("p", "/c", JobState.RUNNING, pid=os.getpid(), restored=restored))
    monkeypatch.setattr(pipeline, "ask", lambda *_: Answer())
    told = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            pipeline.app(["describe", "p", "--jobs-dir", str(tmp_path)])
        told.append(capsys.readouterr().out)
        monkeypatch.undo()
    assert "went on from: savepoint /s, GLSN 7\n" in told[0]
    assert "progress:   no micro-batch yet since it was started\n" in told[0]
    assert "progress" not in told[1]


def test_without_pyspark_everyone_is_told_what_to_install(file: Path, tmp_path: Path) -> None:
    """Also whoever says `pipeline run`, before anything is started or written."""
    file.write_text(HEAD + "p = Pipeline('a')\np.source('in').sink('out', uid='out')\n")
    program = f"""
import sys
sys.modules["pyspark"] = None
try:
    import cutwater.spark
except ModuleNotFoundError as error:
    print(error)
try:
    import runpy
    runpy.run_path({str(file)!r})["p"].run()
except Exception as error:
    print(error)
sys.argv = ["cutwater", "pipeline", "run", {str(file)!r}]
from cutwater.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    told = done.stdout.splitlines()
    # A module that is hidden like this is missed in other words than one that is not there.
    missing = r"which is not there \([^)]*'pyspark[^)]*\): install cutwater\[spark\], which also brings Java"
    assert re.fullmatch(f"cutwater.spark needs PySpark, {missing}", told[0])
    assert re.match(rf"pipeline 'a' runs on Spark, {missing}; p\.test\(", told[1])
    assert (
        "pipelines run on Spark, which is not there (No module named 'pyspark'): install cutwater[spark]" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 32
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == []


def test_the_line_of_progress() -> None:
    progress = Progress(7, 10, 12, 1234.5, None, 0.0, None, 3, 3 << 20, 0.0)
    assert progress_line(progress).startswith(
        "1,234 rows/s  lag ? rows, 0.0 s  watermark -  state 3.0 MiB  checkpoint 7, "
    )


def test_a_line_on_a_terminal_is_renewed_and_elsewhere_there_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("p", "/c", JobState.RUNNING, since=3_600.0)
    progress = Progress(7, 10, 12, 1.0, 2, 0.5, 1_000, 3, 10, 0.0)
    display = Display()
    display.show(job, None)
    for _ in range(2):
        display.show(job, progress)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one.get("state") or one["progress"]["lag_records"] for one in told] == ["running", 2]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = Display()
    display.show(job, None)
    for _ in range(2):
        display.show(job, progress)
    display.close()
    shown = capsys.readouterr().out
    assert shown.startswith("\r\x1b[K01:00:00 p: running\n\r\x1b[K1 rows/s  lag 2 rows, 0.5 s")
    assert shown.count("\n") == 1


def test_the_first_wait_for_a_restart_says_how_to_end_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = Display()
    for restarts in (1, 2):
        error = ProgramFailure("pipeline_failed", "no", 0.0)
        display.show(Job("p", "/c", JobState.WAITING, since=3_600.0, restarts=restarts, last_error=error), None)
        display.show(Job("p", "/c", JobState.STARTING, since=3_600.0), None)
    first, hint, _, second, *_ = capsys.readouterr().out.split("\n")
    assert first.endswith("01:00:00 p: waiting to restart, restart 1: no")
    assert "Ctrl-C stops it" in hint
    assert "--restart none" in hint
    assert second.endswith("waiting to restart, restart 2: no")


def test_errors_travel_between_processes_as_what_they_are() -> None:
    error = Refused("no")
    error.add_note("because")
    back = Told.of(error).error()
    assert (type(back), back.message) == (Refused, "no\n  because")


def test_an_error_of_any_length_fits_its_line() -> None:
    whole = line(Failed(Told.of(Unavailable("\0" * (2 << 20)))))
    # Most of it comes before its end does.
    lines = Lines()
    assert lines.add(whole[:-1]) == []
    assert lines.add(whole[-1:]) == [whole[:-1]]


def test_lines_come_whole_and_have_an_end() -> None:
    lines = Lines()
    assert lines.add(b"a\nb") == [b"a"]
    assert lines.add(b"c\n\n") == [b"bc", b""]
    with pytest.raises(ValueError, match="a line of more than"):
        lines.add(b"x" * (2 << 20))


# Checkpoints in the hands of one process.


def test_a_checkpoint_is_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hold = Hold("p", None, None)
    assert hold.place == str(tmp_path / "checkpoints" / "p" / "run-1")
    assert JobDirectory("checkpoints", "p").require().state_now is JobState.RUNNING
    with pytest.raises(Refused, match=f"run-1 is in use by process {os.getpid()}: stop that one first"):
        Hold("p", hold.place, None)
    with pytest.raises(Refused, match="is in use by process"):
        Hold("q", f"file://{hold.place}", None)
    # What is not on this machine's file system cannot be locked here.
    Hold("q", "hdfs://host/checkpoint", None).let_go()
    hold.let_go()
    assert JobDirectory("checkpoints", "p").require().state_now is JobState.FINISHED
    again = Hold("p", None, None)
    again.let_go(Refused("no"))
    job = JobDirectory("checkpoints", "p").require()
    assert (job.state_now, job.last_error and job.last_error.message) == (JobState.FAILED, "no")


def test_a_process_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    program = (
        f"from cutwater.jobs.locks import lock_checkpoint as l; x = l({str(tmp_path)!r}); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(Refused, match=f"in use by process {other.pid}: "):
            Hold("p", tmp_path, None)
        other.kill()
    Hold("p", tmp_path, None).let_go()
    assert (tmp_path / LOCK_FILE).exists()
