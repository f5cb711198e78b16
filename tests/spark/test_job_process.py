"""What runs in the process of a job, on real Spark and a real cluster with TLS and access control: begun, saved, paused
and succeeded by another assignment, stopped, upgraded, failed. The output topic has every row once, and the state is
that of an oracle.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec import Raw, structs

import cutwater
from cutwater.agent.job.errand_answers import answer_of
from cutwater.agent.job.job_messages import JobEnds, JobMoves, JobRuns, SaveJob, StopJob
from cutwater.agent.job.job_setup import ErrandSetup, JobSetup, LimitsSetup
from cutwater.core.jobs.errand_bodies import DataInfo, ValidateAnswer
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.jobs.job_records import RunEnd
from cutwater.errors import CutwaterError
from cutwater.savepoints.files import Files, LocalFiles
from cutwater.savepoints.savepoint import open_savepoint
from tests.spark.job_process_kit import JobProcess, cluster_setup, errand, unpacked
from tests.spark.secured_kit import SecuredCluster, secured_cluster

pytestmark = pytest.mark.timeout(1_500)

ROWS = "k string, n bigint"
LOGIC = """
from cutwater.pipeline import ProcessFunction, ValueState


class Number(ProcessFunction):
    seen = ValueState("bigint", default=0)

    def process(self, record, ctx):
        self.seen.set(self.seen.get() + 1)
        if record.n == 666:
            raise ValueError("the number of the beast")
        return {"k": ctx.key, "n": record.n, "seen": self.seen.get(), "version": "%(version)s"}
"""
FILE = """
from cutwater.pipeline import Pipeline
from logic import Number

p = Pipeline("numbered", log="cutwater://nowhere.invalid:1")
numbered = p.source("in", schema="k string, n bigint").process(
    key="k", function=Number(), uid="number", schema="k string, n bigint, seen bigint, version string"
)
numbered.sink("out", uid="out")
print("the program prints")
"""
PACKAGE = """
from cutwater.pipeline import Pipeline
from shop.logic import Number


def make(name: str = "numbered", least: int = 0) -> Pipeline:
    # Not needed before a task runs.
    from shop import logic

    p = Pipeline(name)
    rows = p.source("in", schema="k string, n bigint").filter(lambda row: row.n >= least)
    numbered = rows.process(
        key="k", function=Number(), uid="number", schema="k string, n bigint, seen bigint, version string"
    )
    numbered.sink("out", uid="out")
    return p
