"""Shared parts of the examples: their data, a log to put it in, and a function that shows the results."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import cutwater

DATA = Path(__file__).resolve().parent / "data"


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file in ``data``. The column ``at`` is a time."""
    found = [json.loads(line) for line in (DATA / f"{name}.ndjson").read_text(encoding="utf-8").splitlines()]
    for row in found:
        if "at" in row:
            row["at"] = datetime.fromisoformat(row["at"].replace("Z", "+00:00"))
    return found


@contextmanager
def opened(about: str | None) -> Iterator[tuple[cutwater.Client, str]]:
    """Open a log, and make a directory for the checkpoint: the log of a cluster with ``--log cutwater://…``, else a new
    embedded one."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--log", default="", help="cutwater://host:port of a cluster; an embedded log if left out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cutwater-example-") as directory:
        log = cutwater.connect(given.log) if given.log else cutwater.open(Path(directory) / "log")
        with log:
            yield log, str(Path(directory) / "checkpoint")


def show(log: cutwater.Client, topic: str, most: int = 12) -> None:
    """Print the records of a topic, in order."""
    records = list(log.subscribe(topic, follow=False))
    print(f"\n{topic}: {len(records)} records")
    for record in records[:most]:
        print("  " + "  ".join(f"{name}={_shown(value)}" for name, value in record.row.items()))
    if len(records) > most:
        print("  …")


def _shown(value: object) -> object:
    if isinstance(value, datetime):
        return value.strftime("%H:%M:%S")
    return f"{value:.2f}" if isinstance(value, float) else value
