"""Which processes of a local cluster run, and whose they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cutwater.admin import free_ports
from cutwater.admin.free_ports import FIRST_EPHEMERAL_PORT, free_addresses
from cutwater.errors import Refused, Unavailable
from cutwater.runtime import processes


def test_a_process_of_another_user_runs_and_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    pid = os.getpid()
    assert processes.is_running(pid)
    assert processes.is_running(pid, processes.started_at(pid))
    assert not processes.is_running(pid, processes.started_at(pid) + 1)
    with pytest.raises(Refused, match=f"process {pid} belongs to another user"):
        processes.stop([pid], 1.0)


def test_a_child_that_ended_does_not_run_and_only_is_running_puts_it_to_rest() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.lives_on(child.pid, 0)
    assert not processes.is_running(child.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    child.returncode = 0
    assert not processes.is_running(0)


def test_a_server_that_does_not_serve_is_ended_and_its_exit_code_and_last_words_are_told(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('no room'); sys.exit(7)"
    process = processes.Starting([sys.executable, "-S", "-c", code], tmp_path / "log")
    with pytest.raises(Unavailable, match=r"does not serve \(exit code 7\): no room"):
        process.served()
    assert not processes.is_running(process.pid)


SERVER_LOG = """\
2026-01-01T00:00:00Z [info     ] storage node 1 opens 3 replicas [cutwater.storagenode]
2026-01-01T00:00:00Z [warning  ] log stream 2 waits for a peer [cutwater.storagenode]
error: port 7101 is in use: stop the process that uses it, or choose another port with --listen
  code invalid_argument, exit code 2
"""


def test_a_failed_start_tells_the_error_of_this_start_and_where_the_log_is(tmp_path: Path) -> None:
    """Not the whole log, and not what an earlier start said."""
    log = tmp_path / "sn1.log"
    log.write_text("error: an earlier start\n")
    code = f"import sys; sys.stderr.write({SERVER_LOG!r}); sys.exit(2)"
    process = processes.Starting([sys.executable, "-S", "-c", code], log)
    with pytest.raises(Unavailable) as raised:
        process.served()
    told = raised.value.message.partition("does not serve ")[2]
    assert told == (
        "(exit code 2): port 7101 is in use: stop the process that uses it, or choose another port with --listen. "
        f"Its log is {log}"
    )
    silent = processes.Starting([sys.executable, "-S", "-c", ""], log)
    with pytest.raises(Unavailable, match=r"\(exit code 0\): it said nothing\. Its log is "):
        silent.served()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("Usage: cutwater\n╭─ Error ──╮\n│ No such option: --x  │\n╰────╯\n", "No such option: --x"),
        ("Traceback (most recent call last):\n  File x\nValueError: no\n", "ValueError: no"),
        ('{"level":"info","msg":"a"}\n{"level":"fatal","msg":"b"}\n', '{"level":"fatal","msg":"b"}'),
        ("z [error    ] the disk is full [c]\nz [info     ] stopping [c]\n", "z [error    ] the disk is full [c]"),
    ],
)
def test_the_reason_in_a_log_is_its_last_error_or_its_last_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "log").write_text(text)
    assert processes.reason_in(tmp_path / "log") == reason


def test_a_server_that_is_not_waited_for_is_left_to_the_caller_without_a_warning(tmp_path: Path) -> None:
    """Of several that are started at once one may fail; the others are then stopped by their pids."""
    process = processes.Starting([sys.executable, "-S", "-c", "import time; time.sleep(60)"], tmp_path / "log")
    pid = process.pid
    del process
    processes.stop([pid], 5.0)
    assert not processes.is_running(pid)


def test_addresses_for_servers_are_not_among_those_that_outgoing_connections_get() -> None:
    """Such a connection could take the port of a server that starts, or starts again."""
    addresses = free_addresses(40)
    assert len(set(addresses)) == 40
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(int(address.rpartition(":")[2]) < FIRST_EPHEMERAL_PORT for address in addresses)


def test_a_port_is_handed_out_once_until_its_note_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is about to start, or to start again, does not listen on its port yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(free_ports, "_first_ephemeral_port", lambda: free_ports.PORT_MIN + 16)
    given = list[str]()
    with pytest.raises(Unavailable, match="none is free"):
        given.extend(iter(lambda: free_addresses(1)[0], ""))
    assert 4 < len(given) == len(set(given)) <= 16
    for note in free_ports.notes().iterdir():
        os.utime(note, (1.0, 1.0))
    assert free_addresses(1)[0] in given