"""
OUT = pa.schema({"k": pa.string(), "n": pa.int64(), "seen": pa.int64(), "version": pa.string()})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    with secured_cluster(tmp_path_factory.mktemp("jobs") / "cluster") as cluster:
        with cluster.owner() as log:
            log.create_topic("in", streams=2, schema=pa.schema({"k": pa.string(), "n": pa.int64()}))
            log.create_topic("out", schema=OUT)
        rights = ("describe,read", "topic:in"), ("describe,append", "topic:out"), ("publish", "run:numbered")
        cluster.allow("jobber", *rights, ("act-as", "principal:job:numbered"))
        cluster.token("jobber")
        yield cluster


class Kit:
    def __init__(self, cluster: SecuredCluster, log: cutwater.Client, path: Path) -> None:
        self.log, self.path = log, path
        self.cluster = cluster_setup(cluster.servers, cluster.ca, cluster.directory.with_name("jobber.token"))
        self.v1 = unpacked(path / "v1", {"numbered.py": FILE, "logic.py": LOGIC % {"version": "1"}}, "numbered.py:p")
        files = {"shop/__init__.py": "", "shop/jobs.py": PACKAGE, "shop/logic.py": LOGIC % {"version": "2"}}
        self.v2 = unpacked(path / "v2", files, "shop.jobs:make", least="0")
        self.made = 0
        self.running: list[JobProcess] = []
        self.wanted: list[dict[str, Any]] = []
        self._seen: dict[str, int] = {}

    def setup(self, line: int, epoch: int, **changed: Any) -> JobSetup:
        self.made += 1
        made = JobSetup(
            job=1,
            name="numbered",
            epoch=epoch,
            attempt=1,
            version=1,
            cluster=self.cluster,
            program=self.v1,
            parallelism=2,
            checkpoint=str(self.path / f"checkpoints/numbered/begun-{line}/epoch-{epoch}"),
            savepoint_root=str(self.path / "savepoints"),
            scratch=str(self.path / f"scratch-{self.made}"),
            limits=LimitsSetup(2 << 30, 2.0),
        )
        return structs.replace(made, **changed)

    def start(self, setup: JobSetup) -> JobProcess:
        process = JobProcess(setup, self.path / f"log-{self.made}")
        self.running.append(process)
        return process

    def append(self, count: int, version: str) -> int:
        """So many rows more, and returns the last position."""
        start = self.log.table("in").num_rows
        made = [{"k": "abc"[n % 3], "n": n} for n in range(start, start + count)]
        for row in made:
            seen = self._seen[row["k"]] = self._seen.get(row["k"], 0) + 1
            self.wanted.append({**row, "seen": seen, "version": version})
        self.log.append("in", made)
        return int(self.log.tail())

    def out(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.log.table("out").select(OUT.names).to_pylist()
        return sorted(rows, key=lambda row: row["n"])

    def state(self, savepoint: str) -> dict[str, int]:
        rows = open_savepoint(self.path / "savepoints" / savepoint).table("number").to_pylist()
        return {row["key"]["k"]: row["state_seen"] for row in rows}


@pytest.fixture
def kit(secured: SecuredCluster, tmp_path: Path) -> Iterator[Kit]:
    with secured.owner() as log:
        made = Kit(secured, log, tmp_path)
        try:
            yield made
        finally:
            for process in made.running:
                process.close()


def errands(kit: Kit) -> None:
    """Questions about the savepoints, and whether programs could go on from them. Nothing is started."""
    places = [str(kit.path / "savepoints/numbered" / name) for name in ("s1", "s2")]
    asked = ErrandSetup(ErrandKind.STATE, "numbered", str(kit.path / "errand"), savepoint=places[1], savepoint_id="a")
    asked = structs.replace(asked, other_savepoint=places[0], body=Raw(b'{"uid":"number","key":["b"]}'))

    def answer(kind: ErrandKind, body: bytes = b"{}") -> Any:
        return msgspec.json.decode(answer_of(structs.replace(asked, kind=kind, body=Raw(body)), nullcontext_files))

    (row,) = answer(ErrandKind.STATE, b'{"uid":"number","key":["b"]}')["operators"]["number"]
    assert (row["key"], row["state_seen"]) == ({"k": "b"}, kit.state("numbered/s2")["b"])
    some = answer(ErrandKind.STATE, b'{"limit":2}')
    assert (len(some["operators"]["number"]), some["more"]) == (2, True)
    assert answer(ErrandKind.STATE, b'{"limit":3}').keys() == {"operators"}
    for body, told in (
        (b'{"limit":0}', "1 to 10000"),
        (b'{"uid":"x"}', "no operator 'x'"),
        (b"[]", "no StateQuestion"),
    ):
        with pytest.raises(CutwaterError, match=told):
            answer(ErrandKind.STATE, body)
    described = answer(ErrandKind.SAVEPOINT_DESCRIBE)
    assert (described["pipeline"], described["parallelism"]) == ("numbered", 2)
    assert answer(ErrandKind.SAVEPOINT_VERIFY)["bytes"] == open_savepoint(places[1]).manifest.bytes
    assert answer(ErrandKind.SAVEPOINT_DIFF)["glsn"] < 0
    place = shutil.copytree(places[0], kit.path / "copied")
    asked = structs.replace(asked, savepoint=str(place))
    assert answer(ErrandKind.SAVEPOINT_DELETE) == {"deleted": "a"}
    assert not place.exists()
    asked = structs.replace(asked, savepoint=places[1])

    # Those that import a program, each in a process of its own.
    kit.made += 1
    wanted = structs.replace(
        asked,
        kind=ErrandKind.VALIDATE,
        body=Raw(b"{}"),
        scratch=str(kit.path / f"errand-{kit.made}"),
        cluster=kit.cluster,
        program=kit.v2,
        parallelism=3,
    )
    fits = errand(wanted, kit.path / "errand-log")
    assert fits.error is None
    told = msgspec.json.decode(fits.body, type=ValidateAnswer)
    assert (told.pipeline, told.restored, told.left_behind, told.empty) == ("numbered", ("number",), (), ())
    assert told.sources == (DataInfo("in", schema="k string, n bigint"),)
    assert told.sinks == (DataInfo("out", "out", "k string, n bigint, seen bigint, version string"),)
    assert "number" in told.plan
    text = "from cutwater.pipeline import Pipeline\nfrom logic import Number\n" + FILE[FILE.index("p = ") :]
    files = {"numbered.py": text.replace('uid="number"', 'uid="other"'), "logic.py": LOGIC % {"version": "0"}}
    other = unpacked(kit.path / "other", files, "numbered.py:p")
    unfit = errand(structs.replace(wanted, scratch=str(kit.path / "unfit"), program=other), kit.path / "errand-log")
    assert unfit.error is not None
    assert "has state of 'number', and the program has no operator with that uid: it has 'other'" in unfit.error.message
    assert "This is about savepoint a." in unfit.error.message


def test_processes_that_run_no_pipeline(kit: Kit) -> None:
    """They say why, or die with the pipe of their agent, with all that they have started."""
    programs = {
        "sleeps": "import subprocess, time\nsubprocess.Popen(['sleep', '1000'])\ntime.sleep(1_000)\n",
        "exits": "import sys\nsys.exit(0)\n",
        "other": FILE.replace('numbered"', 'others"'),
        "beside": FILE.replace('"in"', '"nothing"'),
    }
    logic = {"logic.py": LOGIC % {"version": "0"}}
    started = {
        name: kit.start(kit.setup(9, 9, program=unpacked(kit.path / name, {"a.py": text, **logic}, "a.py:p")))
        for name, text in programs.items()
    }
    ends = {name: process.ended() for name, process in started.items() if name != "sleeps"}
    assert all(ended.end is RunEnd.FAILED and ended.is_hopeless for ended in ends.values()), ends
    told = {name: ended.error.message for name, ended in ends.items() if ended.error is not None}
    assert told["exits"].startswith("a.py, line 2: it ended the process"), told
    assert "is called 'others', and the job 'numbered'" in told["other"]
    assert "reads the topic 'nothing', which does not exist" in told["beside"]
    sleeps = started["sleeps"]
    sleeps.until(lambda: len(sleeps.left()) == 2, "the program runs")
    assert sleeps.process.stdin is not None
    sleeps.process.stdin.close()
    sleeps.gone()
    assert sleeps.heard == []


def nullcontext_files() -> AbstractContextManager[Files]:
    return nullcontext(LocalFiles())


def test_a_job_from_its_beginning_over_two_assignments_and_an_upgrade_to_a_failure(kit: Kit) -> None:
    first = kit.start(kit.setup(1, 1))
    assert first.first(JobRuns) == JobRuns(2)
    # It has come up, though there is no input.
    assert first.first(JobMoves).batch == 0
    first.decided(kit.append(30, "1"))
    assert list((kit.path / "scratch-1").glob("librocksdbjni*")), "nothing of it lies elsewhere"
    saved = first.asked(SaveJob(1, "numbered/s1", 120))
    assert (saved.error, kit.state("numbered/s1")) == (None, dict.fromkeys("abc", 10))
    point = open_savepoint(kit.path / "savepoints/numbered/s1").manifest
    assert (saved.glsn, saved.batch, saved.bytes) == (point.glsn, point.run.batch, point.bytes)
    assert "the program prints" in first.printed()

    # Another assignment takes over while the first one sleeps, and the first one wakes up again.
    first.signal(signal.SIGSTOP)
    kit.append(9, "1")
    # An agent in between has died before it began.
    (kit.path / "checkpoints/numbered/begun-1/epoch-2").mkdir()
    second = kit.start(kit.setup(1, 3, predecessor=str(kit.path / "checkpoints/numbered/begun-1/epoch-2")))
    assert "epoch-3" in second.first(JobRuns).restored
    for _ in range(3):
        second.decided(kit.append(3, "1"))
    first.signal(signal.SIGCONT)
    second.decided(kit.append(6, "1"))
    assert kit.out() == kit.wanted
    fenced = first.ended()
    assert (fenced.end, fenced.is_hopeless, fenced.error and fenced.error.code) == (RunEnd.FAILED, True, "run_fenced")

    # A savepoint that cannot be written ends nothing.
    (kit.path / "savepoints/numbered/taken").write_text("in the way")
    wrong = second.asked(StopJob(1, 120, "numbered/taken"))
    assert wrong.error is not None
    assert "numbered/taken" in wrong.error.message
    second.decided(kit.append(3, "1"))
    kit.append(30, "1")
    stopped = second.asked(StopJob(2, 120, "numbered/s2"))
    assert (stopped.error, second.ended()) == (None, JobEnds(RunEnd.STOPPED))
    done = len(kit.out())
    assert sum(kit.state("numbered/s2").values()) == done
    assert kit.out() == kit.wanted[:done]

    errands(kit)

    # What was not read before the stop is the input of the next version.
    kit.wanted[done:] = [{**row, "version": "2"} for row in kit.wanted[done:]]
    savepoint = str(kit.path / "savepoints/numbered/s2")
    third = kit.start(kit.setup(4, 4, program=kit.v2, savepoint=savepoint, log_file=str(kit.path / "own-log")))
    assert savepoint in third.first(JobRuns).restored
    third.decided(kit.append(3, "2"))
    assert kit.out() == kit.wanted
    kit.log.append("in", [{"k": "c", "n": 666}])
    beast = int(kit.log.tail())
    failed = third.ended()
    assert (failed.end, failed.is_hopeless, failed.glsn) == (RunEnd.FAILED, False, beast)
    assert failed.error is not None
    assert failed.error.code == "pipeline_failed"
    assert "the number of the beast" in failed.error.message
    moves = [one for one in third.heard if isinstance(one, JobMoves)]
    assert moves[-1].state_bytes > 0
    assert kit.out() == kit.wanted
