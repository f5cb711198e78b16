"""Supervisors of jobs, as real processes, with a program that runs no Spark: what they do when it dies, or is asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from cutwater.cli.commands import pipeline
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, NotFound, Refused, Unavailable
from cutwater.jobs import detached
from cutwater.jobs.checkpoint_hold import Hold
from cutwater.jobs.child import session_members
from cutwater.jobs.control import ask
from cutwater.jobs.job_file import Job, JobDirectory, JobState
from cutwater.jobs.locks import FileLock
from cutwater.jobs.messages import Cancel, Describe, Rescale, Start, Stop, TakeSavepoint
from cutwater.jobs.restarts import NoRestart
from cutwater.jobs.supervisor import JobOptions
from cutwater.runtime import processes
from tests.integration.job_double import PROGRESS

ROOT = Path(__file__).resolve().parents[2]
CLI = "from cutwater.cli.main import main; main()"
DOUBLE = """
import sys
from cutwater.jobs import child, detached, supervisor
child.PROGRAM = "tests.integration.job_double"
# What it starts never goes by itself.
supervisor.END_SECONDS = 0.2
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Kit:
    """A directory with programs and jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A socket has a short name.
        self.scratch = Path(tempfile.mkdtemp(prefix="jobs-"))
        self.started: list[subprocess.Popen[str]] = []

    def run(
        self,
        *lives: str,
        name: str = "p",
        options: tuple[str, ...] = ("--restart", "none"),
        place: tuple[str, ...] | None = None,
    ) -> subprocess.Popen[str]:
        file = self.path / f"{name}.json"
        if lives:
            file.write_text(json.dumps(lives))
        place = ("--jobs-dir", str(self.path / "jobs")) if place is None else place
        arguments = ["pipeline", "run", str(file), *place, *options]
        process = subprocess.Popen(
            [sys.executable, "-c", DOUBLE + CLI, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "TMPDIR": str(self.scratch),
                "XDG_STATE_HOME": str(self.path / "state"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def directory(self, name: str = "p") -> JobDirectory:
        return JobDirectory(self.path / "jobs", name)

    def job(self, name: str = "p") -> Job:
        return self.directory(name).require()

    def lives(self, name: str = "p") -> list[dict[str, Any]]:
        found = self.path / f"{name}.lives"
        return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []

    def until_running(self, lives: int = 1) -> Job:
        def is_running() -> bool:
            job = self.directory().load()
            return job is not None and job.state is JobState.RUNNING and len(self.lives()) == lives

        until(is_running)
        return self.job()


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    shutil.rmtree(made.scratch, ignore_errors=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    out, errors = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], errors


def test_a_program_that_dies_is_started_again_as_often_as_the_strategy_says(kit: Kit) -> None:
    process = kit.run("kill", "fail", "kill", options=("--restart", "fixed:delay=10ms,attempts=2"))
    code, told, errors = ended(process)
    assert (code, [life["life"] for life in kit.lives()]) == (34, ["kill", "fail", "kill"])
    assert "was killed (SIGKILL); what it printed is in" in errors
    states = [one["state"] for one in told if "state" in one]
    life = ["starting", "running", "waiting to restart"]
    assert states == [*life, "starting", "waiting to restart", "starting", "running", "failed"]
    job = kit.job()
    assert (job.state_now, job.restarts, job.driver, job.jvm) == (JobState.FAILED, 2, 0, 0)
    # All lives have the same checkpoint, and nothing of them is left.
    assert {life["checkpoint"] for life in kit.lives()} == {str(kit.path / "jobs" / "p" / "run-1")}
    assert not list(kit.scratch.glob("cutwater-job-*"))
    assert not [pid for one in told if one.get("jvm") for pid in [one["jvm"]] if processes.is_running(pid)]


def test_a_job_that_waits_to_restart_says_how_to_end_it(kit: Kit) -> None:
    process = kit.run("fail", options=("--restart", "fixed:delay=1h"))
    until(lambda: (job := kit.directory().load()) and job.state is JobState.WAITING)
    with pytest.raises(
        Refused, match=r"no luck: try again .* `cutwater pipeline stop p --no-savepoint` or .* cancel p`"
    ):
        ask(kit.job(), Stop("/s", 5), 30)
    ask(kit.job(), Stop(None, 5), 30)
    assert (ended(process)[0], kit.job().state) == (0, JobState.STOPPED)


def test_what_would_only_fail_again_is_not_started_again(kit: Kit) -> None:
    options = ("--restart", "fixed:delay=0s,attempts=9", "--parallelism", "5")
    code, _, errors = ended(kit.run("hopeless", options=options))
    assert (code, len(kit.lives())) == (2, 1)
    assert "error: no sense\n  code invalid_argument, exit code 2" in errors
    last_error = kit.job().last_error
    assert last_error is not None
    assert (last_error.code, last_error.message) == ("invalid_argument", "no sense")
    # It may be that that was wrong, so the next start does not ask for it again.
    assert kit.job().parallelism is None


def test_a_pipeline_that_comes_to_its_end_is_finished_and_the_next_run_goes_on_with_its_checkpoint(kit: Kit) -> None:
    code, told, _ = ended(kit.run("finish", options=("--parallelism", "2")))
    assert (code, kit.job().state_now) == (0, JobState.FINISHED)
    assert [one["progress"]["glsn"] for one in told if "progress" in one] == [PROGRESS.glsn]
    assert ended(kit.run())[0] == 0
    assert {(life["checkpoint"], life["parallelism"]) for life in kit.lives()} == {
        (str(kit.path / "jobs" / "p" / "run-1"), 2)
    }
    assert ended(kit.run(options=("--from-savepoint", "hdfs://s")))[0] == 0
    assert kit.lives()[-1]["checkpoint"].endswith("run-2")
    assert kit.job().from_savepoint == "hdfs://s"
    # The program found out how many tasks there are, and that stays.
    assert (kit.lives()[-1]["parallelism"], kit.job().parallelism) == (None, 2)
    # A start that comes to nothing does not change with which checkpoint the next one goes on.
    assert ended(kit.run("hopeless", options=("--from-savepoint", "hdfs://nope")))[0] == 2
    assert kit.lives()[-1]["checkpoint"].endswith("run-3")
    assert (kit.job().from_savepoint, kit.job().parallelism) == ("hdfs://s", 2)
    assert ended(kit.run("finish"))[0] == 0
    assert kit.lives()[-1]["checkpoint"].endswith("run-2")


def test_what_can_be_known_to_be_wrong_leaves_a_job_as_it_was(kit: Kit) -> None:
    assert ended(kit.run("finish", options=("--parallelism", "4")))[0] == 0
    (Path(kit.job().checkpoint) / "offsets").mkdir(parents=True)
    (Path(kit.job().checkpoint) / "offsets" / "0").touch()
    before = kit.job()
    code, _, errors = ended(kit.run(options=("--parallelism", "3")))
    assert (code, "was made with parallelism 4, not 3: leave --parallelism" in errors) == (32, True)
    code, _, errors = ended(kit.run(options=("--from-savepoint", str(kit.path / "nope"))))
    assert (code, f"there is no directory {kit.path / 'nope'}" in errors) == (30, True)
    code, _, errors = ended(kit.run(options=("--from-savepoint", str(kit.path))))
    assert (code, f"{kit.path} is no savepoint" in errors) == (30, True)
    assert (kit.job(), len(kit.lives())) == (before, 1)


def test_a_program_that_does_not_go_after_its_last_word_is_ended(kit: Kit) -> None:
    code, _, _ = ended(kit.run("linger"))
    assert (code, kit.job().state_now, len(kit.lives())) == (0, JobState.FINISHED, 1)


def test_stop_savepoint_and_rescale(kit: Kit) -> None:
    process = kit.run("run", options=("--from-savepoint", "hdfs://s/0", "--replay-output"))
    job = kit.until_running()
    until(lambda: ask(job, Describe(), 30).progress == PROGRESS)
    assert ask(job, TakeSavepoint("/s/1", 30), 30).savepoint == "/s/1"
    assert kit.job().savepoint == "/s/1"
    assert ask(job, Rescale(5, "/s/2", 30), 30).savepoint == "/s/2"
    job = kit.job()
    assert (job.parallelism, job.from_savepoint, job.state) == (5, "/s/2", JobState.RUNNING)
    assert [Path(life["checkpoint"]).name for life in kit.lives()] == ["run-1", "run-2"]
    assert kit.lives()[-1]["parallelism"] == 5
    # That was said of another savepoint.
    assert [life["replay_output"] for life in kit.lives()] == [True, False]
    assert ask(job, Stop("/s/3", 30), 30).savepoint == "/s/3"
    assert ended(process)[0] == 0
    assert (kit.job().state_now, kit.job().savepoint) == (JobState.STOPPED, "/s/3")
    with pytest.raises(Refused, match="does not run, it is stopped: `cutwater pipeline run"):
        ask(kit.job(), Cancel(), 30)


def test_a_rescale_whose_start_is_refused_goes_back_to_the_checkpoint_of_before(kit: Kit) -> None:
    process = kit.run(
        "run", "hopeless", "run", "fail", "run", "planned", options=("--restart", "none", "--parallelism", "2")
    )
    job = kit.until_running()
    with pytest.raises(InvalidArgument, match=r"no sense\n.* goes on as it was, with parallelism 2; .* /s/1 is there"):
        ask(job, Rescale(5, "/s/1", 30), 30)
    job = kit.until_running(lives=3)
    assert (job.parallelism, job.from_savepoint, job.savepoint) == (2, None, "/s/1")
    # Neither does a failure end the job that might pass, but after which the strategy allows for no start.
    with pytest.raises(Unavailable, match="no luck"):
        ask(job, Rescale(5, "/s/2", 30), 30)
    job = kit.until_running(lives=5)
    assert [Path(life["checkpoint"]).name for life in kit.lives()] == ["run-1", "run-2", "run-1", "run-2", "run-1"]
    assert [life["parallelism"] for life in kit.lives()] == [2, 5, 2, 5, 2]
    # What has begun with a new checkpoint goes on there and nowhere else.
    with pytest.raises(InvalidArgument, match=r"no sense$"):
        ask(job, Rescale(5, "/s/3", 30), 30)
    assert ended(process)[0] == 2
    assert Path(kit.job().checkpoint).name == "run-2"


def test_a_stop_whose_savepoint_fails_lets_the_pipeline_run_on(kit: Kit) -> None:
    kit.run("unstoppable", "run")
    job = kit.until_running()
    with pytest.raises(InvalidArgument, match="/s/1 cannot be written"):
        ask(job, Stop("/s/1", 30), 30)
    kit.until_running(lives=2)
    assert kit.job().restarts == 0
    ask(kit.job(), Stop(None, 30), 30)
    assert ended(kit.started[0])[0] == 0


def test_a_stop_that_takes_too_long_lets_the_pipeline_run_on(kit: Kit) -> None:
    kit.run("deaf", "run")
    job = kit.until_running()
    with pytest.raises(DeadlineExceeded, match=r"not done within 0.1 s and is given up"):
        ask(job, TakeSavepoint("/s/0", 0.1), 30)
    with pytest.raises(DeadlineExceeded, match=r"not done within 0.2 s, and the pipeline runs on from its checkpoint"):
        ask(job, Stop("/s/1", 0.2), 30)
    ask(kit.until_running(lives=2), Cancel(), 30)


def test_cancel_ends_all_at_once(kit: Kit) -> None:
    process = kit.run("run")
    job = kit.until_running()
    ask(job, Cancel(), 30)
    assert not processes.is_running(job.jvm)
    assert (ended(process)[0], kit.job().state_now) == (0, JobState.CANCELLED)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_is_a_stop(kit: Kit, number: int, code: int) -> None:
    process = kit.run("run")
    kit.until_running()
    process.send_signal(number)
    assert (ended(process)[0], kit.job().state_now) == (code, JobState.STOPPED)


@pytest.mark.parametrize("request_", [Stop("/s/1", 60), TakeSavepoint("/s/1", 60)])
def test_a_signal_is_no_savepoint(kit: Kit, request_: Stop | TakeSavepoint) -> None:
    """Whoever waits for one hears that there is none."""
    process = kit.run("deaf")
    job = kit.until_running()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, job, request_, 60)
        until((kit.path / "p.heard").exists)
        # The second signal does not wait for a program that hears nothing.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with pytest.raises(Refused, match="a signal stopped the job before that was done"):
            answer.result()
    ended(process)
    assert (kit.job().state_now, kit.job().savepoint) == (JobState.STOPPED, None)


def test_nothing_outlives_a_supervisor_that_is_killed(kit: Kit) -> None:
    process = kit.run("run")
    job = kit.until_running()
    process.kill()
    process.wait()
    until(lambda: not session_members(job.driver))
    assert kit.job().state_now is JobState.LOST
    # The next one goes on, and removes what the killed one could not.
    assert list(kit.scratch.glob("cutwater-job-*"))
    kit.run("run")
    job = kit.until_running(lives=2)
    assert len(list(kit.scratch.glob("cutwater-job-*"))) == 1
    ask(job, Cancel(), 30)


def test_a_job_lies_in_the_place_of_its_log_which_may_come_later(kit: Kit) -> None:
    """Where it lies is known only when the log is: until then it is tried again, as the strategy says."""
    strategy = ("--restart", "fixed:delay=10ms,attempts=2")
    code, _, errors = ended(kit.run("no log", "no log", "finish", options=strategy, place=()))
    assert (code, errors) == (0, "")
    place = kit.path / "state" / "cutwater" / "jobs" / "key-of-the-log"
    assert JobDirectory(place, "p").require().state is JobState.FINISHED
    assert kit.lives()[-1]["checkpoint"] == str(place / "p" / "run-1")
    code, _, errors = ended(kit.run("no log", name="q", options=strategy, place=()))
    assert (code, len(kit.lives("q"))) == (34, 3)
    assert "the log is not there" in errors


def test_a_job_has_one_supervisor(kit: Kit) -> None:
    first = kit.run("run")
    kit.until_running()
    code, _, errors = ended(kit.run())
    assert code == 32
    assert f"is in use by process {first.pid}: `cutwater pipeline list` shows it" in errors
    assert "run this one with another --jobs-dir" in errors
    assert kit.job().state is JobState.RUNNING
    ask(kit.job(), Cancel(), 30)


def asked(kit: Kit, *lives: str) -> JobOptions:
    (kit.path / "p.json").write_text(json.dumps(lives))
    return JobOptions(str(kit.path / "p.json"), "", "", str(kit.path / "jobs"), NoRestart(), Start(""))


def test_a_detached_supervisor_says_when_the_pipeline_runs_or_why_not(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "PROGRAM", ("-c", f"{DOUBLE}detached.main(*sys.argv[1:])"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("TMPDIR", str(kit.scratch))
    job = detached.start(asked(kit, "run"), 60)
    try:
        assert (job.state, job.pipeline, os.getsid(job.pid)) == (JobState.RUNNING, "p", job.pid)
        with pytest.raises(Refused, match=f"is in use by process {job.pid}"):
            detached.start(asked(kit, "run"), 60)
        ask(job, Cancel(), 30)
        until(lambda: not processes.is_running(job.pid))
    finally:
        processes.stop([job.pid], 1.0)
    with pytest.raises(InvalidArgument, match="no sense"):
        detached.start(asked(kit, "hopeless"), 60)
    # It has let go of everything before its error is told: whoever starts the next one finds the log free.
    assert kit.job().pid != job.pid
    assert not processes.is_running(kit.job().pid)


def scrape(job: Job) -> str:
    with urllib.request.urlopen(f"http://{job.metrics}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_metrics_of_a_job_name_what_holds_the_watermark_back(kit: Kit) -> None:
    options = ("--restart", "fixed:delay=10ms,attempts=1", "--metrics", "127.0.0.1:0")
    process = kit.run("kill", "run", options=options)
    job = kit.until_running(lives=2)
    until(lambda: ask(job, Describe(), 30).progress)
    lines = scrape(job).splitlines()
    for line in (
        'cutwater_pipeline_state{pipeline="p",state="running"} 1.0',
        'cutwater_pipeline_restarts_total{pipeline="p"} 1.0',
        'cutwater_pipeline_batch{pipeline="p"} 3.0',
        'cutwater_pipeline_glsn{pipeline="p"} 17.0',
        'cutwater_pipeline_backlog_records{pipeline="p"} 2.0',
        'cutwater_pipeline_watermark_seconds{pipeline="p"} 1.0',
        'cutwater_pipeline_watermark_held_since_seconds{log_stream="3",pipeline="p",source="orders"} 5.0',
        'cutwater_pipeline_late_rows_dropped_total{operator="v",pipeline="p"} 2.0',
        'cutwater_pipeline_late_rows_sent_total{operator="u",pipeline="p"} 3.0',
    ):
        assert line in lines
    where = ("--jobs-dir", str(kit.path / "jobs"))
    assert f"metrics:    http://{job.metrics}/metrics" in cutwater("pipeline", "describe", "p", *where)
    # Another job cannot have the same address, and is not begun.
    code, _, errors = ended(kit.run("run", name="q", options=("--metrics", job.metrics)))
    assert (code, kit.lives("q"), kit.directory("q").load()) == (16, [], None), errors
    assert f"cannot listen for metrics on {job.metrics}" in errors
    ask(job, Stop(None, 30), 60)
    ended(process)
    assert kit.job().metrics == ""


def test_metrics_of_a_detached_job(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "PROGRAM", ("-c", f"{DOUBLE}detached.main(*sys.argv[1:])"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("TMPDIR", str(kit.scratch))
    wanted = msgspec.structs.replace(asked(kit, "run"), metrics="127.0.0.1:0")
    job = detached.start(wanted, 60)
    try:
        assert 'cutwater_pipeline_state{pipeline="p",state="running"} 1.0' in scrape(job)
        taken = msgspec.structs.replace(wanted, metrics=job.metrics, root=str(kit.path / "others"))
        with pytest.raises(CutwaterError, match="cannot listen for metrics on"):
            detached.start(taken, 60)
        ask(job, Cancel(), 30)
        until(lambda: not processes.is_running(job.pid))
    finally:
        processes.stop([job.pid], 1.0)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("nonsense", "--metrics: 'nonsense' is not an address: write HOST:PORT"),
        ("", "--metrics: '' is not an address"),
        ("0.0.0.0:0", "--metrics 0.0.0.0 can be reached from other machines"),
    ],
)
def test_where_metrics_of_a_job_are_not_served(address: str, expected: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        pipeline.PipelineRunOptions(metrics=address).asked("p.py", None)
    assert pipeline.PipelineRunOptions(metrics="0.0.0.0:0", insecure=True).asked("p.py", None).metrics == "0.0.0.0:0"
    assert pipeline.PipelineRunOptions().asked("p.py", None).metrics == ""


def cutwater(*arguments: str, code: int = 0) -> str:
    """The command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CLI, *arguments], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def test_commands_show_jobs_and_reach_them(kit: Kit) -> None:
    where = ("--jobs-dir", str(kit.path / "jobs"))
    process = kit.run("run")
    job = kit.until_running()
    until(lambda: ask(job, Describe(), 30).progress)
    assert "running" in cutwater("pipeline", "list", *where)
    told = cutwater("pipeline", "describe", "p", *where)
    assert f"supervisor {process.pid}, driver {job.driver}, JVM {job.jvm}" in told
    assert "2 rows/s  lag 2 rows, 0.5 s  watermark 1970-01-01 00:00:01  state 4.9 KiB  checkpoint 3," in told
    assert f"went on from: micro-batch 2 of checkpoint {job.checkpoint}, GLSN 16" in told
    assert "late:       1 row by 'w', 2 rows by 'v' dropped" in told
    described = json.loads(cutwater("pipeline", "describe", "p", *where, "-o", "json"))
    assert (described["state"], described["progress"]["lag_records"]) == ("running", 2)
    saved = json.loads(cutwater("pipeline", "savepoint", "p", *where, "--savepoint-dir", "/s", "-o", "json"))
    assert saved["savepoint"].startswith("/s/p-20")
    assert "stopped 'p'; `cutwater" in cutwater("pipeline", "stop", "p", "--no-savepoint", *where)
    told = cutwater("pipeline", "stop", "p", *where, code=32)
    assert "`cutwater pipeline savepoint` takes a savepoint as it is" in told
    assert "no job is called 'q'" in cutwater("pipeline", "cancel", "q", *where, code=30)


