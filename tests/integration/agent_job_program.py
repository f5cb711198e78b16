"""In the place of a job's process: runs no pipeline, and does what the argument ``as`` of the job says.

``good`` decides a batch and then lives; ``fails``, ``hopeless``; ``crashes`` after it ran; ``lingers`` (has finished,
and stays); ``hungry`` takes memory; ``prints`` much; ``deaf`` does not stop. Like the real one, it starts
another process, and ends with its input. A note of each life is appended to the file that the argument ``notes`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from cutwater.agent.job.job_messages import (
    FromJob,
    JobAnswers,
    JobEnds,
    JobMoves,
    JobRuns,
    SaveJob,
    StopJob,
    read_to_job,
)
from cutwater.agent.job.job_setup import ErrandEnds, JobSetup, read_errand_setup, read_job_setup
from cutwater.core.jobs.errand_bodies import ValidateAnswer
from cutwater.core.jobs.job_records import RunEnd
from cutwater.jobs.messages import Told, line


class Program:
    def __init__(self, events: int, setup: JobSetup) -> None:
        self.events, self.setup = events, setup
        self.arguments = setup.program.arguments
        self.other = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})

    def tell(self, message: FromJob) -> None:
        os.write(self.events, line(message))

    def note(self, **what: Any) -> None:
        told = {"pid": os.getpid(), "other": self.other.pid, "epoch": self.setup.epoch, "attempt": self.setup.attempt}
        with Path(self.arguments["notes"]).open("a") as out:
            out.write(json.dumps(told | what) + "\n")

    def run(self) -> None:
        setup, life = self.setup, self.arguments.get("as", "good")
        token = Path(setup.cluster.token_file).read_text().strip() if setup.cluster.token_file else ""
        variables = sorted(name for name in os.environ if not name.startswith("LC_"))
        place = Path(setup.checkpoint)
        self.note(
            life=life,
            checkpoint=setup.checkpoint,
            savepoint=setup.savepoint,
            predecessor=setup.predecessor,
            token=bool(token),
            variables=variables,
            uid=os.getuid(),
            files=sorted(os.listdir(setup.program.directory)),
            processors=len(os.sched_getaffinity(0)),
            directory=os.getcwd(),
        )
        place.mkdir(parents=True, exist_ok=True)
        (place / "begun").touch()
        print("hello from", setup.name, flush=True)
        if life in ("fails", "hopeless"):
            error = Told("pipeline_failed", "boom")
            self.tell(JobEnds(RunEnd.FAILED, error, is_hopeless=life == "hopeless", glsn=7))
            return
        self.tell(JobRuns(setup.parallelism))
        if life == "crashes" and setup.attempt == 1:
            os.kill(os.getpid(), 9)
        self.tell(JobMoves(0, 5, 1.5))
        if life == "lingers":
            self.tell(JobEnds(RunEnd.FINISHED))
            time.sleep(1_000)
        if life == "hungry":
            self.memory = bytearray(os.urandom(1 << 20) * 300)
        if life == "prints":
            for number in range(40_000):
                print(f"{number:08} {'x' * 90}", flush=False)
            sys.stdout.flush()
        for one in sys.stdin.buffer:
            match read_to_job(one):
                case SaveJob(ask, path):
                    self.save(ask, path)
                case StopJob() if life == "deaf":
                    self.note(life="deaf", heard=True)
                case StopJob(ask, _, path):
                    if path:
                        self.save(ask, path)
                    self.tell(JobEnds(RunEnd.STOPPED))
                    return
        os.killpg(0, 9)

    def save(self, ask: int, path: str) -> None:
        target = Path(self.setup.savepoint_root) / path
        target.mkdir(parents=True)
        (target / "manifest").write_text(str(self.setup.version))
        self.tell(JobAnswers(ask, 9, 1, 100))


def errand(events: int) -> None:
    setup = read_errand_setup(sys.stdin.buffer.readline())
    assert setup.program is not None
    if setup.program.arguments.get("restores") == "no":
        told = ErrandEnds(error=Told("refused", "the program has no operator 'count'"))
    elif setup.program.arguments.get("restores") == "never":
        threading.Event().wait()
    else:
        answer = ValidateAnswer(setup.name, f"plan of {setup.name}", restored=(setup.savepoint_id,))
        told = ErrandEnds(body=msgspec.Raw(msgspec.json.encode(answer)))
    os.write(events, line(told))


if __name__ == "__main__":
    Program(int(sys.argv[1]), read_job_setup(sys.stdin.buffer.readline())).run()
