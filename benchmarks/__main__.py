"""``make bench``: measures everything next to references and writes docs/benchmarks.md.

Absolute figures depend on the machine and its load; the ratios say more. A section is measured as a whole.
``make bench ARGS="log spark"`` measures these two again and keeps the others as they are in the report; ``--quick``
shortens the longest runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import (
    access,
    cluster,
    core,
    failover,
    job_leader,
    jobs,
    log,
    pipeline,
    pipeline_spark,
    quota,
    rest,
    savepoints,
    scale,
    spark,
    storage,
    stores,
    wire,
)

REPORT = Path("docs/benchmarks.md")
_MARK = re.compile(r"^<!-- (\w+), .*-->$", re.MULTILINE)

Lines = Callable[[], Iterable[str]]


def sections(*, quick: bool) -> Mapping[str, Lines]:
    return {
        "core": core.lines,
        "wire": wire.lines,
        "storage": storage.lines,
        "stores": stores.lines,
        "cluster": cluster.lines,
        "failover": failover.lines,
        "scale": lambda: scale.lines(quick=quick),
        "job_leader": lambda: job_leader.lines(5.0) if quick else job_leader.lines(),
        "log": lambda: log.lines(quick=quick),
        "access": lambda: access.lines(2) if quick else access.lines(),
        "quota": lambda: quota.lines(2) if quick else quota.lines(),
        "rest": rest.lines,
        "spark": spark.lines,
        "pipeline": pipeline.lines,
        "pipeline_spark": pipeline_spark.lines,
        "savepoints": savepoints.lines,
        "jobs": jobs.lines,
    }


def kept(report: str) -> dict[str, str]:
    """Return the sections of a report, each with its mark."""
    marks = list(_MARK.finditer(report))
    ends = [mark.start() for mark in marks[1:]] + [len(report)]
    return {mark[1]: report[mark.start() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def measured(name: str, lines: Lines) -> str:
    at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return f"<!-- {name}, {at}, load {os.getloadavg()[0]:.1f} before -->\n\n" + "\n".join(lines()).strip()


def main() -> int:
    names = list(sections(quick=False))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"only these, of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="shorten the longest runs")
    given = parser.parse_args()
    if unknown := set(given.sections) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    wanted = given.sections or names
    made = kept(REPORT.read_text()) if REPORT.exists() else {}
    for name, lines in sections(quick=given.quick).items():
        if name in wanted:
            made[name] = measured(name, lines)
            print(made[name], flush=True)
            _write([made[name] for name in names if name in made])
    print(f"written to {REPORT}")
    return 0


def _write(parts: Iterable[str]) -> None:
    head = (
        "# Benchmarks\n\n"
        "Made by `make bench`. Absolute figures are of one noisy machine; the ratios, measured in one run, "
        "say more.\n\n"
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release().split('-')[0]}."
    )
    REPORT.write_text("\n\n".join([head, *parts]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
