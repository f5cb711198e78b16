"""``cutwater append``: appends lines, JSON or files as records."""

from __future__ import annotations

import concurrent.futures
import enum
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct

from cutwater.admin.access_calls import denied_with
from cutwater.cli.framework.command import command, verbs
from cutwater.cli.framework.exit_codes import INTERRUPTED, Settings
from cutwater.cli.framework.interrupts import Interrupts
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.framework.times import DeclaredOptions, IdleOption, WatermarkOption, parse_declared
from cutwater.cli.io import inputs
from cutwater.cli.io.inputs import STANDARD_INPUT, InputRecords
from cutwater.cli.io.ndjson import Rows
from cutwater.cli.io.output import show
from cutwater.client.client import Client, Producer
from cutwater.client.errors import InvalidRecord, RecordTooLarge
from cutwater.core.text import counted
from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument, NotFound, PermissionDenied
from cutwater.types import Ack

app = verbs()

IN_FLIGHT_MAX = 64
"""Pieces that a producer holds without an acknowledgement; the producer bounds their bytes, too."""
RECORDS_IN_FLIGHT_MAX = 8_192
"""The same limit where each piece is one record."""


class Format(enum.StrEnum):
    LINES = "lines"
    NDJSON = "ndjson"
    FILE = "file"


@dataclass(frozen=True)
class AppendedLog(LogTarget):
    timeout: Annotated[
        float, typer.Option(envvar="CUTWATER_TIMEOUT", min=0.1, help="Seconds that each append may take.")
    ] = 30.0


class Appended(Struct):
    """What was acknowledged. There may be records of other clients between ``first_glsn`` and ``last_glsn``."""

    topic: str
    records: int = 0
    bytes: int = 0
    first_glsn: int | None = None
    last_glsn: int | None = None
    declared: list[int] = msgspec.field(default_factory=list)
    """The GLSNs of declarations without a record."""
    refused: int = 0
    """Records that the log did not take, while records around them were appended."""

    def count(self, ack: Ack, size: int) -> None:
        self.records += ack.count
        self.bytes += size
        self.first_glsn = ack.glsn if self.first_glsn is None else min(self.first_glsn, ack.glsn)
        self.last_glsn = max(self.last_glsn or 0, ack.glsn + ack.count - 1)

    def __str__(self) -> str:
        after = f"; declared at GLSN {', '.join(map(str, self.declared))}" if self.declared else ""
        if self.refused:
            after = f"; {counted(self.refused, 'record')} refused{after}"
        if not self.records:
            return f"nothing was appended to topic {self.topic!r}{after}"
        where = f"GLSN {self.first_glsn}" + (f" to {self.last_glsn}" if self.records > 1 else "")
        return f"appended {counted(self.records, 'record')} to topic {self.topic!r}, {where}{after}"


@command(app)
def append(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="What to append, instead of standard input.")
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="What a record is: a line, a line of JSON, or a whole file. By default a line of standard input, or "
            "a whole FILE.",
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of every record.")] = None,
    key_field: Annotated[
        str | None, typer.Option(help="The field of each JSON object whose value is the record's key.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the topic if it does not exist.")] = False,
    producer: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Append as a named producer: each record is there exactly once, over retries."),
    ] = None,
    watermark: WatermarkOption = None,
    idle: IdleOption = False,
    *,
    log: AppendedLog,
) -> None:
    """Append records: lines or JSON from standard input, or files.

    They are appended in the order in which they arrive, and as soon as they arrive: the input need not have an end.
    --watermark and --idle are declared after the last record, in every log stream of the topic, or in that of the
    producer.
    """
    declared = parse_declared(watermark, idle)
    paths = files or [STANDARD_INPUT]
    form = format or (Format.FILE if files else Format.LINES)
    if key_field is not None and form is not Format.NDJSON:
        raise InvalidArgument("--key-field names a field of JSON objects: say --format ndjson")
    if key_field is not None and key is not None:
        raise InvalidArgument("--key and --key-field both say what the key is: say one")
    appended = Appended(topic)
    with log.client(may_create=create, patient=True) as client:
        if create:
            _make_topic(client, topic, log)
        # A mistyped name is reported before anything is typed or read.
        found = client.topic(topic)
        schema = found.schema
        if schema is not None and form is not Format.NDJSON:
            from cutwater.schema_text import shown_columns  # noqa: PLC0415

            raise InvalidArgument(
                f"topic {topic!r} has columns ({shown_columns(schema)}), so a record is a JSON object with these: say "
                "--format ndjson, and give one on each line"
            )
        rows = Rows(schema, key, key_field) if form is Format.NDJSON else None
        # There is no bar if the size of the input is not known, or if the user types the records.
        is_watched = sys.stderr.isatty() and not (paths == [STANDARD_INPUT] and sys.stdin.isatty())
        with _progress(paths, is_watched and not Settings.is_json) as advance:
            # Only a topic with this limit refuses well-formed records: then it refuses single records.
            is_choosy = found.event_time_ahead_max is not None
            sending = _Sending(client, appended, advance, rows, key, producer, is_choosy=is_choosy)
            with Interrupts():
                sending.run(_pieces(paths, form), declared)
    show(appended, str(appended))


def _pieces(paths: list[Path], form: Format) -> Iterator[InputRecords]:
    if form is Format.FILE:
        yield from inputs.whole_files(paths)
        return
    for path in paths:
        with inputs.opened(path) as fd:
            yield from inputs.lines(fd, inputs.name_of(path))