# What needs no process at all.


def test_jobs_that_are_not_there_or_not_readable(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path, "p")
    with pytest.raises(NotFound, match="no job is called 'p'"):
        directory.require()
    directory.path.mkdir()
    (directory.path / "job.json").write_text("{")
    with pytest.raises(CutwaterError, match="is not the description of a job"):
        directory.load()


def test_a_savepoint_of_a_job_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark is left out: what it is asked to do is all that matters here."""
    asked: list[str] = []

    def take(checkpoint: str, target: str, *, timeout: float) -> None:
        print("Spark has much to say")
        os.write(1, b"also here\n")
        with pytest.raises(
            Refused, match="a savepoint of it is being taken, or it is just starting or ending; try again"
        ):
            Hold("p", None, "/s")
        asked.append(f"{Path(checkpoint).name} in {timeout:g} s")

    monkeypatch.setattr(pipeline, "on_spark", lambda module, name: SimpleNamespace(take_savepoint=take))
    monkeypatch.chdir(tmp_path)
    directory = JobDirectory("checkpoints", "p")
    job = directory.of_program(None)
    directory.change(job, JobState.STOPPED)
    places = ("--savepoint-dir", str(tmp_path / "s"), "--timeout", "9")

    def taken() -> Any:
        return CliRunner().invoke(pipeline.app, ["savepoint", "p", *places])

    assert "has not done a micro-batch: there is nothing to save" in taken().output
    (Path(job.checkpoint) / "offsets").mkdir(parents=True)
    (Path(job.checkpoint) / "offsets" / "0").touch()
    lock = FileLock(directory.path / "job.lock", "it", "")
    assert "a savepoint of it is being taken, or it is just starting or ending; try again" in taken().output
    lock.release()
    done = taken()
    assert (done.exit_code, asked) == (0, ["run-1 in 9 s"])
    after = directory.require()
    assert done.output.splitlines()[-1] == f"savepoint of 'p': {after.savepoint}"
    assert Path(after.savepoint or "").parent == tmp_path / "s"
    assert (directory.path / "job.log").read_text() == "also here\n"
    Hold("p", None, None)
    with pytest.raises(Refused, match="has just been started by process"):
        pipeline._saved_at_rest(pipeline.OneJob("p", tmp_path / "checkpoints"), "/s/late")


def test_what_python_prints_goes_where_it_is_meant_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open(1, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print("before")
        with suppress(Refused), pipeline._printing_to(tmp_path / "job.log"):
            print("inside")
            raise Refused("no")
        print("after")
    assert (tmp_path / "job.log").read_text() == "inside\n"
    assert capfd.readouterr().out == "before\nafter\n"


def test_which_checkpoint_a_start_goes_on_with(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path, "p")
    first = directory.of_program(None)
    assert first.checkpoint == str(directory.path / "run-1")
    directory.save(first)
    assert directory.of_program(None).checkpoint == first.checkpoint
    second = directory.of_program("/s")
    assert (second.checkpoint, second.from_savepoint) == (str(directory.path / "run-2"), "/s")
    directory.save(second)
    # Whoever runs the same program again goes on.
    assert directory.of_program("/s").checkpoint == directory.of_program(None).checkpoint == second.checkpoint
    assert directory.of_program("/other").checkpoint.endswith("run-3")


def test_a_checkpoint_of_before_there_were_jobs_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "p" / "offsets").mkdir(parents=True)
    assert JobDirectory(tmp_path, "p").of_program(None).checkpoint == str(tmp_path / "p")


@pytest.mark.parametrize("name", ["a/b", "..", ".", "100%", "a b", "ü"])
def test_any_name_of_a_pipeline_is_one_directory(tmp_path: Path, name: str) -> None:
    path = JobDirectory(tmp_path, name).path
    assert path.parent == tmp_path
    assert path.resolve().parent == tmp_path
    assert path.name not in (".", "..")
