"""``cutwater job logs``: what the program of a job printed, attempt by attempt."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cutwater.admin.jobs import JobCalls
from cutwater.cli.commands.job_waiting import NameArgument
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.output import show
from cutwater.core.jobs.job_requests import JobDescription

if TYPE_CHECKING:
    from cutwater.client.async_client import AsyncClient
    from cutwater.programs.job_logs import JobLogText

FOLLOW_SECONDS = 1.0


def logs(
    name: NameArgument,
    attempt: Annotated[
        int, typer.Option(metavar="N", min=0, help="An attempt of --epoch, or of the last one; 0 is the last.")
    ] = 0,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="Of this assignment; 0 is the last.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until the job has ended.")] = False,
    *,
    log: ClusterTarget,
) -> None:
    """Print what the program of a job printed in its last attempt, also if its machine is gone.

    The first 256 KiB and the last 768 KiB of an attempt are kept, for seven days.
    """
    try:
        log.with_client(lambda client: _print(client, name, epoch, attempt, log.timeout, is_followed=follow))
    except KeyboardInterrupt:
        # How one ends --follow.
        if not follow:
            raise


async def _print(
    client: AsyncClient, name: str, epoch: int, attempt: int, timeout: float, *, is_followed: bool
) -> None:
    # It imports Arrow, which help does not need.
    from cutwater.programs.job_logs import read_job_log  # noqa: PLC0415

    jobs = JobCalls.of(client, timeout=timeout)
    found = await read_job_log(client, name, attempt or None, epoch=epoch or None, timeout=timeout)
    _show(found)
    while is_followed:
        if not found.is_running and (attempt or epoch or _is_over(await jobs.job(name))):
            return
        await asyncio.sleep(FOLLOW_SECONDS)
        if found.is_running:
            found = await read_job_log(
                client, name, found.attempt, epoch=found.epoch, offset=found.end, after=found.after, timeout=timeout
            )
            _show(found)
            continue
        newest = await read_job_log(client, name, timeout=timeout)
        if (newest.epoch, newest.attempt) != (found.epoch, found.attempt):
            found = newest
            print(f"attempt {found.attempt} of epoch {found.epoch}:", file=sys.stderr, flush=True)
            _show(found)


def _is_over(found: JobDescription) -> bool:
    return found.job.end is not None


def _show(found: JobLogText) -> None:
    text = found.text.decode(errors="replace")
    if Settings.is_json:
        told = {"epoch": found.epoch, "attempt": found.attempt, "text": text, "is_running": found.is_running}
        show(told, "")
    else:
        print(text, end="", flush=True)
