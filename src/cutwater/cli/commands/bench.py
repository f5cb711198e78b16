"""``cutwater bench``: measures how fast a cluster or an embedded log is, next to its disk."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from cutwater.admin.doctor import SYNC_BYTES, sync_ms
from cutwater.admin.load_test import LoadMeasurement, LoadPlan, measure, own_topic
from cutwater.cli.framework.command import command, verbs
from cutwater.cli.framework.exit_codes import INTERRUPTED, Settings
from cutwater.cli.framework.interrupts import Interrupts
from cutwater.cli.framework.target import LogTarget, ReplicationOption, open_embedded
from cutwater.cli.io.output import show, table
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access
from cutwater.errors import InvalidArgument
from cutwater.runtime.deadlines import TIMEOUT_SECONDS

app = verbs()

MIB = 1024 * 1024


class Benchmark(Struct):
    """The results. ``fdatasync_ms``: the median on the disk of a log on this machine; None if that disk is not
    known."""

    plan: LoadPlan
    parts: list[LoadMeasurement]
    fdatasync_ms: float | None
    is_complete: bool = False


@command(app)
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each part may take.")] = 3.0,
    mib: Annotated[int, typer.Option("--mib", min=1, help="How many MiB of values may be appended altogether.")] = 256,
    value_bytes: Annotated[int, typer.Option(min=1, max=MIB // 2, help="Size of a record's value.")] = 100,
    batch_records: Annotated[int, typer.Option(min=1, max=100_000, help="Records of a batch.")] = 1_000,
    concurrent: Annotated[int, typer.Option(min=1, max=10_000, help="Single appends at the same time.")] = 96,
    streams: Annotated[int, typer.Option(min=1, help="How many log streams take the appends.")] = 1,
    replication: ReplicationOption = None,
    *,
    log: LogTarget,
) -> None:
    """Measure how fast a cluster or an embedded log takes and delivers records.

    Appends to a topic of its own, which is deleted afterwards, reads it back, and shows for comparison how long the
    disk takes for a sync. It measures one client: a cluster may do more for many. If no log is named, a new embedded
    one in the current directory is measured and removed.
    """
    plan = LoadPlan(
        seconds=seconds,
        bytes_max=mib * MIB,
        value_bytes=value_bytes,
        batch_records=min(batch_records, max(1, 8 * MIB // value_bytes)),
        concurrent=concurrent,
        streams=streams,
        replication=replication,
    )
    found = Benchmark(plan, [], None)
    try:
        # An interrupt must not leave a topic or a directory behind, even if it is repeated.
        with Interrupts() as interrupts, _served(log) as (url, disk):
            if disk is not None:
                # The directory of a cluster may belong to another user.
                with suppress(OSError):
                    found.fdatasync_ms = sync_ms(disk)
            interrupts.run(_measure(url, log.access(), found))
    except KeyboardInterrupt:
        _show(found)
        raise typer.Exit(INTERRUPTED) from None
    _show(found)


@contextmanager
def _served(log: LogTarget) -> Iterator[tuple[str, Path | None]]:
    """Yield the address to connect to, and a directory on the disk of the log, if it is known. If no log is named, make
    a new one in the current directory for this context."""
    if log.nearest is not None:
        log.check_runs()
        with log.serving() as url:
            yield url, log.disk
        return
    with _folder() as folder, open_embedded(folder, TIMEOUT_SECONDS, may_create=True) as client:
        yield client.servers, folder


@contextmanager
def _folder() -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=Path())
    except OSError as error:
        raise InvalidArgument(
            f"no log can be made in the current directory ({error.strerror}): run this in one that may be written, or "
            "name a log with --path, --dir or --servers"
        ) from None
    with made as name:
        yield Path(name)


async def _measure(url: str, access: Access, found: Benchmark) -> None:
    client = await AsyncClient.connect(url, tls=access.tls, token=access.token)
    async with client, own_topic(client, found.plan) as topic:
        _tell(f"measuring in topic {topic!r}, at most {found.plan.seconds:g} s for each of five parts")
        async for part in measure(client, topic, found.plan):
            found.parts.append(part)
            _tell(f"  {part.what}: {part.records_per_second:,.0f}/s")
    found.is_complete = True


def _tell(text: str) -> None:
    if sys.stderr.isatty() and not Settings.is_json:
        with suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)


def _show(found: Benchmark) -> None:
    rows = [
        (p.what, f"{p.records_per_second:,.0f}", f"{p.mb_per_second:,.1f}", _ms(p.median_ms), _ms(p.p99_ms))
        for p in found.parts
    ]
    if found.fdatasync_ms is not None:
        rows.append((f"for comparison: fdatasync of {SYNC_BYTES} bytes", "-", "-", _ms(found.fdatasync_ms), "-"))
    title = f"one client, values of {found.plan.value_bytes} bytes{'' if found.is_complete else '; interrupted'}"
    show(found, table(["", "records/s", "MB/s", "median ms", "p99 ms"], rows, title))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
