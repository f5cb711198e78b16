"""Makes the fixtures: logs, and what a pipeline had written down there under rule 1 of the watermark.

Run it with a version of Cutwater from before rule 2:

    git worktree add /tmp/before ec94135
    PYTHONPATH=/tmp/before/src python tests/spark/rule_one/make.py killed tests/spark/rule_one/killed.tar.xz
    PYTHONPATH=/tmp/before/src python tests/spark/rule_one/make.py planned tests/spark/rule_one/planned.tar.xz

``killed``: the checkpoint of a run on Spark that was killed between plan and commit of its second micro-batch. A record
of that one (55 s) is in time under rule 1 and would be late under rule 2.
``planned``: the same two offsets as the planner makes them, without Spark; after the last records both log streams turn
idle, one at 100 s and the other at 50 s: the watermark stays at 49.999 s under rule 1 and is 99.999 s under rule 2.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from cutwater.spark.pipeline_planning import Offset, PipelinePlanner
from cutwater.spark.run import program_of

import cutwater
from cutwater.spark.options import where_of
from cutwater.types import GLSN

PROGRAM = Path(__file__).with_name("program.py")


def append(log: cutwater.Client, stream: int, seconds: int, value: bytes = b"") -> None:
    log.append("readings", value, key=b"k", timestamp=datetime.fromtimestamp(seconds, UTC), stream=stream)


def offset(checkpoint: Path, batch: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((checkpoint / "offsets" / str(batch)).read_text().split("\n")[2])
    return found


def run(log: Path, checkpoint: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PROGRAM), str(log), str(checkpoint)]
    return subprocess.Popen(command, env=os.environ | environment, start_new_session=True, cwd=log.parent)


def killed(place: Path) -> None:
    data, checkpoint = place / "log", place / "checkpoint"
    with cutwater.open(data) as log:
        first, second = log.create_topic("readings", streams=2).streams
        append(log, first, 10)
        append(log, second, 20)
    assert run(data, checkpoint).wait() == 0
    with cutwater.open(data) as log:
        append(log, second, 50)
        append(log, first, 100, b"stop")
        # The log ticks after one second of silence, and after two more. Both log streams are idle then: rule 1 stays at
        # 49.999 s, so that the next record is in time; rule 2 goes on to 99.999 s, so that it is late.
        time.sleep(4)
        append(log, second, 55)
    stopped = run(data, checkpoint, RULE_ONE_STOP="1")
    while not (checkpoint / "offsets" / "1").exists():
        time.sleep(0.1)
        assert stopped.poll() is None
    time.sleep(1)
    os.killpg(stopped.pid, signal.SIGKILL)
    stopped.wait()
    assert not (checkpoint / "commits" / "1").exists()


def planned(place: Path) -> None:
    data, checkpoint = place / "log", place / "checkpoint"
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    with cutwater.open(data) as log:
        first, second = log.create_topic("readings", streams=2).streams
        append(log, first, 10)
        append(log, second, 20)
        planner = planner_of(log, data)
        done = planner.next(planner.first(), GLSN(log.tail()), drain=False, limited=False)
        time.sleep(2.5)
        append(log, second, 50)
        append(log, first, 100, b"stop")
        time.sleep(4)
        following = planner.next(done, GLSN(log.tail()), drain=False, limited=False)
        planner.close()
    for batch, made in enumerate((done, following)):
        (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(made.plain())}")
    (checkpoint / "commits" / "0").write_text("v1\n{}")


def planner_of(log: cutwater.Client, data: Path) -> PipelinePlanner:
    sys.path.insert(0, str(PROGRAM.parent))
    import program

    where = where_of({"servers": log.servers})
    return PipelinePlanner(where, program_of(program.made(str(data)), log, 1, 1), "earliest", 10**6)


def note_steps(place: Path) -> None:
    """What the planner says of the micro-batch that was planned and not done."""
    data, checkpoint = place / "log", place / "checkpoint"
    with cutwater.open(data) as log:
        planner = planner_of(log, data)
        walk = planner.walk(Offset.of(offset(checkpoint, 0)), Offset.of(offset(checkpoint, 1)))
        steps = {
            "watermarks": {
                ",".join(sorted(t)): [s.before, s.moments, s.values] for t, s in walk.ticks.watermarks.items()
            },
            "times": [walk.ticks.times.before, walk.ticks.times.moments, walk.ticks.times.values],
            "seen": [
                [r.stream, r.first, r.last, {",".join(t): rows for t, rows in r.seen.items()}] for r in walk.ranges
            ],
        }
        planner.close()
    (place / "steps.json").write_text(json.dumps(steps, indent=1) + "\n")


def main() -> None:
    kind, target = sys.argv[1], Path(sys.argv[2]).resolve()
    if kind == "steps":
        note_steps(target)
        return
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        {"killed": killed, "planned": planned}[kind](place)
        # In a process of its own, which has not had this log open before.
        subprocess.run([sys.executable, __file__, "steps", str(place)], check=True)
        with tarfile.open(target, "w:xz") as archive:
            for part in ("log", "checkpoint", "steps.json"):
                archive.add(place / part, part)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
