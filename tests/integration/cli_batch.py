"""Runs many commands in one process tree: each in a fork that has loaded what all of them need.

Run as a program, it reads lines of JSON, the words and the variables of a command, and runs one after another. Each
gets a process of its own, whose output and errors go where this program's go, after a line with its number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

MARK = "\x1e"
"""Begins the output of a command."""


class CommandRun(NamedTuple):
    words: tuple[str, ...]
    code: int
    told: str


def run_commands(
    commands: Iterable[tuple[tuple[str, ...], Mapping[str, str]]], directory: Path, environment: Mapping[str, str]
) -> list[CommandRun]:
    """Run commands, each with its words and additional variables."""
    given = [(list(words), dict(extra)) for words, extra in commands]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.cli_batch"],
        input="".join(json.dumps(one) + "\n" for one in given),
        cwd=directory,
        env={**environment, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=True,
    )
    parts = done.stdout.split(MARK)[1:]
    assert len(parts) == len(given), done.stdout[-2_000:]
    found = []
    for (words, _), part in zip(given, parts, strict=True):
        told, _, code = part.rpartition("exit code of the process: ")
        found.append(CommandRun(tuple(words), int(code), told))
    return found


def main() -> None:
    from cutwater.cli import main as cli

    for entry in cli.ENTRIES.values():
        import_module(f"cutwater.cli.commands.{entry.module}")
    import_module("cutwater.client.client")
    for line in sys.stdin:
        words, extra = json.loads(line)
        print(MARK, end="", flush=True)
        child = os.fork()
        if child == 0:
            os.environ.update(extra)
            sys.argv = ["cutwater", *words]
            code: object = 0
            try:
                cli.main()
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        _, status = os.waitpid(child, 0)
        print(f"\nexit code of the process: {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
