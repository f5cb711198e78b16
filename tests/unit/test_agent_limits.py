"""Limits of jobs, roots of operators, and what an agent says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cutwater.agent.agent_options import AgentStartOptions
from cutwater.agent.processes.limits import ControlGroups, JobLimits, MeasuredJobs, SlotLimits, excesses
from cutwater.agent.processes.watchdog import kill_members
from cutwater.agent.roots import RootPlace, Roots, parse_root
from cutwater.core.jobs.agents import JobIsolation
from cutwater.errors import InvalidArgument, NotFound

MIB = 1 << 20


def test_a_job_has_the_limits_of_its_slots_or_less() -> None:
    slot = SlotLimits(1_000, 0.5)
    assert slot.of(3, 0, 0.0) == JobLimits(3_000, 1.5)
    assert slot.of(3, 2_000, 1.0) == JobLimits(2_000, 1.0)
    assert SlotLimits().of(1, 2_000, 1.0) == JobLimits(2_000, 1.0)
    with pytest.raises(InvalidArgument, match="4000 bytes of memory, and 3 slots of this agent have 3000"):
        slot.of(3, 4_000, 0.0)
    with pytest.raises(InvalidArgument, match="2 processors, and 3 slots"):
        slot.of(3, 0, 2.0)


def test_processors_are_given_to_jobs_in_turn() -> None:
    jobs = MeasuredJobs(range(4))
    assert jobs.open("a", JobLimits(0, 1.5)) == ("", (0, 1))
    assert jobs.open("b", JobLimits(0, 1.0)) == ("", (2,))
    assert jobs.open("c", JobLimits(0, 2.0)) == ("", (0, 3))
    jobs.close("a")
    assert jobs.open("d", JobLimits(0, 1.0)) == ("", (1,))
    assert jobs.open("e", JobLimits(0, 4.0)) == ("", ()), "all are no limit"
    assert jobs.open("f", JobLimits(0, 0.0)) == ("", ())


def test_memory_of_all_processes_of_a_job_is_counted() -> None:
    program = (
        "import subprocess, sys, time\n"
        "data = b'x' * (60 << 20)\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.Popen([sys.executable, __file__, 'child'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"agent-limits-{os.getpid()}.py"
    file.write_text(program)
    process = subprocess.Popen([sys.executable, str(file)], start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        # The child is in another session, and prints to the same pipe.
        assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "ready\n"]
        assert excesses({process.pid: 300 * MIB}) == {}
        found = excesses({process.pid: 100 * MIB})
        assert 100 * MIB < found[process.pid] < 300 * MIB
    finally:
        kill_members("no such mark", [process.pid], seconds=10.0)
        process.wait()
        process.stdout.close()
        file.unlink()


def test_control_groups_get_the_limits(tmp_path: Path) -> None:
    # A directory in the place of the kernel's: what is written where.
    groups = ControlGroups(tmp_path)
    place, processors = groups.open("7-1-1", JobLimits(1_000, 1.5))
    assert (place, processors) == (str(tmp_path / "7-1-1" / "all"), ())
    found = {path.name: path.read_text() for path in (tmp_path / "7-1-1").iterdir() if path.is_file()}
    assert found == {"memory.max": "1000", "memory.swap.max": "0", "memory.oom.group": "1", "cpu.max": "150000 100000"}
    (tmp_path / "7-1-1" / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert "limit: 1000 bytes" in groups.why_ended("7-1-1")
    assert groups.why_ended("8-1-1") == ""


def test_roots() -> None:
    assert parse_root("--root", "a=/x/y/,shared") == RootPlace("a", "/x/y", True)
    assert parse_root("--root", "a=file:///x") == RootPlace("a", "/x")
    hdfs = parse_root("--root", "a=hdfs://nn:8020/c,shared")
    assert (hdfs.path("j/1"), hdfs.local) == ("hdfs://nn:8020/c/j/1", None)
    for wrong in ("", "a", "a=", "=/x", "a=x/y"):
        with pytest.raises(InvalidArgument):
            parse_root("--root", wrong)
    roots = Roots("checkpoint", (hdfs,), Path("/d"))
    with pytest.raises(NotFound, match="no checkpoint root 'b': it has a"):
        roots.of("b")
    assert Roots("checkpoint", (), Path("/d")).of("default").place == "/d"
    with pytest.raises(InvalidArgument, match="named twice"):
        Roots("checkpoint", (hdfs, hdfs), Path("/d"))


def test_what_an_agent_says_of_itself(tmp_path: Path) -> None:
    options = AgentStartOptions("a", "cutwater://x:1", "cwt_secret", work_dir=tmp_path, labels={"disk": "ssd"}, slots=3)
    told = options.description("what holds")
    assert (told.slots, told.labels, told.masters, told.limits) == (3, {"disk": "ssd"}, ("local",), "what holds")
    assert told.isolation is JobIsolation.ONE_OWNER
    assert told.checkpoint_roots[0].place == str(tmp_path / "checkpoints")
    assert "secret" not in repr(options)
    both = AgentStartOptions("a", "cutwater://x:1", work_dir=tmp_path, is_shared_user=True, job_users=("x",))
    with pytest.raises(InvalidArgument, match="contradict"):
        both.description("")


def test_a_keeper_leaves_nothing_and_ends_as_the_command_did(tmp_path: Path) -> None:
    keeper = Path(sys.modules["cutwater.agent.processes.limits"].__file__ or "").with_name("keeper.py")

    def run(command: str) -> subprocess.CompletedProcess[str]:
        place = json.dumps({"directory": str(tmp_path)})
        words = [sys.executable, "-I", "-S", str(keeper), place, "/bin/sh", "-c", command]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)

    assert run("pwd; exit 7").stdout.strip() == str(tmp_path)
    assert run("exit 7").returncode == 7
    assert run("kill -9 $$").returncode == -9
    assert run("kill -15 $$").returncode == -15
    # It has left the session, its environment and its parent.
    hidden = run("env -i setsid sh -c 'sleep 1000 & echo $!' & wait").stdout.strip()
    for _ in range(100):
        if not Path(f"/proc/{hidden}").exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"process {hidden} is left")
