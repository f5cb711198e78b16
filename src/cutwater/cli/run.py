"""``cutwater run``: runs, which publish staged batches."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.admin.runs import RunStatus
from cutwater.cli.commands import command, noun
from cutwater.cli.servers import Cluster
from cutwater.cli.tables import show, table
from cutwater.types import RunId

app = noun("Runs: what publishes batches exactly once.")


@command(app, name="list")
def list_runs(log: Cluster) -> None:
    """All runs: their last batches, what is staged for them, and what is not published yet."""
    found = log.administer(lambda admin: admin.runs())
    columns = ["run", "name", "last batch", "staged bytes", "unpublished", "state"]
    rows = [[run.run, run.name, _last(run), run.staged_bytes, len(run.unpublished), _state(run)] for run in found]
    show(found, table(columns, rows))


@command(app)
def describe(
    run: Annotated[int, typer.Argument(metavar="RUN", min=1, help="Number of the run.")],
    log: Cluster,
) -> None:
    """How a run is: what is not published yet, and why; what is staged, and where."""
    found = log.administer(lambda admin: admin.run(RunId(run)))
    lines = [
        f"run {found.run} {f'of {found.name!r}' if found.name else 'without a name'}: {_state(found)}",
        f"  key: {found.key}",
        f"  last batch: {_last(found)}, generation {found.generation}",
    ]
    for group in found.unpublished:
        what = f"{group.rows} rows of {group.parts} parts for topic {group.topic!r} in log stream {group.stream}"
        lines.append(f"  not published yet: {what}{': ' if group.why else ''}{group.why}")
    for share in found.staged:
        what = share.trouble or f"{share.parts} parts, {share.bytes} bytes"
        lines.append(f"  staged on storage node {share.node}: {what}")
    show(found, "\n".join(lines))


def _last(run: RunStatus) -> str:
    return str(run.last_batch) if run.last_batch >= 0 else "none"


def _state(run: RunStatus) -> str:
    return f"over, run {run.fenced_by} took over its name" if run.fenced_by else "may publish"