def _make_topic(client: Client, topic: str, log: AppendedLog) -> None:
    """Make the topic, unless it is there. A denial names both rights that are missing, if the other one is, too."""
    try:
        client.create_topic(topic)
    except AlreadyExists:
        return
    except PermissionDenied as denied:
        with suppress(NotFound):
            # The topic exists, so no right to create it is needed.
            client.topic(topic)
            return
        missing = denied
        raise log.administer(lambda admin: denied_with(admin.control, denied=missing, other="append")) from None


class _Sending:
    """Sends pieces to the log, one after the other, so that they keep their order."""

    def __init__(
        self,
        client: Client,
        appended: Appended,
        advance: Callable[[int], None],
        rows: Rows | None,
        key: str | None,
        producer: str | None,
        *,
        is_choosy: bool = False,
    ) -> None:
        """``is_choosy``: the log may refuse records for their content. Then a producer sends them one by one, and
        continues after a refusal."""
        self._client, self._appended, self._advance = client, appended, advance
        self._rows, self._key = rows, key
        self._producer: Producer | None = None if producer is None else client.producer(appended.topic, id=producer)
        self._waiting: deque[tuple[InputRecords, concurrent.futures.Future[Ack]]] = deque()
        self._is_sending, self._is_choosy = False, is_choosy
        self._refusal: InvalidArgument | None = None
        """The first one; it is raised after everything else was appended."""

    def run(self, pieces: Iterable[InputRecords], declared: DeclaredOptions | None) -> None:
        """Append all pieces. If that fails, print what was acknowledged until then."""
        appended = self._appended
        try:
            try:
                for piece in pieces:
                    self._send(piece)
                self._settle(0)
                if self._refusal is not None:
                    raise self._refusal
                if declared is not None:
                    appended.declared += self._declare(declared)
            except CutwaterError:
                # Earlier sends have outcomes of their own.
                for piece, future in self._waiting:
                    with suppress(CutwaterError):
                        self._count(piece, future.result())
                raise
        except CutwaterError:
            show(appended, str(appended))
            raise
        except KeyboardInterrupt:
            is_under_way = self._is_sending or bool(self._waiting)
            doubt = "; what was under way may or may not be there" if is_under_way else ""
            show(appended, f"{appended}{doubt}")
            raise typer.Exit(INTERRUPTED) from None

    def _send(self, piece: InputRecords) -> None:
        records: list[Any] = piece.records
        keys: Any = self._key
        if self._rows is not None:
            piece, records, keys = self._rows.of(piece)
        if not records:
            return
        self._is_sending = True
        with _placed(piece, partial(self._why, records)):
            if self._producer is None:
                self._count(piece, self._client.append(self._appended.topic, records, key=keys))
            elif not self._is_choosy:
                self._waiting.append((piece, self._producer.send(records, key=keys)))
        if self._producer is not None and self._is_choosy:
            self._send_each(self._producer, piece, records, keys)
        self._is_sending = False
        self._settle(RECORDS_IN_FLIGHT_MAX if self._is_choosy else IN_FLIGHT_MAX)

    def _send_each(self, producer: Producer, piece: InputRecords, records: list[Any], keys: Any) -> None:
        for row, record in enumerate(records):
            one = InputRecords([piece.records[row]], [piece.places[row]], piece.source)
            with _placed(one, partial(self._why, [record])):
                future = producer.send([record], key=[keys[row]] if isinstance(keys, list) else keys)
            self._waiting.append((one, future))

    def _declare(self, declared: DeclaredOptions) -> list[int]:
        """Declare after everything that was sent; return the GLSNs."""
        watermark, idle = declared
        self._is_sending = True
        if self._producer is not None:
            acks = [self._producer.declare(watermark=watermark, idle=idle).result()]
        else:
            acks = self._client.declare(self._appended.topic, watermark=watermark, idle=idle)
        self._is_sending = False
        return [ack.glsn for ack in acks]

    def _why(self, records: list[Any], error: InvalidRecord) -> str:
        if self._rows is None or error.row is None:
            return error.what
        return self._rows.mismatch(records[error.row], error.column) or error.what

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` sends have no outcome yet. Each has a deadline of its own."""
        while len(self._waiting) > most or (self._waiting and self._waiting[0][1].done()):
            piece, future = self._waiting[0]
            try:
                with _placed(piece):
                    self._count(piece, future.result())
            except InvalidArgument as error:
                if not self._is_choosy:
                    raise
                self._refusal = self._refusal or error
                self._appended.refused += 1
            self._waiting.popleft()

    def _count(self, piece: InputRecords, ack: Ack) -> None:
        size = sum(map(len, piece.records))
        self._appended.count(ack, size)
        # Counts newlines too, so that the sum is the size of a file of lines.
        self._advance(size + len(piece.records))


@contextmanager
def _placed(piece: InputRecords, why: Callable[[InvalidRecord], str] = lambda error: error.what) -> Iterator[None]:
    """Add the place to errors: an error about one record names it; an error about a piece says where the piece begins
    and ends. ``why`` returns what is wrong with a record, in words for a user who writes lines and files."""
    try:
        yield
    except CutwaterError as error:
        row = getattr(error, "row", None)
        is_one = row is not None or len(piece.records) == 1
        after = "" if is_one else f" to {piece.places[-1]}, which go as one batch"
        column = f", column {error.column!r}" if isinstance(error, InvalidRecord) and error.column else ""
        told = error.what if isinstance(error, RecordTooLarge) else error.message
        if isinstance(error, InvalidRecord):
            told = why(error)
        error.message = f"{piece.place(row or 0)}{after}{column}: {told}"
        raise


@contextmanager
def _progress(paths: list[Path], is_watched: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error; yield a function that takes how many bytes were appended."""
    if not is_watched:
        yield lambda size: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (TextColumn("appending"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("append", total=inputs.total_bytes(paths))
        yield lambda size: progress.update(task, advance=size)
