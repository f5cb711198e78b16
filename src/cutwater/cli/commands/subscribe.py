"""``cutwater subscribe``: prints records on standard output, in the order of the log."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cutwater.cli.framework.command import command, verbs
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.framework.times import Start, parse_position, parse_start
from cutwater.cli.io.record_output import RecordOutput, RecordOutputOption, write_records
from cutwater.client.errors import ClientClosed
from cutwater.core.text import counted
from cutwater.errors import DeadlineExceeded, InvalidArgument

if TYPE_CHECKING:
    from cutwater.client.client import Client, Subscription
    from cutwater.client.read.records import Record

app = verbs()

LOOK_SECONDS = 1.0
"""How often a subscriber that gets nothing checks that its log is still open somewhere."""

LOOKS_BEFORE_WORD = 5
"""Looks in vain before trouble is reported; a restarted node is back after fewer of them."""


@command(app)
def subscribe(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="Names of topics.")],
    start: Annotated[
        str, typer.Option(metavar="earliest|latest|GLSN|@TIME", help="Where to begin; @-5m is five minutes ago.")
    ] = "earliest",
    stop: Annotated[
        str | None, typer.Option(metavar="GLSN|@TIME", help="Where to end; this position is not printed.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after this many records.")] = None,
    follow: Annotated[
        bool | None,
        typer.Option("--follow/--no-follow", "-f", help="Wait for more at the end of the log; so does --start latest."),
    ] = None,
    pattern: Annotated[
        bool, typer.Option("--pattern", help="TOPIC is one regular expression; it must fit the whole name.")
    ] = False,
    on_malformed: Annotated[
        Literal["error", "skip"],
        typer.Option(help="What to do at a batch that is intact but holds no records of its topic."),
    ] = "error",
    output: RecordOutputOption = RecordOutput.TEXT,
    *,
    log: LogTarget,
) -> None:
    """Print the records of topics, in the order of the log.

    Prints the records in the log and ends, as cat does; with --follow it waits for more, as tail -f does.
    """
    now = datetime.now(UTC)
    begin = parse_start(start, now)
    end = None if stop is None else parse_position(stop, now)
    follows = begin == "latest" if follow is None else follow
    wanted = _pattern(topics) if pattern else topics
    printing = _Printing(wanted, begin, end, follows, output, count, log.timeout, on_malformed)
    is_over = False
    while not is_over:
        with log.client() as client:
            is_over = printing.run(client, log.end_of_holder())


def _pattern(topics: list[str]) -> re.Pattern[str]:
    if len(topics) != 1:
        raise InvalidArgument(f"--pattern takes one regular expression, not {len(topics)}: join them with |")
    try:
        return re.compile(topics[0])
    except re.error as error:
        raise InvalidArgument(f"{topics[0]!r} is no regular expression: {error}") from None


@dataclass
class _Printing:
    """Prints a subscription. Remembers its position, so that it can continue with another client."""

    _topics: list[str] | re.Pattern[str]
    _start: Start
    _stop: int | datetime | None
    _follow: bool
    _output: RecordOutput
    _left: int | None
    _timeout: float
    _on_malformed: Literal["error", "skip"] = "error"
    _skipped: int = 0
    _looks_in_vain: int = 0

    def run(self, client: Client, is_lost: Callable[[], bool]) -> bool:
        """Print until the end. Returns whether that was all; otherwise the log has to be opened again."""
        if self._start == "latest":
            self._start = client.tail() + 1
            if isinstance(self._stop, int):
                # The log may be past it already: then there is nothing to print.
                self._stop = max(self._stop, self._start)
        with client.subscribe(
            self._topics,
            start=self._start,
            stop=self._stop,
            follow=self._follow,
            on_malformed=self._on_malformed,
        ) as subscription:
            self._skipped = 0
            while self._left != 0:
                try:
                    found = subscription.take(LOOK_SECONDS if self._follow else self._timeout)
                except (DeadlineExceeded, ClientClosed) as error:
                    if is_lost():
                        return False
                    if not self._follow or isinstance(error, ClientClosed):
                        raise
                    self._tell_skipped(subscription)
                    self._tell_of(subscription.trouble)
                    continue
                self._tell_skipped(subscription)
                if not found:
                    return True
                self._print(found)
        return True

    def _tell_of(self, trouble: str) -> None:
        """Report trouble once, when it has lasted for a while."""
        self._looks_in_vain = self._looks_in_vain + 1 if trouble else 0
        if self._looks_in_vain == LOOKS_BEFORE_WORD:
            print(f"still waiting: {trouble}", file=sys.stderr, flush=True)

    def _tell_skipped(self, subscription: Subscription[Record]) -> None:
        new = subscription.skipped_records - self._skipped
        self._skipped = subscription.skipped_records
        if new:
            last = subscription.skipped[-1]
            print(
                f"skipped {counted(new, 'malformed record')}, the last at GLSN {last.last_glsn} of topic "
                f"{last.topic!r}: {last.why}",
                file=sys.stderr,
                flush=True,
            )

    def _print(self, found: list[Record]) -> None:
        if self._left is not None:
            found = found[: self._left]
            self._left -= len(found)
        write_records(found, self._output)
        self._start = found[-1].glsn + 1
