"""Handlers of every sort, for the tests of what a connection does, and which networks carry bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from cutwater.errors import (
    Trimmed,
)
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.types import GLSN
from cutwater.wire.calls.handlers import LATER, Later, Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call, Notification
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.connection import Connection

OF_BYTES = ["memory", "tcp", "tls", "tcp-on-asyncio"]
"""Networks on which there can be anything between two sides that is not a frame."""


class Question(Struct, frozen=True):
    text: str
    number: int = 0


class Answer(Struct, frozen=True):
    text: str


ASK = Method[Question, Answer]("ask", Question, Answer)
ECHO = Method[None, None]("echo", None, None)
SLOW = Method[int, str]("slow", int, str)
FAIL = Method[str, None]("fail", str, None)
LATE = Method[int, int]("late", int, int)
BACK = Method[str, str]("back", str, str)
COUNT = StreamMethod[int, int]("count", int, int)
FOREVER = StreamMethod[None, int]("forever", None, int)
TWICE = Method[str, int]("twice", str, int)
TELL = Notice[Question]("tell", Question)


class Server:
    """Handlers of every sort, and what they have seen."""

    def __init__(self) -> None:
        self.methods = methods = Methods()
        self.events: list[str] = []
        self.told: list[tuple[str, bytes]] = []
        self.late: list[Call[int]] = []
        methods.answers(ASK)(self.ask)
        methods.answers(ECHO)(lambda call: ReplyWithBody(None, call.body))
        methods.answers(SLOW)(self.slow)
        methods.answers(FAIL)(self.fail)
        methods.answers(LATE)(self.answer_late)
        methods.answers(BACK)(self.back)
        methods.streams_to(COUNT)(self.count)
        methods.streams_to(FOREVER)(self.forever)
        methods.hears(TELL)(self.tell)

    def ask(self, call: Call[Question]) -> Answer:
        return Answer(call.argument.text.upper() * call.argument.number)

    async def slow(self, call: Call[int]) -> str:
        self.events.append("begun")
        try:
            await asyncio.sleep(call.argument / 1_000)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        self.events.append("done")
        return "slept"

    def fail(self, call: Call[str]) -> None:
        if call.argument == "trimmed":
            raise Trimmed(GLSN(3), GLSN(9))
        if call.argument == "unencodable":
            return object()  # type: ignore[return-value]
        raise ValueError("a secret of the server")

    def answer_late(self, call: Call[int]) -> Later:
        self.late.append(call)
        call.on_cancel(lambda: self.events.append("late cancelled"))
        if call.argument == 0:
            call.answer(0)
        return LATER

    async def back(self, call: Call[str]) -> str:
        """Asks the caller the same."""
        received = await call.connection.call(BACK, call.argument + "!", timeout_ms=2_000)
        return received.value

    async def count(self, call: Call[int], out: StreamSender[int]) -> None:
        for number in range(call.argument):
            left = call.argument - number - 1
            await out.send(number, b"x" * 1_000, backlog_items=left, backlog_bytes=left * 1_000)
        if call.argument == 13:
            raise Trimmed(GLSN(1), GLSN(2))

    async def forever(self, call: Call[None], out: StreamSender[int]) -> None:
        self.events.append("begun")
        number = 0
        try:
            while True:
                await out.send(number)
                number += 1
        finally:
            self.events.append(f"ended after {min(number, 1)}")

    def tell(self, notification: Notification[Question]) -> None:
        if notification.argument.text == "bad":
            raise ValueError("on purpose")
        self.told.append((notification.argument.text, bytes(notification.body)))

    async def saw(self, *events: str) -> None:
        async with asyncio.timeout(5):
            while self.events != list(events):
                await asyncio.sleep(0.005)


async def pair(network: Any, **more: Any) -> tuple[Server, Connection, Any]:
    server = Server()
    listener = await network.listen(server.methods, **more)
    return server, await network.connect(listener), listener


async def drain(stream: Any, values: list[int]) -> None:
    while (item := await stream.receive(timeout_ms=5_000)) is not None:
        values.append(item.value)
