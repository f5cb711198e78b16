"""``cutwater.open`` and the blocking client, as programs use them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import cutwater
from cutwater import embedded
from cutwater.admin import local_cluster
from cutwater.cli.framework.target import check_log
from cutwater.client import client as client_module
from cutwater.client.append import router as appends
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.holder_file import Holder, read_holder
from cutwater.client.convert.encoding import Limits
from cutwater.client.errors import ClientClosed, InvalidRecord, RecordTooLarge
from cutwater.client.loop_thread import EXECUTOR_THREADS_MAX
from cutwater.errors import (
    AlreadyExists,
    AppendUnknown,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ProducerFenced,
    Unavailable,
    WrongIdentity,
)
from cutwater.protocol.errors import ConnectionLost
from cutwater.runtime.event_loop import run
from cutwater.storage.files import OsFiles
from tests.times import at_us

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path / "data") as client:
        yield client


def test_append_subscribe_and_the_rest_without_asyncio(log: cutwater.Client) -> None:
    log.create_topic("orders", streams=3)
    ack = log.append("orders", b"hello")
    assert (log.read(ack.glsn).value, log.tail() >= ack.glsn) == (b"hello", True)
    log.append("orders", [b"a", b"b"], key=[b"k", None], timestamp=[at_us(1), at_us(2)])
    assert [record.value for record in log.subscribe("orders", follow=False)] == [b"hello", b"a", b"b"]
    assert sum(batch.num_rows for batch in log.batches("orders", start=ack.glsn + 1, follow=False)) == 2
    assert log.table("orders").to_pandas()["value"].to_list() == [b"hello", b"a", b"b"]
    assert pl.from_arrow(log.table("orders", columns=["glsn", "value"])).shape == (3, 2)
    cursor = log.cursor("billing")
    cursor.commit(ack.glsn)
    assert cursor.get() == ack.glsn
    assert [record.value for record in log.subscribe("orders", start=cursor, follow=False)] == [b"a", b"b"]
    with log.subscribe("orders", start="latest") as latest:
        late = log.append("orders", b"late")
        assert next(latest).glsn == late.glsn
        with pytest.raises(DeadlineExceeded):
            latest.take(timeout=0.05)
        later = log.append("orders", b"later")
        assert [record.glsn for record in latest.take(timeout=10)] == [later.glsn]
    with pytest.raises(ClientClosed, match="this subscription was closed"):
        list(latest)
    log.trim("orders", before=late.glsn)
    assert [record.value for record in log.subscribe("orders", follow=False)] == [b"late", b"later"]
    with pytest.raises(NotFound):
        log.append("nope", b"x")
    with pytest.raises(InvalidArgument, match="stream= is the number of a log stream"):
        log.append("orders", b"x", stream=[1])  # type: ignore[arg-type]


def test_producers_and_appends_of_many_threads(log: cutwater.Client) -> None:
    log.create_topic("t", streams=2)
    with log.producer("t", id="p") as producer, ThreadPoolExecutor(4) as threads:

        def send(number: int) -> list[tuple[int, bytes]]:
            values = [b"%d/%d" % (number, i) for i in range(300)]
            futures = [producer.send(value) for value in values]
            return [(future.result(30).glsn, value) for future, value in zip(futures, values, strict=True)]

        sent = [pair for pairs in threads.map(send, range(4)) for pair in pairs]
        producer.flush()
        appended = list(threads.map(lambda i: log.append("t", b"single %d" % i).glsn, range(100)))
    found = {record.glsn: record.value for record in log.subscribe("t", follow=False)}
    assert dict(sent).items() <= found.items()
    assert len(found) == 1300
    assert {found[glsn] for glsn in appended} == {b"single %d" % i for i in range(100)}
    with pytest.raises(ClientClosed):
        producer.send(b"late")
    old, new = log.producer("t", id="q"), log.producer("t", id="q")
    with pytest.raises(ProducerFenced):
        old.send(b"x").result(30)
    new.close()


def arrow_of(data: bytearray, each: int) -> pa.Array:
    """Values of so many bytes each, in memory that is the caller's."""
    count = len(data) // each
    offsets = pa.array(range(0, len(data) + 1, each), pa.int32())
    return pa.Array.from_buffers(pa.binary(), count, [None, offsets.buffers()[1], pa.py_buffer(data)])


