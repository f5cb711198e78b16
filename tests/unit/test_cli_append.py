"""``cutwater append``: which lines a refusal is about, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from cutwater.cli.commands.append import Appended, _Sending
from cutwater.cli.io.inputs import InputRecords
from cutwater.client.client import Client
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, LLSN, Ack, LogStreamId

LINES = InputRecords([b"good", b"bad", b"fine"], range(1, 4), "standard input, line ")


class Log:
    """Refuses every batch with a record that is ``b"bad"``."""

    def __init__(self) -> None:
        self.appended: list[bytes] = []

    def producer(self, topic: str, *, id: str) -> Log:
        return self

    def append(self, topic: str, records: list[bytes], key: Any = None) -> Ack:
        if b"bad" in records:
            raise InvalidArgument("the event time is far ahead")
        self.appended += records
        return ack(len(self.appended) - len(records) + 1, len(records))

    def send(self, records: list[bytes], key: Any = None) -> Future[Ack]:
        future: Future[Ack] = Future()
        try:
            future.set_result(self.append("", records))
        except InvalidArgument as error:
            future.set_exception(error)
        return future


def ack(glsn: int, count: int) -> Ack:
    return Ack(GLSN(glsn), LLSN(glsn), LogStreamId(1), count)


@pytest.fixture(name="run")
def _run() -> Callable[..., tuple[Log, Appended, str]]:
    def run(producer: str | None) -> tuple[Log, Appended, str]:
        log, appended = Log(), Appended("pay")
        sending = _Sending(cast(Client, log), appended, lambda size: None, None, None, producer, is_choosy=True)
        with pytest.raises(InvalidArgument) as raised:
            sending.run([LINES], None)
        return log, appended, raised.value.message

    return run


def test_a_batch_that_is_refused_is_named_from_its_first_to_its_last_line(
    run: Callable[..., tuple[Log, Appended, str]],
) -> None:
    log, appended, told = run(None)
    assert told == "standard input, line 1 to 3, which go as one batch: the event time is far ahead"
    assert (log.appended, str(appended)) == ([], "nothing was appended to topic 'pay'")


def test_a_producer_goes_on_after_a_line_that_is_refused(run: Callable[..., tuple[Log, Appended, str]]) -> None:
    log, appended, told = run("loader")
    assert told == "standard input, line 2: the event time is far ahead"
    assert log.appended == [b"good", b"fine"]
    assert str(appended) == "appended 2 records to topic 'pay', GLSN 1 to 2; 1 record refused"
