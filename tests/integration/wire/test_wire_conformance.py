"""What a connection does, the same on every network."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from wire_kit import (
    ASK,
    BACK,
    ECHO,
    FAIL,
    FOREVER,
    LATE,
    SLOW,
    TELL,
    TWICE,
    Answer,
    Question,
    Server,
    drain,
    pair,
)

from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, FrameTooLarge, InternalError, MalformedFrame, UnknownMethod
from cutwater.protocol.methods import Method, Notice, Received, StreamMethod
from cutwater.wire.calls.handlers import LATER, Later, Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import SharedCredit
from cutwater.wire.connection import Connection
from cutwater.wire.options import WireOptions
from cutwater.wire.states import ConnectionState


async def test_a_call_and_its_answer(network: Any) -> None:
    _, connection, _ = await pair(network)
    received = await connection.call(ASK, Question("ab", 2), timeout_ms=2_000)
    assert received.value == Answer("ABAB")
    assert bytes(received.body) == b""
    assert connection.peer is not None
    assert (connection.peer.role, connection.peer.name, connection.peer.cluster) == ("server", "s1", 1)


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 65_536, 65_537, 3_000_000])
async def test_bodies_of_any_size(network: Any, size: int) -> None:
    _, connection, _ = await pair(network)
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    for shape in (body, bytearray(body), memoryview(body), [body[: size // 3], b"", memoryview(body)[size // 3 :]]):
        received = await connection.call(ECHO, None, shape, timeout_ms=5_000)
        assert received.body == body


async def test_many_calls_at_once_each_get_their_own_answer(network: Any) -> None:
    _, connection, _ = await pair(network)

    async def one(i: int) -> None:
        if i % 3:
            received = await connection.call(ASK, Question(f"q{i}", 1), timeout_ms=5_000)
            assert received.value == Answer(f"Q{i}")
        else:
            body = str(i).encode() * (i * 20)
            assert (await connection.call(ECHO, None, body, timeout_ms=5_000)).body == body

    await asyncio.gather(*(one(i) for i in range(500)))
    snapshot = connection.snapshot()
    assert (snapshot.calls, snapshot.call_bytes) == (0, 0)


async def test_both_sides_may_ask(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods)
    mine = Methods()
    mine.answers(BACK)(lambda call: call.argument + "?")
    connection = await network.connect(listener, mine)
    received = await connection.call(BACK, "who", timeout_ms=2_000)
    assert received.value == "who!?"


async def test_both_sides_may_begin_with_much_at_the_same_time(network: Any) -> None:
    """Neither stops reading because its own question is too large to be written at once."""
    body = bytes(8_000_000)
    back: list[asyncio.Task[Received[None]]] = []

    def ask_back(call: Call[str]) -> str:
        back.append(asyncio.create_task(call.connection.call(ECHO, None, body, timeout_ms=20_000)))
        return ""

    methods = Methods()
    methods.answers(BACK)(ask_back)
    methods.answers(ECHO)(lambda call: ReplyWithBody(None, call.body))
    mine = Methods()
    mine.answers(ECHO)(lambda call: ReplyWithBody(None, call.body))
    connection = await network.connect(await network.listen(methods), mine)
    await connection.call(BACK, "", timeout_ms=2_000)
    received = await connection.call(ECHO, None, body, timeout_ms=20_000)
    assert (len(received.body), len((await back[0]).body)) == (len(body), len(body))


async def test_errors_come_back_as_themselves(network: Any) -> None:
    _, connection, _ = await pair(network)
    with pytest.raises(Trimmed) as caught:
        await connection.call(FAIL, "trimmed", timeout_ms=2_000)
    assert (caught.value.asked, caught.value.first_left) == (3, 9)


@pytest.mark.parametrize("how", ["bug", "unencodable"])
async def test_a_bug_of_a_handler_tells_nothing_of_the_server(
    network: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, connection, _ = await pair(network)
    with caplog.at_level(logging.CRITICAL, "cutwater.wire"), pytest.raises(InternalError) as caught:
        await connection.call(FAIL, how, timeout_ms=2_000)
    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert len(caught.value.incident) == 8
    assert (await connection.call(ASK, Question("a", 1), timeout_ms=2_000)).value == Answer("A")


async def test_the_incident_is_in_the_log_with_its_cause(memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, connection, _ = await pair(memory)
    with pytest.raises(InternalError) as caught:
        await connection.call(FAIL, "bug", timeout_ms=2_000)
    (record,) = [record for record in caplog.records if caught.value.incident in record.getMessage()]
    assert record.exc_info is not None
    assert "a secret of the server" in str(record.exc_info[1])


async def test_what_is_not_known_is_refused(network: Any) -> None:
    _, connection, _ = await pair(network)
    with pytest.raises(UnknownMethod, match="'nonsense'"):
        await connection.call(Method[None, None]("nonsense", None, None), None, timeout_ms=2_000)
    with pytest.raises(UnknownMethod):
        async for _ in connection.open_stream(StreamMethod[None, None]("nonsense", None, None), None):
            pass


async def test_an_argument_of_another_type_is_refused(network: Any) -> None:
    _, connection, _ = await pair(network)
    with pytest.raises(InvalidArgument, match=r"ask: the argument is not as expected"):
        await connection.call(Method[int, Answer]("ask", int, Answer), 7, timeout_ms=2_000)
    with pytest.raises(InvalidArgument, match="slow"):
        await connection.call(Method[str, str]("slow", str, str), "7", timeout_ms=2_000)
    with pytest.raises(MalformedFrame, match=r"ask: the answer is not as expected"):
        await connection.call(Method[Question, int]("ask", Question, int), Question("x", 1), timeout_ms=2_000)
    assert connection.state is ConnectionState.OPEN


async def test_a_call_ends_at_its_deadline_and_so_does_its_handler(network: Any) -> None:
    server, connection, _ = await pair(network)
    with pytest.raises(DeadlineExceeded):
        await connection.call(SLOW, 60_000, timeout_ms=50)
    await server.saw("begun", "cancelled")
    assert connection.snapshot().calls == 0


async def test_deadlines_are_kept_apart(network: Any) -> None:
    _, connection, _ = await pair(network)
    outcomes: list[int] = []

    async def one(timeout_ms: int) -> None:
        with pytest.raises(DeadlineExceeded):
            await connection.call(SLOW, 9_000, timeout_ms=timeout_ms)
        outcomes.append(timeout_ms)

    slept = connection.call(SLOW, 30, timeout_ms=5_000)
    received, *_ = await asyncio.gather(slept, *(one(timeout_ms) for timeout_ms in (400, 100, 250)))
    assert received.value == "slept"
    assert outcomes == [100, 250, 400]


async def test_no_call_without_a_deadline(network: Any) -> None:
    _, connection, _ = await pair(network)
    for timeout_ms in (0, -5):
        with pytest.raises(InvalidArgument, match="a timeout is 1 to"):
            await connection.call(ECHO, None, timeout_ms=timeout_ms)
        with pytest.raises(InvalidArgument, match="a timeout is 1 to"):
            connection.open_stream(FOREVER, None, timeout_ms=timeout_ms)
    assert connection.state is ConnectionState.OPEN


async def test_cancelling_the_caller_cancels_the_handler(network: Any) -> None:
    server, connection, _ = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 5_000, timeout_ms=10_000))
    await server.saw("begun")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.saw("begun", "cancelled")
    assert connection.snapshot().calls == 0


async def test_a_call_cancelled_before_its_handler_began_leaves_nothing(network: Any) -> None:
    server, connection, listener = await pair(network)
    number = connection.begin(SLOW, 5_000, timeout_ms=10_000, on_answer=lambda outcome: None)
    connection.cancel(number)
    await connection.call(ECHO, None, timeout_ms=2_000)
    (served,) = listener.gate.connections
    assert served.snapshot().served == 0
    assert server.events in ([], ["begun", "cancelled"])


async def test_an_answer_may_come_later(network: Any) -> None:
    server, connection, _ = await pair(network)
    first = asyncio.create_task(connection.call(LATE, 1, timeout_ms=5_000))
    second = asyncio.create_task(connection.call(LATE, 2, timeout_ms=5_000))
    await asyncio.sleep(0)
    assert (await connection.call(LATE, 0, timeout_ms=5_000)).value == 0
    assert [call.argument for call in server.late] == [1, 2, 0]
    server.late[1].answer(22)
    server.late[1].answer(23)
    assert (await second).value == 22
    server.late[0].fail(Unavailable("not today"))
    with pytest.raises(Unavailable, match="not today"):
        await first


async def test_a_handler_that_answers_twice_is_heard_once(network: Any) -> None:
    server, connection, _ = await pair(network)

    @server.methods.answers(TWICE)
    def twice(call: Call[str]) -> int:
        call.answer(1)
        if call.argument == "raise":
            raise Unavailable("too late to say so")
        return 2

    for how in ("return", "raise"):
        assert (await connection.call(TWICE, how, timeout_ms=2_000)).value == 1
    assert (await connection.call(ASK, Question("a", 1), timeout_ms=2_000)).value == Answer("A")


async def test_a_handler_that_ends_the_connection_is_told_that_nobody_waits(network: Any) -> None:
    server, connection, listener = await pair(network)
    (served,) = listener.gate.connections

    @server.methods.answers(TWICE)
    def leave(call: Call[str]) -> Later:
        call.on_cancel(lambda: server.events.append("nobody waits"))
        server.late.append(call)  # type: ignore[arg-type]
        served.fail(Unavailable("enough"))
        return LATER

    with pytest.raises(ConnectionLost, match="enough") as caught:
        await connection.call(TWICE, "", timeout_ms=5_000)
    assert caught.value.outcome_unknown
    await server.saw("nobody waits")
    server.late[0].answer()


async def test_a_late_answer_to_a_cancelled_call_goes_nowhere(network: Any) -> None:
    server, connection, listener = await pair(network)
    with pytest.raises(DeadlineExceeded):
        await connection.call(LATE, 1, timeout_ms=30)
    await server.saw("late cancelled")
    (served,) = listener.gate.connections
    assert served.snapshot().served == 1, "it counts until the handler is done with it"
    server.late[0].answer(1)
    assert served.snapshot().served == 0
    assert (await connection.call(LATE, 0, timeout_ms=5_000)).value == 0


async def test_answers_without_tasks(network: Any) -> None:
    _, connection, _ = await pair(network)
    outcomes: list[Any] = []
    connection.begin(ASK, Question("a", 1), timeout_ms=2_000, on_answer=outcomes.append)
    connection.begin(FAIL, "trimmed", timeout_ms=2_000, on_answer=outcomes.append)
    connection.begin(SLOW, 9_000, timeout_ms=30, on_answer=outcomes.append)
    connection.begin(
        Method[Question, int]("ask", Question, int), Question("a", 1), timeout_ms=2_000, on_answer=outcomes.append
    )
    async with asyncio.timeout(5):
        while len(outcomes) < 4:
            await asyncio.sleep(0.005)
    assert isinstance(outcomes[0], Received)
    assert outcomes[0].value == Answer("A")
    assert [type(outcome) for outcome in outcomes[1:]] == [Trimmed, MalformedFrame, DeadlineExceeded]


async def test_notices_arrive_in_order(network: Any) -> None:
    server, connection, _ = await pair(network)
    for i in range(100):
        connection.notify(TELL, Question(str(i)), b"x" * i * 100)
    await connection.call(ECHO, None, timeout_ms=5_000)
    assert server.told == [(str(i), b"x" * i * 100) for i in range(100)]


async def test_two_sides_that_tell_much_do_not_wait_for_each_other(network: Any) -> None:
    """Neither asks anything, and both have more to tell than all buffers between them hold."""
    heard: dict[str, list[int]] = {"client": [], "server": []}
    opened: list[Connection] = []

    def hearing(who: str) -> Methods:
        methods = Methods()
        methods.hears(TELL)(lambda notification: heard[who].append(notification.argument.number))
        return methods

    small = WireOptions(send_high_bytes=100_000, send_low_bytes=10_000)
    listener = await network.listen(hearing("server"), options=small, on_open=opened.append)
    connection = await network.connect(listener, hearing("client"), options=small)
    body = bytes(200_000)
    for i in range(100):
        connection.notify(TELL, Question("", i), body)
        opened[0].notify(TELL, Question("", i), body)
    async with asyncio.timeout(10):
        while len(heard["client"]) < 100 or len(heard["server"]) < 100:
            await asyncio.sleep(0.005)
    assert heard["client"] == heard["server"] == list(range(100))


async def test_a_notice_that_fails_harms_nobody(network: Any, caplog: pytest.LogCaptureFixture) -> None:
    server, connection, _ = await pair(network)
    with caplog.at_level(logging.CRITICAL, "cutwater.wire"):
        connection.notify(TELL, Question("bad"))
        connection.notify(Notice[int]("unknown", int), 3)
        connection.notify(Notice[int]("tell", int), 3)
        connection.notify(TELL, Question("good"))
        await connection.call(ECHO, None, timeout_ms=5_000)
    assert server.told == [("good", b"")]


async def test_what_is_too_large_for_the_peer_does_not_leave(network: Any) -> None:
    small = WireOptions(frame_bytes_max=100_000, header_bytes_max=10_000, call_bytes_max=150_000)
    _, connection, _ = await pair(network, options=small)
    with pytest.raises(FrameTooLarge) as caught:
        await connection.call(ECHO, None, bytes(100_000), timeout_ms=2_000)
    assert caught.value.limit == 100_000
    with pytest.raises(FrameTooLarge, match="a header"):
        await connection.call(ASK, Question("x" * 10_000), timeout_ms=2_000)
    assert (await connection.call(ASK, Question("a", 1), timeout_ms=2_000)).value == Answer("A")
    assert connection.snapshot().calls == 0


async def test_an_answer_that_is_too_large_becomes_an_error(network: Any) -> None:
    server = Server()
    listener = await network.listen(server.methods)
    small = WireOptions(frame_bytes_max=10_000, header_bytes_max=5_000)
    connection = await network.connect(listener, options=small)
    with pytest.raises(FrameTooLarge, match="limit of 5000"):
        await connection.call(ASK, Question("abc", 3_000), timeout_ms=2_000)
    assert (await connection.call(ASK, Question("a", 1), timeout_ms=2_000)).value == Answer("A")


async def test_a_graceful_close_lets_calls_finish(network: Any) -> None:
    server, connection, listener = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 100, timeout_ms=5_000))
    await server.saw("begun")
    await listener.close(timeout_ms=5_000)
    assert (await task).value == "slept"
    await asyncio.wait_for(connection.closed, 2)
    with pytest.raises(ConnectionLost) as caught:
        await connection.call(ECHO, None, timeout_ms=1_000)
    assert not caught.value.outcome_unknown


async def test_a_graceful_close_by_the_client_lets_its_calls_finish(network: Any) -> None:
    server, connection, listener = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 100, timeout_ms=5_000))
    await server.saw("begun")
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionLost, match="closing"):
        await connection.call(ECHO, None, timeout_ms=1_000)
    assert (await task).value == "slept"
    await closing
    assert connection.state is ConnectionState.CLOSED
    await asyncio.sleep(0.05)
    assert listener.gate.snapshot().connections == 0


async def test_a_close_has_a_deadline(network: Any) -> None:
    server, connection, listener = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 60_000, timeout_ms=60_000))
    await server.saw("begun")
    await listener.close(timeout_ms=100)
    with pytest.raises(ConnectionLost) as caught:
        await task
    assert caught.value.outcome_unknown
    await server.saw("begun", "cancelled")


async def test_whoever_is_cancelled_while_closing_leaves_nothing_behind(network: Any) -> None:
    server, connection, listener = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 60_000, timeout_ms=60_000))
    await server.saw("begun")
    closing = asyncio.create_task(connection.close(timeout_ms=60_000))
    waiting = asyncio.create_task(asyncio.wait_for(connection.closed, 0.01))
    with pytest.raises(TimeoutError):
        await waiting
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.wait_for(connection.closed, 5)
    with pytest.raises(ConnectionLost):
        await task
    await server.saw("begun", "cancelled")
    async with asyncio.timeout(5):
        while listener.gate.snapshot().connections:
            await asyncio.sleep(0.005)


async def test_what_is_asked_while_closing_is_refused_for_certain(network: Any) -> None:
    """It was on its way when the other side began to close: nothing was done, and the caller knows."""
    server, connection, listener = await pair(network)
    blocker = asyncio.create_task(connection.call(SLOW, 200, timeout_ms=5_000))
    await server.saw("begun")
    closing = asyncio.create_task(listener.close(timeout_ms=5_000))
    outcomes: list[CutwaterError] = []
    async with asyncio.timeout(5):
        while not outcomes or not isinstance(outcomes[-1], ConnectionLost):
            try:
                await connection.call(ASK, Question("a", 1), timeout_ms=5_000)
            except CutwaterError as error:
                outcomes.append(error)
            await asyncio.sleep(0)
    assert all("closing" in str(error) for error in outcomes)
    assert (await blocker).value == "slept"
    await closing


async def test_a_lost_connection_ends_everything(network: Any) -> None:
    server, connection, listener = await pair(network)
    task = asyncio.create_task(connection.call(SLOW, 60_000, timeout_ms=60_000))
    stream = connection.open_stream(FOREVER, None, credit=SharedCredit(2, 1_000))
    async with asyncio.timeout(5):
        while len(server.events) < 2:
            await asyncio.sleep(0.005)
    (served,) = listener.gate.connections
    served.abort()
    with pytest.raises(ConnectionLost) as caught:
        await task
    assert caught.value.outcome_unknown
    with pytest.raises(ConnectionLost):
        await drain(stream, [])
    async with asyncio.timeout(5):
        while {"cancelled", "ended after 1"} - set(server.events):
            await asyncio.sleep(0.005)


async def test_two_busy_sides_do_not_wait_for_each_other(network: Any) -> None:
    """Both ask for much at once, more than all buffers between them hold."""
    server = Server()
    opened: list[Connection] = []
    listener = await network.listen(server.methods, on_open=opened.append)
    mine = Methods()
    mine.answers(ECHO)(lambda call: ReplyWithBody(None, call.body))
    connection = await network.connect(listener, mine)
    body = bytes(1_500_000)

    async def many(one: Connection) -> None:
        received = await asyncio.gather(*(one.call(ECHO, None, body, timeout_ms=15_000) for _ in range(12)))
        assert all(len(answer.body) == len(body) for answer in received)

    await asyncio.gather(many(connection), many(opened[0]))
