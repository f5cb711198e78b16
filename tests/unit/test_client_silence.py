"""What a client does about a storage node that says nothing: it complains, looks at the catalog, goes elsewhere, and
settles what waits as soon as the catalog tells what became of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from msgspec import structs

from cutwater.client.append import pending as pending_module
from cutwater.client.append.pending import Pending, PendingAppends
from cutwater.client.cluster import silence
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import first_answer, watched
from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.errors import AppendUnknown, CutwaterError, DeadlineExceeded, StreamSealed, Trimmed, Unavailable
from cutwater.protocol.storage_api import AppendAnswer
from cutwater.types import GLSN, LLSN, Ack, CutTime, Epoch, LogStreamId, Revision, Sequence, StorageNodeId, TopicId

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

ONE, TWO = StorageNodeId(1), StorageNodeId(2)
STREAM = LogStreamId(1)
SENT = StreamInfo(
    STREAM, TopicId(1), Epoch(3), True, False, (ONE, TWO), (ONE, TWO), LLSN(10), GLSN(10), GLSN(0), CutTime(0)
)
SOON = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow, for these tests."""
    monkeypatch.setattr(pending_module, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(pending_module, "LOOK_SECONDS", SOON)
    monkeypatch.setattr(silence, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(silence, "LOOK_SECONDS", SOON)


class Cluster:
    """A metadata repository with one log stream, which notes who asks and who is complained about."""

    trouble = ""

    def __init__(self) -> None:
        self.revision, self.info = 1, SENT
        self.asked = 0
        self.blamed: list[tuple[LogStreamId, StorageNodeId]] = []
        self.catalogs = Catalogs(cast(Repository, cast(Any, self)))
        self.catalogs.take(self.catalog())
        self.nodes = cast(Nodes, cast(Any, self))

    def catalog(self) -> Catalog:
        topic = TopicInfo(TopicId(1), "t", GLSN(1))
        return Catalog(Revision(self.revision), GLSN(10), CutTime(0), (topic,), (self.info,))

    async def ask(self, request: object, answer: type, *, timeout_ms: int) -> Catalog:
        self.asked += 1
        return self.catalog()

    def unreachable(self, stream: LogStreamId, node: StorageNodeId) -> None:
        self.blamed.append((stream, node))

    def change(self, **changes: object) -> None:
        """What the next catalog says."""
        self.revision, self.info = self.revision + 1, structs.replace(self.info, **changes)


class Outcome:
    """One append, and what it was told."""

    def __init__(self, appends: PendingAppends, known_end: int | None = 10) -> None:
        self.told: list[CutwaterError] = []
        self.was_slow = 0
        since = asyncio.get_running_loop().time()
        end = None if known_end is None else LLSN(known_end)
        self.pending = Pending(SENT, end, since, self.told.append, self._slow)
        appends.add(self.pending)

    def _slow(self) -> None:
        self.was_slow += 1


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_silence_is_evidence_before_the_time_is_up() -> None:
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    outcome = Outcome(appends)
    begun = asyncio.get_running_loop().time()
    await until(lambda: bool(cluster.blamed))
    assert asyncio.get_running_loop().time() - begun > 0.09, "an append may take a moment"
    await until(lambda: outcome.was_slow > 0 and cluster.asked > 0)
    assert cluster.blamed[0] == (STREAM, ONE)
    assert appends.is_avoided(STREAM)
    asked = cluster.asked
    await until(lambda: cluster.asked > asked)
    assert outcome.was_slow == 1
    assert outcome.told == [], "the epoch goes on, so nobody can tell"
    appends.discard(outcome.pending)
    appends.close()
    await cluster.catalogs.close()


@pytest.mark.parametrize("is_open", [True, False])
async def test_what_certainly_was_not_taken_may_go_elsewhere_at_once(is_open: bool) -> None:
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    outcome = Outcome(appends)
    if is_open:
        cluster.change(epoch=Epoch(4), chain=(TWO,), start=LLSN(10), committed_end=LLSN(30))
    else:
        cluster.change(is_open=False)
    cluster.catalogs.take(cluster.catalog())
    (error,) = outcome.told
    assert isinstance(error, StreamSealed)
    appends.close()


async def test_what_may_have_been_taken_is_unknown_once_the_head_is_left_out() -> None:
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    outcome = Outcome(appends)
    cluster.change(epoch=Epoch(4), chain=(TWO,), start=LLSN(11))
    cluster.catalogs.take(cluster.catalog())
    assert outcome.told == [], "the head may still be about to answer"
    await until(lambda: bool(outcome.told))
    (error,) = outcome.told
    assert isinstance(error, AppendUnknown)
    appends.close()
    await cluster.catalogs.close()


async def test_a_head_that_is_still_in_the_chain_gets_time_to_answer() -> None:
    """After a seal that another replica has caused, it knows more than the catalog."""
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    outcome = Outcome(appends)
    await until(lambda: outcome.was_slow > 0)
    cluster.change(epoch=Epoch(4), chain=(ONE,), start=LLSN(11))
    cluster.catalogs.take(cluster.catalog())
    assert outcome.told == []
    ended = asyncio.get_running_loop().time()
    await until(lambda: bool(outcome.told))
    assert asyncio.get_running_loop().time() - ended > 0.09
    assert isinstance(outcome.told[0], AppendUnknown)
    appends.close()
    await cluster.catalogs.close()


async def test_what_was_never_sent_is_free_when_the_epoch_ends() -> None:
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    outcome = Outcome(appends, known_end=None)
    cluster.change(epoch=Epoch(4), chain=(TWO,), start=LLSN(99))
    cluster.catalogs.take(cluster.catalog())
    assert isinstance(outcome.told[0], StreamSealed)
    appends.close()


async def test_acknowledgements_tell_what_is_committed_and_of_new_catalogs() -> None:
    cluster = Cluster()
    appends = PendingAppends(cluster.catalogs, cluster.nodes)
    assert appends.known_end(SENT) == 10
    appends.blame(SENT)
    await until(lambda: cluster.asked == 1)
    appends.taken(AppendAnswer(Ack(GLSN(20), LLSN(15), STREAM, 3), Sequence(0), Revision(1)))
    assert appends.known_end(SENT) == 17
    assert not appends.is_avoided(STREAM)
    assert appends.known_end(structs.replace(SENT, committed_end=LLSN(40))) == 40
    cluster.change()
    appends.taken(AppendAnswer(Ack(GLSN(23), LLSN(18), STREAM, 1), Sequence(0), Revision(2)))
    await until(lambda: cluster.catalogs.view.catalog.revision == 2)
    assert cluster.asked == 2
    appends.taken(AppendAnswer(Ack(GLSN(24), LLSN(19), STREAM, 1), Sequence(0), Revision(2)))
    await asyncio.sleep(0.3)
    assert cluster.asked == 2, "nothing new was heard of"
    appends.close()
    await cluster.catalogs.close()


async def test_looks_at_the_catalog_are_few_however_many_want_one() -> None:
    cluster = Cluster()
    begun = asyncio.get_running_loop().time()
    for _ in range(100):
        cluster.catalogs.look()
        await asyncio.sleep(0.005)
    # One at once, and one each 0.2 s.
    assert 2 <= cluster.asked <= 2 + (asyncio.get_running_loop().time() - begun) / 0.2
    await cluster.catalogs.close()
    cluster.catalogs.look()


async def test_the_first_answer_counts_and_silence_asks_the_next() -> None:
    asked: list[str] = []

    def asker(name: str, outcome: object, seconds: float = 0.0) -> Callable[[], Awaitable[object]]:
        async def ask() -> object:
            asked.append(name)
            await asyncio.sleep(seconds)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return ask

    assert await first_answer([asker("a", 1), asker("b", 2)]) == 1
    assert asked == ["a"]
    assert await first_answer([asker("hangs", 1, 60), asker("answers", 2)]) == 2
    assert await first_answer([asker("fails", Unavailable("no")), asker("answers", 3)]) == 3
    assert await first_answer([asker("slow", 4, 0.2), asker("slower", 5, 60)]) == 4
    with pytest.raises(DeadlineExceeded, match="last"):
        await first_answer([asker("a", Unavailable("first")), asker("b", DeadlineExceeded("last"))])
    trimmed = Trimmed(GLSN(1), GLSN(2), "t")
    asked.clear()
    with pytest.raises(Trimmed):
        await first_answer([asker("a", trimmed), asker("b", 1)], final=(Trimmed,))
    assert asked == ["a"]
    with pytest.raises(Unavailable):
        await first_answer([])
    with pytest.raises(ZeroDivisionError):
        await first_answer([asker("bug", ZeroDivisionError())])


async def test_replicas_that_fail_together_with_the_first_answer_leave_no_error_behind() -> None:
    reported: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
    both = asyncio.Event()

    async def answer() -> int:
        await both.wait()
        return 1

    async def fail() -> int:
        await both.wait()
        raise Unavailable("no")

    for askers in ([answer, fail], [fail, answer]):
        both.clear()
        asking = asyncio.create_task(first_answer(askers))
        await asyncio.sleep(0.2)
        both.set()
        assert await asking == 1
    del asking
    gc.collect()
    await asyncio.sleep(0)
    assert not reported


async def test_waiting_ends_when_the_node_is_left_out() -> None:
    cluster = Cluster()

    async def wait(node: StorageNodeId, seconds: float) -> str:
        async with watched(cluster.catalogs, cluster.nodes, STREAM, node):
            await asyncio.sleep(seconds)
            return "answered"

    assert await wait(ONE, 0.01) == "answered"
    assert not cluster.blamed
    assert await wait(ONE, 0.3) == "answered", "it is slow, but a member"
    assert cluster.blamed
    assert cluster.asked
    hanging = asyncio.create_task(wait(ONE, 60))
    await asyncio.sleep(0.15)
    cluster.change(epoch=Epoch(4), chain=(TWO,))
    with pytest.raises(Unavailable, match="goes on without it"):
        await hanging
    cancelled = asyncio.create_task(wait(TWO, 60))
    await asyncio.sleep(0.15)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(TimeoutError):
        async with watched(cluster.catalogs, cluster.nodes, STREAM, TWO):
            raise TimeoutError
    await cluster.catalogs.close()
