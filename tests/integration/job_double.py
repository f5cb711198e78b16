"""A program of a job that runs no pipeline: it does what its file says, so that supervisors can be tried without Spark.

The file is a list of JSON, one element for each life: "run", "kill" (after it ran), "fail", "hopeless", "planned"
(as hopeless, with a micro-batch in its checkpoint), "finish", "linger" (as finish, and then it does not go),
"unstoppable" (a stop with savepoint fails), "deaf" (does nothing that it is told, and notes that it heard it). Like
the real one, it starts a process, and ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from cutwater.errors import InvalidArgument, Unavailable
from cutwater.jobs.child import session_members
from cutwater.jobs.job_file import Restored
from cutwater.jobs.messages import (
    TELLS_LOG,
    Ended,
    Failed,
    FromProgram,
    HeldBy,
    Loaded,
    Moved,
    Progress,
    Running,
    Stop,
    Taken,
    TakeSavepoint,
    Told,
    line,
    read_to_program,
)

HELD = HeldBy("orders", 3, 1_000, 5.0, 4.0)
PROGRESS = Progress(3, 17, 20, 1.5, 2, 0.5, 1_000, 4, 5_000, 1.0, {"w": 1, "v": 2}, {"u": 3}, HELD)


def main(events: str, file: str, variable: str, log: str) -> None:
    def tell(message: FromProgram) -> None:
        os.write(int(events), line(message))

    script = json.loads(Path(file).read_text())
    lives = Path(file).with_suffix(".lives")
    past = lives.read_text().splitlines() if lives.exists() else []
    life = script[min(len(past), len(script) - 1)]
    # In the place of the JVM, and it does not go by itself.
    jvm = subprocess.Popen(["sleep", "1000"])
    if life == "no log":
        with lives.open("a") as out:
            out.write(json.dumps({"life": life}) + "\n")
        tell(Failed(Told.of(Unavailable("the log is not there"))))
        sys.exit(1)
    tell(Loaded(variable or Path(file).stem, "key-of-the-log" if os.environ.get(TELLS_LOG) else ""))
    start = read_to_program(sys.stdin.buffer.readline())
    with lives.open("a") as out:
        names = ("checkpoint", "parallelism", "replay_output")
        out.write(json.dumps({"life": life} | {name: getattr(start, name) for name in names}) + "\n")
    if life == "planned":
        offsets = Path(start.checkpoint) / "offsets"  # type: ignore[union-attr]
        offsets.mkdir(parents=True)
        (offsets / "0").touch()
    if life in ("fail", "hopeless", "planned"):
        error = Unavailable("no luck") if life == "fail" else InvalidArgument("no sense")
        tell(Failed(Told.of(error, is_hopeless=life != "fail")))
        sys.exit(1)
    restored = Restored(start.checkpoint, 16, 2)  # type: ignore[union-attr]
    tell(Running(jvm.pid, start.parallelism or 2, 20, start.from_savepoint, restored))  # type: ignore[union-attr]
    tell(Moved(PROGRESS))
    if life in ("finish", "linger"):
        tell(Ended(is_finished=True))
    if life == "finish":
        return
    if life == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    for one in sys.stdin.buffer:
        match read_to_program(one):
            case _ if life in ("deaf", "linger"):
                Path(file).with_suffix(".heard").touch()
            case TakeSavepoint(target):
                tell(Taken(target))
            case Stop(savepoint) if savepoint is not None and life == "unstoppable":
                tell(Failed(Told.of(InvalidArgument(f"{savepoint} cannot be written"), is_hopeless=True)))
                sys.exit(1)
            case Stop(savepoint):
                tell(Ended(is_finished=False, savepoint=savepoint))
                return
    # The supervisor is gone.
    for pid in sorted(session_members(os.getsid(0)) or [], key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