@pytest.mark.parametrize("size", [100, 300_000])
def test_who_changes_a_buffer_after_appending_it_changes_nothing_in_the_log(log: cutwater.Client, size: int) -> None:
    log.create_topic("one")
    value, many = bytearray(b"x" * size), bytearray(b"x" * size)
    log.append("one", value)
    log.append("one", arrow_of(many, 100))
    log.append("one", pa.record_batch({"value": arrow_of(many, 100)}))
    with log.producer("one", id="p") as producer:
        # Nobody waits for it: it may not even have left.
        producer.send(arrow_of(many, 100))
        value[:] = many[:] = b"y" * size
    found = [record.value for record in log.subscribe("one", follow=False)]
    assert found == [b"x" * size] + [b"x" * 100] * (3 * size // 100)


@pytest.mark.parametrize("size", [1_000, 300_000])
def test_with_asyncio_who_changes_a_buffer_that_is_under_way_changes_nothing_either(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with await AsyncClient.open(tmp_path / "data") as log:
            await log.create_topic("one")
            value, many = bytearray(b"x" * size), bytearray(b"x" * size)
            appends = [asyncio.create_task(log.append("one", data)) for data in (value, arrow_of(many, 100))]
            await asyncio.sleep(0)
            value[:] = many[:] = b"y" * size
            await asyncio.gather(*appends)
            found = sorted([record.value async for record in log.subscribe("one", follow=False)], key=len)
            assert found == [b"x" * 100] * (size // 100) + [b"x" * size]

    run(main())


@pytest.mark.parametrize("records", [b"v" * 1_000, pa.array([b""] * 500)], ids=["one", "empty"])
def test_what_fits_by_itself_fits_together_with_others(tmp_path: Path, records: Any) -> None:
    async def main() -> None:
        limits = Limits(record_bytes_max=50_000, batch_bytes_max=100_000)
        async with await AsyncClient.open(tmp_path / "data", limits=limits) as log:
            await log.create_topic("one")
            await asyncio.gather(*(log.append("one", records) for _ in range(200)))
            async with await log.producer("one", id="p") as producer:
                await asyncio.gather(*[await producer.send(records) for _ in range(200)])

    run(main())


def test_rows_are_what_they_were_when_they_were_sent(log: cutwater.Client) -> None:
    """A frame that is filled anew for each send is how many programs are written."""
    log.create_topic("rows", schema=pa.schema({"x": pa.int64(), "y": pa.float64()}))
    frame = pd.DataFrame({"x": [0] * 1_000, "y": [0.0] * 1_000})
    with log.producer("rows", id="p") as producer:
        for k in range(20):
            frame.loc[:, "x"] = k
            producer.send(frame)
        for k in range(20, 40):
            numbers = np.full(1_000, k)
            table = pa.table({"x": numbers, "y": numbers.astype(float)})
            producer.send(table)
            numbers[:] = -1
    found = Counter(record.row["x"] for record in log.subscribe("rows", follow=False))
    assert found == dict.fromkeys(range(40), 1_000)


def test_arrow_data_that_does_not_hold_together_is_refused(log: cutwater.Client) -> None:
    log.create_topic("one")
    offsets = pa.array([0, 100, 9_000, 300], pa.int32())
    buffers = [None, offsets.buffers()[1], pa.py_buffer(b"x" * 300)]
    broken, times = (pa.Array.from_buffers(kind, 3, buffers) for kind in (pa.binary(), pa.string()))
    series = pd.Series(pd.arrays.ArrowExtensionArray(broken))
    frame = pd.DataFrame({"value": series})
    tables = pa.record_batch({"value": broken}), pa.table({"value": broken, "key": broken})
    for records in (broken, *tables, series, frame):
        with pytest.raises(InvalidRecord, match="does not hold together"):
            log.append("one", records)
    header = pa.array([[("a", b"b")]], pa.map_(pa.string(), pa.binary()))
    kind = header.type
    pairs = pa.StructArray.from_arrays([header.keys, header.items], fields=[kind.key_field, kind.item_field])
    offsets = pa.array([0, 9, 0, 1], pa.int32())
    headers = pa.Array.from_buffers(kind, 3, [None, offsets.buffers()[1]], children=[pairs])
    for extra in ({"key": broken}, {"key": series}, {"timestamp": times}, {"headers": headers}):
        with pytest.raises(InvalidRecord, match="does not hold together"):
            log.append("one", [b"x"] * 3, **extra)
    with log.producer("one", id="p") as producer, pytest.raises(InvalidRecord, match="does not hold together"):
        producer.send(broken)


def test_what_a_producer_cannot_make_ready_is_told(log: cutwater.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    log.create_topic("one")
    with log.producer("one", id="p") as producer:
        producer.send(b"one").result(30)
        with monkeypatch.context() as patched:
            patched.setattr(appends, "encode_parts", lambda *args, **kwargs: 1 / 0)
            futures = [producer.send(b"two"), producer.send(b"three")]
            for future in futures:
                with pytest.raises(InvalidRecord, match="nothing of them was sent"):
                    future.result(30)
            with pytest.raises(InvalidRecord):
                producer.flush()
        producer.send(b"four")
    assert [record.value for record in log.subscribe("one", follow=False)] == [b"one", b"four"]


def test_of_many_values_the_one_that_is_too_large_is_named(log: cutwater.Client) -> None:
    log.create_topic("one")
    values = pa.array([b"x"] * 100_000 + [b"x" * (1 << 20)] + [b"x"], pa.binary())
    for records in (values, pa.record_batch({"value": values})):
        with pytest.raises(RecordTooLarge) as caught:
            log.append("one", records)
        assert caught.value.row == 100_000
    with log.producer("one", id="p") as producer, pytest.raises(RecordTooLarge):
        producer.send(values)
    assert log.append("one", values.slice(0, 100_000)).count == 100_000
    assert sum(1 for _ in log.subscribe("one", follow=False)) == 100_000


def outcome_of(append: Callable[..., cutwater.Ack], log: cutwater.Client, given: dict[str, Any]) -> object:
    """What an append has stored, or the error."""
    try:
        ack = append(**given)
    except cutwater.CutwaterError as error:
        return type(error), error.message
    records = [log.read(ack.glsn + i) for i in range(ack.count)]
    is_given = "timestamp" in given
    return [(record.value, record.key, record.headers, is_given and record.timestamp) for record in records]


def test_threads_append_what_coroutines_append(log: cutwater.Client) -> None:
    """Threads have a way of their own that is cheaper."""
    log.create_topic("plain")
    log.create_topic("typed", schema={"n": pa.int64()})
    at = datetime(2026, 1, 1, tzinfo=UTC)
    some = pa.array([b"a", b"", b"c"], pa.binary())
    values: list[Any] = [
        b"x",
        "text",
        [b"a", b"b"],
        some,
        pa.table({"value": some}),
        pa.array([b"y" * 100] * 1_000),
        7,
        {},
    ]
    options: list[dict[str, Any]] = [
        *({}, {"key": b"k"}, {"key": 3}, {"headers": {"a": b"b"}}, {"timestamp": at}, {"idle": True}, {"idle": 2}),
        *({"watermark": at}, {"stream": 1}, {"stream": 99, "timeout": 5}, {"stream": "a"}, {"if_llsn": 1}),
    ]
    cases = [{"topic": "plain", "records": records, **extra} for records in values for extra in options]
    cases += [{"topic": "typed", "records": records} for records in ({"n": 1}, [{"n": 2}, {"n": 3}], {"m": 1}, b"x")]
    cases += [{"topic": "none", "records": b"x"}, {"topic": 3, "records": b"x"}]
    for given in cases:
        by_thread = outcome_of(log.append, log, given)
        by_coroutine = outcome_of(lambda **given: log._loop.run(log._async.append(**given)), log, given)
        assert by_thread == by_coroutine, given


def test_back_pressure_stops_a_thread_that_sends_too_much(log: cutwater.Client) -> None:
    log.create_topic("t")
    with log.producer("t", id="p", buffer_bytes=100_000) as producer:
        futures = [producer.send(b"x" * 1000) for _ in range(2000)]
        assert sum(not future.done() for future in futures) <= 100
    assert len({future.result().glsn for future in futures}) == 2000


def interrupted(call: Callable[[], Any], at: int, handler: Callable[[], None]) -> Any:
    """Call it, and the handler before its line of this number is run in the module of the blocking client, as if that
    of a signal came there. Raises ``IndexError`` if it has fewer lines."""
    left = at

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != client_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)
        if left > 0:
            raise IndexError


def test_the_handler_of_a_signal_may_use_a_producer_that_it_has_interrupted(log: cutwater.Client) -> None:
    log.create_topic("t")
    futures = []
    with log.producer("t", id="p") as producer, suppress(IndexError):

        def send_too() -> None:
            futures.append(producer.send(b"in between"))
            producer.flush(timeout=20)
            assert futures[-1].done()

        for at in itertools.count(1):
            futures.append(interrupted(lambda: producer.send(b"x"), at, send_too))
    assert len(futures) > 20
    assert len({future.result(20).glsn for future in futures}) == len(futures)
    with suppress(IndexError):
        for at in itertools.count(1):
            producer = log.producer("t", id="p")
            try:
                future = interrupted(partial(producer.send, b"y"), at, partial(producer.close, timeout=20))
                assert future.exception(20) is None or isinstance(future.exception(), ClientClosed)
            except ClientClosed:
                pass
    assert at > 10


def test_what_was_appended_is_there_after_closing_and_opening_again(tmp_path: Path) -> None:
    for round_number in range(3):
        with cutwater.open(tmp_path) as log:
            if not round_number:
                log.create_topic("t", schema={"n": pa.int64()})
            log.append("t", {"n": round_number})
            assert log.table("t").column("n").to_pylist() == list(range(round_number + 1))
    with pytest.raises(ClientClosed):
        log.append("t", {"n": 1})
    log.close()


def test_a_second_opener_connects_or_is_told_who_has_it(tmp_path: Path) -> None:
    program = """
import sys, cutwater
with cutwater.open(sys.argv[1]) as log:
    print(log.append("t", b"from the child").glsn)
"""
    with cutwater.open(tmp_path) as log:
        log.create_topic("t")
        with cutwater.open(tmp_path) as same:
            same.append("t", b"from a second client")
        with pytest.raises(AlreadyExists, match=f"process {os.getpid()}"):
            cutwater.open(tmp_path, exclusive=True)
        command = [sys.executable, "-c", program, str(tmp_path)]
        glsn = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
        assert log.read(glsn).value == b"from the child"
    with cutwater.open(tmp_path, exclusive=True) as log:
        assert log.table("t").num_rows == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument):
        cutwater.open(tmp_path / "file")
    (tmp_path / "cluster.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="local cluster"):
        cutwater.open(tmp_path)


@pytest.mark.parametrize("is_killed", [False, True])
def test_who_was_connected_is_told_at_once_that_the_log_was_closed(tmp_path: Path, is_killed: bool) -> None:
    program = """
import sys, cutwater
with cutwater.open(sys.argv[1]) as log:
    log.create_topic("t")
    print("open", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as opener:
        try:
            assert opener.stdout is not None
            assert opener.stdin is not None
            assert opener.stdout.readline() == "open\n"
            # Whoever waited until the time is up would be ended by the time limit of the test.
            log = cutwater.open(tmp_path, timeout=1_000)
            ack = log.append("t", b"acknowledged")
            producer, following = log.producer("t", id="p"), log.subscribe("t", start="latest")
            if is_killed:
                opener.kill()
            opener.stdin.close()
            opener.wait(60)
        finally:
            opener.kill()
    said = f"connected to process {opener.pid}, which had .* and has closed it, or ended: make another one with cutw"
    calls: list[Callable[[], Any]] = [
        lambda: log.append("t", b"late"),
        lambda: log.append("t", b"late", headers={"a": b"x"}),
        lambda: log.read(ack.glsn),
        log.tail,
        lambda: log.create_topic("u"),
        lambda: log.subscribe("t"),
        lambda: log.producer("t", id="q"),
        following.take,
        lambda: producer.send(b"late").result(),
    ]
    for call in calls:
        with pytest.raises(ClientClosed, match=said):
            call()
    with suppress(ClientClosed):
        log.close()
    with cutwater.open(tmp_path, exclusive=True) as again:
        assert [record.value for record in again.subscribe("t", follow=False)] == [b"acknowledged"]
    with pytest.raises(ConnectionLost, match="if it was an embedded log, the process that had opened it has closed it"):
        cutwater.connect(log.servers, timeout=0.3)


def test_a_holder_that_was_killed_loses_nothing_acknowledged(tmp_path: Path) -> None:
    program = """
import sys, cutwater
log = cutwater.open(sys.argv[1])
log.create_topic("t")
for i in range(1_000_000):
    print(log.append("t", b"%d" % i).glsn, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(50)]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    # Some may have been read together with the fiftieth; ``communicate`` would not find those.
    with child.stdout:
        acknowledged += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    with cutwater.open(tmp_path) as log:
        found = {record.glsn: record.value for record in log.subscribe("t", follow=False)}
        assert [found.get(glsn) for glsn in acknowledged] == [b"%d" % i for i in range(len(acknowledged))]
        assert len(found) - len(acknowledged) in (0, 1)


PROGRAMS = {
    "nothing is closed": "log.append('t', b'x'); log.subscribe('t'); p = log.producer('t', id='p'); p.send(b'y')",
    "a subscription waits in another thread": (
        "import threading, time\n"
        "def wait():\n"
        "    try: list(log.subscribe('t'))\n"
        "    except cutwater.CutwaterError: pass\n"
        "threading.Thread(target=wait, daemon=True).start(); time.sleep(0.2)"
    ),
    "other threads go on after the main one": (
        "import threading, time\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.2)\n"
        "    ack = log.append('t', b'late')\n"
        "    assert [r.value for r in log.subscribe('t', follow=False)] == [b'late']\n"
        "    assert log.read(ack.glsn).value == b'late'\n"
        "threading.Thread(target=late).start()"
    ),
    "an error is on its way": "log.append('t', b'x'); raise SystemExit(3)",
    "a log with asyncio is not closed": (
        "import asyncio\n"
        "async def main():\n"
        "    log = await cutwater.AsyncClient.open(sys.argv[1] + '/other')\n"
        "    await log.create_topic('t')\n"
        "    await log.append('t', b'x')\n"
        "asyncio.run(main())"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_interpreter_ends_by_itself(tmp_path: Path, program: str) -> None:
    text = f"import cutwater, sys\nlog = cutwater.open(sys.argv[1])\nlog.create_topic('t')\n{program}\n"
    command = [sys.executable, "-X", "dev", "-c", text, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if "SystemExit" in program else 0), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    with cutwater.open(tmp_path) as log:
        if "p.send" in program:
            assert [record.value for record in log.subscribe("t", follow=False)] == [b"x", b"y"]


def _use_in_child(log: cutwater.Client, found: multiprocessing.Queue[str]) -> None:
    try:
        log.tail()
    except ClientClosed as error:
        found.put(error.message)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own_client(log: cutwater.Client) -> None:
    context = multiprocessing.get_context("fork")
    found: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_use_in_child, args=(log, found))
    child.start()
    try:
        assert "forked" in found.get(timeout=30)
    finally:
        child.join(30)
    log.create_topic("t")
    assert log.append("t", b"the parent goes on").count == 1


def test_closing_ends_whoever_waits(tmp_path: Path) -> None:
    log = cutwater.open(tmp_path)
    log.create_topic("t")
    subscription = log.subscribe("t")
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(next(subscription))
        except (ClientClosed, StopIteration) as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    log.close()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(outcome[0], ClientClosed | StopIteration)


def test_a_subscription_that_is_closed_says_so_and_one_that_is_polled_gives_what_is_there(log: cutwater.Client) -> None:
    log.create_topic("t")
    with log.subscribe("t") as subscription:
        with pytest.raises(DeadlineExceeded, match="nothing has come yet"):
            subscription.take(timeout=0)
        log.append("t", b"x")
        deadline, found = time.monotonic() + 30, list[cutwater.Record]()
        while not found and time.monotonic() < deadline:
            with suppress(DeadlineExceeded):
                found = subscription.take(timeout=0)
        assert [record.value for record in found] == [b"x"]
        with pytest.raises(InvalidArgument, match="timeout"):
            subscription.take(timeout=-1)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(list, subscription)
            time.sleep(0.05)
            subscription.close()
            assert waiting.result(30) == []
    with pytest.raises(ClientClosed, match="this subscription was closed"):
        subscription.take(timeout=5)
    with pytest.raises(ClientClosed, match="this subscription was closed"):
        iter(subscription)
    some = log.subscribe("t")
    for record in some:
        assert record.value == b"x"
        some.close()
    ended = log.subscribe("t", follow=False)
    assert len(list(ended)) == 1
    assert list(ended) == ended.take(timeout=0) == []


def test_a_loop_that_is_left_early_leaves_nothing_behind(log: cutwater.Client) -> None:
    async def background() -> int:
        return sum(not task.done() for task in asyncio.all_tasks())

    log.create_topic("t")
    log.append("t", b"x")
    before = log._loop.run(background())
    for _ in range(5):
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"x"]
        for _record in log.subscribe("t"):
            break
    gc.collect()
    deadline = time.monotonic() + 30
    while log._loop.run(background()) > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gc.collect()
    assert not log._async._subscribing.known


HANGING_DISK = """
import os, sys, threading
import cutwater
from cutwater.client import loop_thread

loop_thread.LOOK_SECONDS = loop_thread.STUCK_SECONDS = loop_thread.STUCK_SECONDS_MAX = loop_thread.END_SECONDS = 0.3
answers, sync = threading.Event(), os.fdatasync
log = cutwater.open(sys.argv[1])
log.create_topic("t")
log.append("t", b"acknowledged")
os.fdatasync = lambda descriptor: (answers.wait(60), sync(descriptor))
try:
    log.append("t", b"no answer", timeout=0.3)
except cutwater.CutwaterError as error:
    print(error.code)
try:
    log.close()
except cutwater.CutwaterError as error:
    print(error.code)
answers.set()
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(0.5)
"""


def test_a_disk_that_answers_after_the_end_disturbs_nobody(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["append_unknown", "deadline_exceeded"], "")


def test_closing_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_answers = threading.Event()
    log = cutwater.open(tmp_path)
    threads: Any = cast("Any", log._async._on_close).__self__._threads
    try:
        log.create_topic("t")
        log.append("t", b"acknowledged")
        monkeypatch.setattr(embedded, "STOP_MS_MAX", 100)
        for _ in range(EXECUTOR_THREADS_MAX):
            threads.submit(disk_answers.wait, 60)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=r"stays locked.*Call close\(\) once more"):
                log.close()
        assert OsFiles().lock(tmp_path / "lock") is None
        with pytest.raises(ClientClosed):
            log.append("t", b"late")
    finally:
        disk_answers.set()
        monkeypatch.setattr(embedded, "STOP_MS_MAX", 30_000)
        log.close()
    log.close()
    with cutwater.open(tmp_path, exclusive=True) as again:
        assert [record.value for record in again.subscribe("t", follow=False)] == [b"acknowledged"]


def test_with_asyncio_a_disk_that_hangs_stops_neither_deadlines_nor_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what may still be written stays locked."""
    monkeypatch.setattr(embedded, "STOP_MS_MAX", 500)
    disk_answers = threading.Event()
    sync = os.fdatasync

    def hang(descriptor: int) -> None:
        disk_answers.wait(60)
        sync(descriptor)

    async def test() -> None:
        log = await AsyncClient.open(tmp_path)
        threads: Any = cast("Any", log._on_close).__self__._threads
        try:
            await log.create_topic("t")
            await log.append("t", b"acknowledged")
            monkeypatch.setattr(os, "fdatasync", hang)
            # Reads hang too, so there is not even a thread left that could close the log.
            for _ in range(EXECUTOR_THREADS_MAX):
                threads.submit(disk_answers.wait, 60)
            with pytest.raises(AppendUnknown):
                await log.append("t", b"no answer", timeout=0.3)
            with pytest.raises(DeadlineExceeded, match="stays locked"):
                await log.close()
            locks = [tmp_path / "lock", *(tmp_path / "volume").rglob("lock")]
            assert [OsFiles().lock(path) for path in locks] == [None, None]
        finally:
            disk_answers.set()
            monkeypatch.setattr(embedded, "STOP_MS_MAX", 30_000)
            await log.close()

    run(test())
    with cutwater.open(tmp_path) as again:
        assert next(again.subscribe("t", follow=False)).value == b"acknowledged"


def test_with_asyncio_it_is_open_to_others_too_and_closed_with_its_client(tmp_path: Path) -> None:
    def elsewhere() -> int:
        with cutwater.open(tmp_path) as same:
            return same.append("t", b"from another thread").glsn

    async def test() -> None:
        async with await AsyncClient.open(tmp_path) as log:
            await log.create_topic("t")
            acks = await asyncio.gather(*(log.append("t", b"%d" % i) for i in range(100)))
            assert len({ack.glsn for ack in acks}) == 100
            async with await AsyncClient.open(tmp_path) as same:
                await same.append("t", b"from the same loop")
            assert (await log.read(await asyncio.to_thread(elsewhere))).value == b"from another thread"
            with pytest.raises(AlreadyExists, match=f"process {os.getpid()}"):
                await AsyncClient.open(tmp_path, exclusive=True)
        with pytest.raises(ClientClosed):
            await log.append("t", b"late")

    run(test())
    with cutwater.open(tmp_path, exclusive=True) as log:
        assert log.table("t").num_rows == 102


def test_with_asyncio_all_threads_of_the_program_may_be_busy(tmp_path: Path) -> None:
    """Perhaps with what waits for the log."""

    async def test() -> None:
        loop, is_read = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, is_read.wait, 60)
        try:
            async with asyncio.timeout(50), await AsyncClient.open(tmp_path, timeout=20) as log:
                await log.create_topic("t")
                ack = await log.append("t", b"x")
                assert (await log.read(ack.glsn)).value == b"x"
                assert (await log.table("t")).num_rows == 1
            assert not busy.done()
        finally:
            is_read.set()
            await busy

    run(test())
    assert not any(thread.name.startswith("cutwater log") for thread in threading.enumerate())


def test_with_asyncio_closing_goes_on_also_if_who_waits_for_it_is_cancelled(tmp_path: Path) -> None:
    async def test() -> None:
        for turns in (1, 3, 10):
            log = await AsyncClient.open(tmp_path, exclusive=True)
            closing = asyncio.create_task(log.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            await asyncio.gather(log.close(), log.close())
            assert read_holder(tmp_path) is None
            await log.close()

    run(test())


def test_a_holder_that_does_not_answer_may_be_this_process(tmp_path: Path) -> None:
    lock = OsFiles().lock(tmp_path / "lock")
    assert lock is not None
    for pid, said in ((os.getpid(), "by this process before"), (os.getppid(), "in another process")):
        (tmp_path / "holder.json").write_bytes(msgspec.json.encode(Holder(pid, "cutwater://127.0.0.1:1")))
        with pytest.raises(Unavailable, match=said):
            cutwater.open(tmp_path, timeout=0.1)
    lock.release()


@pytest.mark.parametrize("path", ["", None, 3])
def test_what_is_no_path_of_a_directory_is_refused(path: Any) -> None:
    with pytest.raises(InvalidArgument, match="a log is in a directory: give its path"):
        cutwater.open(path)


async def _opened_and_connected(address: Any, path: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"where a cluster listens, and not a directory: use cutwater.connect"):
        await cutwater.AsyncClient.open(address)
    with pytest.raises(InvalidArgument, match=r"is a path, .* is opened by cutwater.open"):
        await cutwater.AsyncClient.connect(path)


def test_who_takes_a_cluster_for_a_directory_or_a_directory_for_a_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    addresses: list[Any] = ["cutwater://127.0.0.1:1", Path("cutwater://127.0.0.1:1")]
    for address in addresses:
        with pytest.raises(InvalidArgument, match=r"not a directory: use cutwater.connect"):
            cutwater.open(address)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "data").mkdir()
    paths: list[Any] = ["./new", "data", "new/data", tmp_path]
    for path in paths:
        with pytest.raises(InvalidArgument, match=r"is a path, .* is opened by cutwater.open"):
            cutwater.connect(path)
    for wrong in ("new", "http://127.0.0.1:1"):
        with pytest.raises(InvalidArgument, match="does not name a cluster"):
            cutwater.connect(wrong)
    asyncio.run(_opened_and_connected(addresses[0], paths[0]))


KILLED_AT_FIRST_START = """
import os, signal, sys
import cutwater, cutwater.embedded

path, left = sys.argv[1], int(sys.argv[2])

def watch(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "sqlite3.connect") and str(arguments[0]).startswith(path + "/"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
cutwater.open(path).close()
"""


def test_a_directory_with_other_files_is_refused_but_not_one_that_was_half_made(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for name in ("a.txt", "b.txt", "lock", "z.txt", ".hidden"):
        (tmp_path / name).touch()
    with pytest.raises(
        InvalidArgument, match=r"no log, but holds other files \(a.txt, b.txt, photos, …\): name an empty"
    ):
        cutwater.open(tmp_path)
    with pytest.raises(InvalidArgument, match="is no local cluster, but holds other files"):
        local_cluster.start(tmp_path)
    assert len(list(tmp_path.iterdir())) == 6
    found = set[frozenset[str]]()
    for left in (1, 3, 6):
        half = tmp_path / f"half {left}"
        half.mkdir()
        (half / ".gitignore").touch()
        command = [sys.executable, "-c", KILLED_AT_FIRST_START, str(half), str(left)]
        assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
        found.add(frozenset(path.name for path in half.iterdir()))
        with pytest.raises(InvalidArgument, match="holds an embedded log, and no local cluster"):
            local_cluster.start(half)
        with cutwater.open(half) as log:
            log.create_topic("t")
    assert len(found) > 1, found
    # It is one now, whatever is put beside it.
    (half / "notes.txt").touch()
    with cutwater.open(half) as log:
        assert [topic.name for topic in log.topics()] == ["t"]
    with pytest.raises(InvalidArgument, match="holds an embedded log, and no local cluster"):
        local_cluster.start(half)


def test_a_local_cluster_that_was_half_made_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not serve"):
        local_cluster.start(tmp_path, storage_nodes=1, storage_flags=("--nonsense",))
    left = {path.name for path in tmp_path.iterdir()}
    assert "metadata.sqlite" in left
    with pytest.raises(InvalidArgument, match="never come to run, and no embedded log: `cutwater cluster start --dir"):
        cutwater.open(tmp_path)
    with pytest.raises(NotFound, match="has never come to run: `cutwater cluster start --dir"):
        local_cluster.load(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("removed", [["metadata.sqlite.key"], ["server-key"], ["metadata.sqlite.key", "server-key"]])
def test_a_private_key_that_was_removed_is_replaced_and_the_log_goes_on(tmp_path: Path, removed: list[str]) -> None:
    with cutwater.open(tmp_path) as log:
        log.create_topic("t")
        log.append("t", b"before")
    for name in removed:
        (found,) = tmp_path.rglob(name)
        found.unlink()
    # Once more, because what is made known has to last.
    for value in (b"after", b"again"):
        with cutwater.open(tmp_path, timeout=10) as log:
            log.append("t", value)
    with cutwater.open(tmp_path, timeout=10) as log:
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"before", b"after", b"again"]
    for name in removed:
        assert len(list(tmp_path.rglob(name))) == 1


def test_a_new_private_key_makes_no_volume_of_another_log_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with cutwater.open(tmp_path / name) as log:
            log.create_topic("t")
            log.append("t", name.encode())
    (tmp_path / "a" / "volume").rename(tmp_path / "of a")
    (tmp_path / "b" / "volume").rename(tmp_path / "a" / "volume")
    (found,) = (tmp_path / "a").rglob("server-key")
    found.unlink()
    with pytest.raises(WrongIdentity, match="has its number but not its data"):
        cutwater.open(tmp_path / "a", timeout=10)


def test_a_log_without_the_file_of_the_order_layer_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with cutwater.open(path) as log:
        log.create_topic("t")
        log.append("t", b"x")
    (path / "metadata.sqlite").rename(tmp_path / "aside")
    left = {found.name for found in path.iterdir()}
    said = r"metadata\.sqlite is missing, the file of the order layer.*records are still in .*volume: put the file back"
    with pytest.raises(NotFound, match=said):
        cutwater.open(path)
    with pytest.raises(NotFound, match=said):
        check_log(path)
    assert {found.name for found in path.iterdir()} == left
    (tmp_path / "aside").rename(path / "metadata.sqlite")
    check_log(path)
    with cutwater.open(path) as log:
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"x"]


def test_options_are_looked_at_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not 'gzip'"):
        cutwater.open(tmp_path / "new", compression=cast(Any, "gzip"))
    assert not (tmp_path / "new").exists()
    with cutwater.open(tmp_path / "log"), pytest.raises(InvalidArgument, match="not 'gzip'"):
        cutwater.open(tmp_path / "log", compression=cast(Any, "gzip"))


def test_arguments_of_a_wrong_type_are_refused_in_words(tmp_path: Path) -> None:
    wrong: Any = "a"
    with cutwater.open(tmp_path) as log:
        log.create_topic("t")
        with pytest.raises(InvalidArgument, match="a timeout is a number of seconds, not 'a'"):
            log.append("t", b"x", timeout=wrong)
        for name in ("wrong", "seconds", "outcome"):
            with pytest.raises(TypeError, match=rf"^Client.append\(\) got an unexpected keyword argument '{name}'"):
                log.append("t", b"x", **{name: 1})
        with pytest.raises(TypeError, match=r"^Client.append\(\) too many positional arguments"):
            log.append("t", b"x", b"key")  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match=r"tls= is a context .* not 'a': make one with cutwater.tls_context"):
            cutwater.connect("cutwater://127.0.0.1:1", tls=wrong, token="t")
        with pytest.raises(InvalidArgument, match="there is no GLSN 'a': positions are whole numbers"):
            log.read(wrong)
        with pytest.raises(InvalidArgument, match="follow= is True or False, not 'a'"):
            log.subscribe("t", follow=wrong)
        with pytest.raises(InvalidArgument, match=r"patterns of them: re\.compile\(b't'\) is one of bytes"):
            log.subscribe(re.compile(b"t"))  # type: ignore[arg-type]
        with pytest.raises(
            NotFound, match=r"there is no topic 't\*'; topics: t; for topics by a pattern give re.compile"
        ):
            log.subscribe("t*", follow=False)


def test_a_log_that_is_closed_while_it_tidies_up_does_so_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for round_ in range(3):
        with cutwater.open(tmp_path) as log:
            if not round_:
                log.create_topic("t", streams=2)
            ack = log.append("t", [b"a", b"b", b"c"])
            log.trim("t", before=ack.glsn + 1)
    assert "opened anew" not in caplog.text
    with cutwater.open(tmp_path) as log:
        assert [record.value for record in log.subscribe("t", follow=False)] == [b"b", b"c"]
        # What was asked for is nothing to warn of.
        log.delete_topic("t")
    assert "is removed" not in caplog.text
