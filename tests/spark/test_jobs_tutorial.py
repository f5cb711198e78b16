"""docs/tutorial-jobs.md is run as it is written, in one shell, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutwater.admin import local_cluster
from cutwater.runtime import processes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial-jobs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(sh|text)\n(.*?)```", PAGE, re.DOTALL)
MARK = "=== block {} ==="
SECONDS = 900


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    cluster = tmp_path / "jobs-tutorial" / "cluster"
    if cluster.exists():
        found = local_cluster.load(cluster).processes()
        processes.stop([member.pid for member in found if member.pid], 30.0)


def script() -> str:
    """Return all blocks as one script, which prints a mark before the output of each."""
    commands = [text for kind, text in BLOCKS if kind == "sh"]
    marked = (f"echo '{MARK.format(number)}'\n{text}" for number, text in enumerate(commands))
    return "set -e -o pipefail\n" + "\n".join(marked)


def outputs(printed: str) -> list[str]:
    """Return what each block printed."""
    return [part.partition("\n")[2] for part in re.split(r"(?m)^=== block (?=\d+ ===)", printed)[1:]]


@pytest.mark.timeout(SECONDS + 60)
def test_the_tutorial_does_what_it_says(place: Path) -> None:
    programs = place / "bin"
    programs.mkdir()
    command = programs / "cutwater"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cutwater.cli "$@"\n')
    command.chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=place,
        env=given | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    printed = outputs(done.stdout)
    assert done.returncode == 0, (printed[-1:], done.stderr[-2_000:], _log_of(place))
    kinds = [kind for kind, _ in BLOCKS]
    shown = [(kinds[:at].count("sh") - 1, text) for at, (kind, text) in enumerate(BLOCKS) if kind == "text"]
    assert len(shown) == 3
    for number, text in shown:
        assert printed[number].endswith(text), (number, printed[number], text)
    assert "per-minute" in printed[2], "the plan of the pipeline is shown"
    versions = printed[6].strip().splitlines()
    assert versions[-2].split()[:2] == ["1", "present"], "the earlier version is back"
    assert versions[-1].split()[:3] == ["2", "came", "up"]


def _log_of(place: Path) -> str:
    log = place / "jobs-tutorial" / "cluster" / "agent1.log"
    return log.read_text()[-4_000:] if log.exists() else "no agent was started"
