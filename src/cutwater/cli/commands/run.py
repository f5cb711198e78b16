"""``cutwater run``: shows and ends runs, which publish staged batches."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.admin.operations import Admin, RunStatus
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.io.output import LIMITED_VIEW, show, table
from cutwater.core.text import counted
from cutwater.errors import InvalidArgument
from cutwater.types import RunId

app = noun("Runs: what publishes batches exactly once.")

SECONDS = 10.0


@command(app, name="list", timeout=SECONDS)
def list_runs(log: LogTarget) -> None:
    """Show all runs: their last batches, what is staged for them, and what is not published yet."""

    async def work(admin: Admin) -> tuple[tuple[RunStatus, ...], bool]:
        return await admin.runs(), bool((await admin.describe()).is_limited)

    found, is_limited = log.administer(work)
    columns = ["run", "name", "last batch", "staged bytes", "unpublished", "state"]
    rows = [[run.run, run.name, _last(run), run.staged_bytes, len(run.unpublished), _state(run)] for run in found]
    show(found, table(columns, rows))
    if is_limited and not Settings.is_json:
        show(None, LIMITED_VIEW)


@command(app, timeout=SECONDS)
def describe(
    run: Annotated[int, typer.Argument(metavar="RUN", min=1, help="Number of the run.")],
    log: LogTarget,
) -> None:
    """Show a run: what is not published yet, and why; what is staged, and where."""
    found = log.administer(lambda admin: admin.run(RunId(run)))
    lines = [
        f"run {found.run} {f'of {found.name!r}' if found.name else 'without a name'}: {_state(found)}",
        f"  key: {found.key}",
        f"  last batch: {_last(found)}, generation {found.generation}",
    ]
    for group in found.unpublished:
        what = f"{counted(group.rows, 'row')} of {counted(group.parts, 'part')} for topic {group.topic!r}"
        what += f" in log stream {group.stream}"
        lines.append(f"  not published yet: {what}{': ' if group.why else ''}{group.why}")
    for share in found.staged:
        what = share.trouble or f"{counted(share.parts, 'part')}, {share.bytes} bytes"
        lines.append(f"  staged on storage node {share.node}: {what}")
    show(found, "\n".join(lines))


@command(app, timeout=SECONDS)
def drop(
    run: Annotated[int, typer.Argument(metavar="RUN", min=1, help="Number of the run.")],
    log: LogTarget,
    lose_rows: Annotated[
        bool, typer.Option("--lose-rows", help="Accept the loss of rows that are decided and not published.")
    ] = False,
) -> None:
    """End a run whose decided rows are lost permanently, and which therefore waits for ever.

    The rows that the run has decided and not published are given up: they will be missing in their topics. If another
    topic of the same batch has its rows already, they stay there. First try everything else: `cutwater run describe`
    says what the run waits for. As soon as one holder of each part is back, the rows are published automatically.
    """
    if not lose_rows:
        raise InvalidArgument(
            f"what run {run} has decided and not published would be lost: see `cutwater run describe {run}`, bring the "
            "storage nodes back if you can, and if there is no way say --lose-rows"
        )
    lost = log.administer(lambda admin: admin.drop_run(RunId(run)))
    rows = [f"{counted(group.rows, 'row')} for topic {group.topic!r}" for group in lost]
    show(lost, f"run {run} is over; lost: {', '.join(rows)}")


@command(app, timeout=SECONDS)
def forget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name that runs have published under.")],
    log: LogTarget,
) -> None:
    """Let a new checkpoint publish under a name that has published already.

    Published rows stay in the log. From then on, runs may start under the name without a check for rows that would be
    published twice. A run that is open under the name goes on; the rows that it publishes count anew.
    """
    found = log.administer(lambda admin: admin.forget_output(name))
    rows = "an unknown number of rows" if found.rows is None else counted(found.rows, "row")
    position = "an unknown position" if found.position is None else f"GLSN {found.position}"
    show(
        found, f"forgot that {name!r} has published {rows}, the last at GLSN {found.glsn}, from input up to {position}"
    )


def _last(run: RunStatus) -> str:
    return str(run.last_batch) if run.last_batch >= 0 else "none"


def _state(run: RunStatus) -> str:
    if run.fenced_by == run.run:
        return "over, it was dropped"
    return f"over, run {run.fenced_by} took over its name" if run.fenced_by else "may publish"
