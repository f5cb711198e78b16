"""Runs a server as the command line does, and notes when the steps of an append happen; only for
``benchmarks.cluster``.

``python -m benchmarks.trace DIRECTORY sn start …`` writes ``DIRECTORY/<pid>.json`` when the server ends. The notes are
patched in from here: shipped code has no switch for them. All processes of one machine read the same monotonic clock,
so their notes can be combined.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cutwater.cli.main import main
from cutwater.core.messages import CommitMessage
from cutwater.core.order.decisions import Cut
from cutwater.core.order.events import ReportArrived
from cutwater.metadata.term import Term
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.replica.replica_driver import ReplicaDriver

NOTES_MAX = 1_000_000


class Notes:
    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def take(self, name: str) -> None:
        if len(self.found) < NOTES_MAX:
            self.found.append((name, time.monotonic_ns()))


def before(cls: type, method: str, notes: Notes, name: Callable[..., str | None]) -> None:
    """Take a note whenever a method is called, if ``name`` returns one for its arguments."""
    real = getattr(cls, method)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = name(*args, **kwargs)
        if found is not None:
            notes.take(found)
        return real(self, *args, **kwargs)

    setattr(cls, method, noting)


def patch(notes: Notes) -> None:
    before(StorageNode, "append", notes, lambda *_, **__: "append")
    before(ReplicaDriver, "_durable", notes, lambda durable: "durable" if durable.entries_end is not None else None)
    before(StorageNode, "leader_says", notes, lambda message: "commit" if _commits(message) else None)
    before(Term, "hear", notes, lambda event: "report" if isinstance(event, ReportArrived) else None)
    before(Term, "_begin_write", notes, lambda write: "store" if _has_cut(write.decisions) else None)
    before(Term, "_is_stored", notes, lambda write, seconds: "stored" if _has_cut(write.decisions) else None)


def _commits(message: object) -> bool:
    return isinstance(message, CommitMessage) and bool(message.commits)


def _has_cut(decisions: tuple[object, ...]) -> bool:
    return any(isinstance(decision, Cut) and not decision.is_tick for decision in decisions)


def run() -> None:
    folder = Path(sys.argv[1])
    notes = Notes()
    patch(notes)
    atexit.register(lambda: (folder / f"{os.getpid()}.json").write_bytes(msgspec.json.encode(notes.found)))
    sys.argv = ["cutwater", *sys.argv[2:]]
    main()


if __name__ == "__main__":
    run()
