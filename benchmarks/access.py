"""What access control costs: rate and processor time of the same calls with it off and enforced, and TLS by itself.

Three clusters of one storage node and one metadata node run side by side: plain, with TLS, and plain with a thousand
rules. With one replica the servers do least for a record, so the share of the check is largest. Only one cluster has
work at a time. Off and enforced alternate within a cluster, between the same processes and on the same topics, because
equal processes differ by several percent; TLS is the ratio of two clusters.

Processor time is read from the processes' own clocks and does not depend on other load much; the rate does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.clients import Worker, workers
from benchmarks.usage import Busy, Watch
from cutwater.access.access_control import AccessControl
from cutwater.access.access_copy import AccessCopy
from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import (
    ADMIN_TOKEN,
    admin_token,
    node_access,
    owner_access,
)
from cutwater.admin.cluster_security import secure_elsewhere, secure_local
from cutwater.admin.load_test import AppendLoad, append_for, read_for
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.operations import Admin
from cutwater.admin.proven_admin import proven_admin, read_server_key
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.log_directory import METADATA
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.principals import PrincipalGroup
from cutwater.core.access.rights import ResourceKind, ResourcePattern
from cutwater.core.access.rules import Rule
from cutwater.protocol import storage_api
from cutwater.protocol.method_access import STORAGE_NODE_ACCESS
from cutwater.protocol.needs import RunNames
from cutwater.runtime import processes
from cutwater.runtime.event_loop import run
from cutwater.types import GLSN, ClusterId, LogStreamId, Revision, RunId, TopicId
from cutwater.wire.identity.auth import PeerIdentity
from cutwater.wire.identity.handshake import Peer
from cutwater.wire.identity.server_book import ServerBook
from cutwater.wire.messages import PeerLimits

ROUNDS = 10
SECONDS = 0.4
SETTLE_SECONDS = 0.1
"""The servers have handled the change of the mode, and the client knows its topic."""
GOAL, MOST = 1.03, 1.05

PRINCIPAL, RIGHTS, TOPICS = "bench", ("append", "read", "describe"), "bench-"
APPENDED, READ = "bench-appended", "bench-read"
READ_RECORDS, READ_ROWS = 200_000, 1_000
BATCH_ROWS = 100
BATCHES = f"batches of {BATCH_ROWS} records, 16 in flight"
POINT_READERS = 16
POINT_READS = f"point reads, {POINT_READERS} at once"

RULES, GROUPS, GROUPS_OF_PRINCIPAL = 1_000, 200, 20
CHANGES_AT_ONCE = 16

CHECKED = storage_api.ReadArguments(LogStreamId(1), GLSN(1), 1 << 20)
CHECKS, CHECK_ROUNDS = 2_000, 50


class Round(Struct, frozen=True):
    """One case once. ``records`` during ``busy.seconds``."""

    records: int
    busy: Busy

    @property
    def rate(self) -> float:
        return self.records / self.busy.seconds

    @property
    def cpu_us(self) -> float:
        """Processor time of servers and client per record."""
        return self.busy.total().cpu / self.records * 1e6

    @property
    def servers_us(self) -> float:
        spent = self.busy.spent
        return (spent["storage node"].cpu + spent["metadata"].cpu) / self.records * 1e6


# The check by itself.


class _OneTopic:
    """Names as storage nodes know them, of one topic."""

    def __init__(self) -> None:
        self._of_stream = {CHECKED.stream: APPENDED}

    def topic_of_stream(self, stream: LogStreamId) -> str | None:
        return self._of_stream.get(stream)

    def topic_of_number(self, topic: TopicId) -> str | None:
        return None

    def topic_of_part(self, part: str) -> str | None:
        return None

    def run(self, which: RunId | str) -> RunNames | None:
        return None

    def job_of_operation(self, operation: str) -> str | None:
        return None

    def principal_of_token(self, token: str) -> str | None:
        return None

    def conceal_stream(self, stream: LogStreamId) -> None: ...

    def conceal_number(self, topic: TopicId) -> None: ...


def check_us(rules: AccessRules) -> float:
    """Return the time of one check of a read by a server with these rules: the best of many, in this process."""

    async def best() -> float:
        copy = AccessCopy()
        control = AccessControl(copy, ServerBook(), _OneTopic())
        copy.take(rules)
        copy.lease_until = inf
        method = storage_api.READ.name
        access = STORAGE_NODE_ACCESS[method]
        peer = Peer(ClusterId(1), "client", "", 1, PeerLimits(0, 0, 0, 0), PeerIdentity("", PRINCIPAL, is_judged=True))
        found = []
        for _ in range(CHECK_ROUNDS):
            began = time.perf_counter()
            for _ in range(CHECKS):
                control.judge(peer, method, access, CHECKED)
            found.append((time.perf_counter() - began) / CHECKS * 1e6)
        return min(found)

    return run(best())


def _groups() -> list[PrincipalGroup]:
    """Return the groups. The principal is in some of them."""
    own = GROUPS // GROUPS_OF_PRINCIPAL
    return [PrincipalGroup(f"g{at}", (f"other-{at}", *((PRINCIPAL,) if at % own == 0 else ()))) for at in range(GROUPS)]


def _rules(*, are_many: bool) -> list[Rule]:
    """Return the rules. Of many, one gives the principal its rights, as a member of a group."""
    topics = ResourcePattern(ResourceKind.TOPIC, TOPICS, is_prefix=True)
    if not are_many:
        return [Rule(PRINCIPAL, RIGHTS, topics)]
    others = [
        Rule(f"group:g{at % GROUPS}", ("read",), ResourcePattern(ResourceKind.TOPIC, f"t{at}"))
        for at in range(RULES - 1)
    ]
    return [*others, Rule(f"group:g{GROUPS - GROUPS // GROUPS_OF_PRINCIPAL}", RIGHTS, topics)]


# In the client's process.


class Place(Struct, frozen=True):
    """A cluster, as the client's process uses it. ``has_tls``: with the owner's certificate, which clients without a
    token need; a token beside it decides who the client is."""

    servers: str
    folder: str
    pids: dict[str, list[int]]
    has_tls: bool = False

    async def client(self, token: str) -> AsyncClient:
        tls = owner_access(Path(self.folder)).tls if self.has_tls else None
        return await AsyncClient.connect(self.servers, token=token, tls=tls)


async def _append(log: AsyncClient, load: AppendLoad, seconds: float) -> int:
    return (await append_for(log, load, seconds)).records


async def _read_points(log: AsyncClient, seconds: float) -> int:
    """Read single records, spread over the topic. The GLSNs of its records follow each other."""
    first, until, count = (await _first_glsn(log)), time.monotonic() + seconds, 0

    async def one_after_the_other(start: int) -> None:
        nonlocal count
        for at in itertools.count(start, POINT_READERS * 7):
            if time.monotonic() >= until:
                return
            await log.read(first + at % READ_RECORDS)
            count += 1

    async with asyncio.TaskGroup() as readers:
        for start in range(POINT_READERS):
            readers.create_task(one_after_the_other(start))
    return count


async def _first_glsn(log: AsyncClient) -> int:
    async with log.subscribe(READ, follow=False) as records:
        async for record in records:
            return int(record.glsn)
    raise AssertionError(f"topic {READ} has no records")


async def _read_batches(log: AsyncClient, seconds: float) -> int:
    """Subscribe from the beginning to the end, again and again."""
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        count += (await read_for(log, READ, True, seconds)).records
    return count


class Case(Struct, frozen=True):
    name: str
    work: Callable[[AsyncClient, float], Awaitable[int]]


def _appending(name: str, rows: int, in_flight: int) -> Case:
    load = AppendLoad(APPENDED, rows, in_flight)
    return Case(name, lambda log, seconds: _append(log, load, seconds))


CASES = {
    case.name: case
    for case in (
        _appending(BATCHES, BATCH_ROWS, 16),
        _appending("96 single appends at once", 0, 96),
        _appending("one append at a time", 0, 1),
        Case(POINT_READS, _read_points),
        Case("subscribe as batches", _read_batches),
    )
}
MANY_RULES_CASES = tuple(CASES)[2:4]
"""Those with one check, or more, for each record."""


def measure_here(place: Place, token: str, name: str, seconds: float) -> Round:
    """Connect, and run the case. Connecting is not measured."""

    async def measured() -> Round:
        async with await place.client(token) as log:
            work = CASES[name].work
            await work(log, SETTLE_SECONDS)
            watch = Watch(place.pids | {"client": [os.getpid()]}, Path(place.folder))
            records = await work(log, seconds)
            return Round(records, watch.stop())

    return run(measured())


# In this process.


class Secured(Struct):
    """A running cluster whose mode can be changed. ``token`` is that of the principal."""

    folder: Path
    cluster: LocalCluster
    place: Place
    token: str
    mode: AccessMode = AccessMode.ENFORCED

    def turn(self, mode: AccessMode) -> None:
        if mode is not self.mode:
            if unconfirmed := run(self._turn(mode)):
                raise RuntimeError(f"{', '.join(unconfirmed)} did not confirm the mode {mode}")
            self.mode = mode

    async def _turn(self, mode: AccessMode) -> tuple[str, ...]:
        """An administrator turns it off, and the holder of a metadata node's key turns it on."""
        addresses = self.cluster.addresses
        if mode is AccessMode.OFF:
            async with Admin(addresses, access=_administrator(self.folder, self.cluster)) as admin:
                return (await admin.control.set_mode(mode)).unconfirmed
        tls = node_access(self.folder, self.cluster.metadata[0].id).tls if self.cluster.has_tls else None
        control = await proven_admin(addresses, read_server_key(_key_file(self.folder)), tls)
        return (await control.set_mode(mode)).unconfirmed


class Way(Struct, eq=False):
    """One of the ways that alternate: a cluster in one mode. While it is off, the client shows no token."""

    cluster: Secured
    mode: AccessMode
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def measure(self, worker: Worker, case: str, seconds: float) -> None:
        self.cluster.turn(self.mode)
        token = self.cluster.token if self.mode is AccessMode.ENFORCED else ""
        found = worker.call(measure_here, self.cluster.place, token, case, seconds)
        self.rounds.setdefault(case, []).append(found)


@contextmanager
def secured(folder: Path, *, has_tls: bool, has_many_rules: bool = False) -> Iterator[Secured]:
    folder.mkdir()
    cluster = local_cluster.start(folder, storage_nodes=1, replication=1, metadata=1, has_tls=has_tls)
    try:
        run(_fill(folder, cluster))
        if has_tls:
            secure_local(folder, mode=AccessMode.ENFORCED)
        else:
            secure_elsewhere(cluster.servers, _key_file(folder), None, folder / ADMIN_TOKEN, mode=AccessMode.ENFORCED)
        pids = {
            "storage node": [node.pid for node in cluster.storage_nodes],
            "metadata": [node.pid for node in cluster.metadata],
        }
        place = Place(cluster.servers, str(folder), pids, has_tls)
        token = run(_give_rights(folder, cluster, has_many_rules=has_many_rules))
        yield Secured(folder, cluster, place, token)
    finally:
        processes.stop([member.pid for member in cluster.processes()], 10.0)


def _key_file(folder: Path) -> Path:
    return folder / f"{METADATA}.key"


def _administrator(folder: Path, cluster: LocalCluster) -> Access:
    return owner_access(folder) if cluster.has_tls else Access(token=admin_token(folder))


async def _fill(folder: Path, cluster: LocalCluster) -> None:
    tls = owner_access(folder).tls if cluster.has_tls else None
    async with await AsyncClient.connect(cluster.servers, tls=tls) as log:
        for topic in (APPENDED, READ):
            await log.create_topic(topic, streams=1, replication=1)
        await append_for(log, AppendLoad(READ, READ_ROWS, 4), 60.0, READ_RECORDS)


async def _give_rights(folder: Path, cluster: LocalCluster, *, has_many_rules: bool) -> str:
    """Give the principal its rights: by one rule, or by that of one of its groups among many. Returns its token."""
    async with Admin(cluster.addresses, timeout_ms=30_000, access=_administrator(folder, cluster)) as admin:
        control = admin.control
        changes: list[Callable[[], Awaitable[object]]] = []
        if has_many_rules:
            changes += [partial(control.create_group, group.name, group.members) for group in _groups()]
        changes += [
            partial(control.allow, rule.subject, rule.rights, str(rule.pattern))
            for rule in _rules(are_many=has_many_rules)
        ]
        for at in range(0, len(changes), CHANGES_AT_ONCE):
            await asyncio.gather(*(change() for change in changes[at : at + CHANGES_AT_ONCE]))
        return (await control.create_token(PRINCIPAL)).token


def in_turn(ways: Sequence[Way], worker: Worker, cases: Sequence[str], rounds: int, seconds: float) -> None:
    """Alternate. A different one begins each time."""
    for first in range(rounds):
        for case in cases:
            for at in range(len(ways)):
                ways[(first + at) % len(ways)].measure(worker, case, seconds)


# The report.


def ratios(one: Sequence[Round], other: Sequence[Round], figure: Callable[[Round], float]) -> list[float]:
    """Return the ratio of each pair of rounds, which ran right after each other."""
    return [figure(a) / figure(b) for a, b in zip(one, other, strict=True)]


def _ratio(one: Sequence[Round], other: Sequence[Round], figure: Callable[[Round], float]) -> float:
    return median(map(figure, one)) / median(map(figure, other))


def _told(one: Sequence[Round], other: Sequence[Round], figure: Callable[[Round], float]) -> str:
    """Return the ratio of the medians, and the middle half of the ratios of pairs."""
    found = sorted(ratios(one, other, figure))
    quarter = len(found) // 4
    return f"{_ratio(one, other, figure):.3f} ({found[quarter]:.2f} to {found[-1 - quarter]:.2f})"


def _rate(rounds: Sequence[Round]) -> str:
    return f"{median(one.rate for one in rounds) / 1e3:.1f}"


def _us(rounds: Sequence[Round], figure: Callable[[Round], float]) -> str:
    return f"{median(map(figure, rounds)):.2f}"


def _cpu(one: Round) -> float:
    return one.cpu_us


def _of_servers(one: Round) -> float:
    return one.servers_us


def _speed(one: Round) -> float:
    return one.rate


def _limit(rounds: Sequence[Round]) -> str:
    return sorted(rounds, key=_speed)[len(rounds) // 2].busy.limit()


def _table(off: Way, enforced: Way) -> Iterator[str]:
    yield (
        "| case | thousand/s off | enforced | µs per record off | enforced | ratio: µs of all | µs of servers | rate "
        "| limit |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for case, theirs in off.rounds.items():
        ours = enforced.rounds[case]
        cells = (
            case,
            _rate(theirs),
            _rate(ours),
            _us(theirs, _cpu),
            _us(ours, _cpu),
            _told(ours, theirs, _cpu),
            _told(ours, theirs, _of_servers),
            _told(ours, theirs, _speed),
            _limit(ours),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _noise(rounds: Sequence[Round]) -> float:
    """Compare every other round with the rest."""
    return _ratio(rounds[::2], rounds[1::2], _cpu)


def _verdict(what: str, off: Way, enforced: Way) -> str:
    found = {case: _ratio(enforced.rounds[case], off.rounds[case], _cpu) for case in off.rounds}
    worst, mean = max(found, key=lambda case: found[case]), sum(found.values()) / len(found)
    noise = max(abs(1 - _noise(rounds)) for rounds in off.rounds.values())
    if found[worst] <= MOST:
        met = "goal met" if found[worst] <= GOAL else "within the limit"
    else:
        met = "undecided, because equal rounds differ by more" if noise > found[worst] - 1 else "**missed**"
    return (
        f"{what}: {mean - 1:+.1%} processor time over all cases, at most {found[worst] - 1:+.1%} ({worst}); goal "
        f"{GOAL - 1:.0%}, at most {MOST - 1:.0%}: {met}. Every other round with access control off differs from "
        f"the rest of these by up to {noise:.1%}."
    )


def _tls_table(plain: Way, tls: Way, both: Way) -> Iterator[str]:
    yield "| case | µs per record, off | off, TLS | TLS alone | TLS and enforced | rate, TLS alone |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for case, base in plain.rounds.items():
        cells = (
            case,
            _us(base, _cpu),
            _us(tls.rounds[case], _cpu),
            _told(tls.rounds[case], base, _cpu),
            _told(both.rounds[case], base, _cpu),
            _told(tls.rounds[case], base, _speed),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def measure(folder: Path, rounds: int, seconds: float) -> list[Way]:
    """Measure at least two rounds. Return the ways: off, enforced, both with TLS, and both with many rules."""
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(secured(folder / "plain", has_tls=False)),
            stack.enter_context(secured(folder / "tls", has_tls=True)),
            stack.enter_context(secured(folder / "many", has_tls=False, has_many_rules=True)),
        ]
        worker = stack.enter_context(workers(1))[0]
        found = [Way(cluster, mode) for cluster in clusters for mode in (AccessMode.OFF, AccessMode.ENFORCED)]
        in_turn(found[:4], worker, tuple(CASES), rounds, seconds)
        in_turn(found[4:], worker, MANY_RULES_CASES, rounds, seconds)
    return found


def lines(rounds: int = ROUNDS, seconds: float = SECONDS) -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    few = AccessRules(Revision(1), mode=AccessMode.ENFORCED, rules=tuple(_rules(are_many=False)))
    few_us = check_us(few)
    many_us = check_us(replace(few, rules=tuple(_rules(are_many=True)), groups=tuple(_groups())))
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-", dir=".") as name:
        off, enforced, tls_off, tls_enforced, many_off, many = measure(Path(name).absolute(), rounds, seconds)
    least = min(
        BATCH_ROWS * median(map(_of_servers, off.rounds[BATCHES])), median(map(_of_servers, off.rounds[POINT_READS]))
    )
    return [
        "## Access control: what it costs",
        "",
        f"One storage node, one metadata node, one client process, records of 100 bytes; {rounds} rounds of each kind "
        f"of {seconds:g} s, taking turns in the same processes. Processor time counts servers and client, per record. "
        "Ratios are of medians, enforced to off; in brackets the middle half of the rounds.",
        "",
        *_table(off, enforced),
        _verdict("Access control", off, enforced),
        "",
        "With TLS in both:",
        "",
        *_table(tls_off, tls_enforced),
        _verdict("Access control with TLS", tls_off, tls_enforced),
        "",
        "TLS by itself, as ratios to neither TLS nor access control:",
        "",
        *_tls_table(off, tls_off, tls_enforced),
        f"With {RULES:,} rules and {GROUPS} groups, {GROUPS_OF_PRINCIPAL} of them with the principal, whose right is "
        "that of a group:",
        "",
        *_table(many_off, many),
        _verdict("Access control with many rules", many_off, many),
        "",
        f"One check alone: {few_us:.2f} µs with one rule, {many_us:.2f} µs with many (the best of {CHECK_ROUNDS} times "
        f"{CHECKS:,}). A batch of {BATCH_ROWS} records has at most one, a point read one, and the "
        f"servers take {least:.0f} µs for the cheaper of them: {few_us / least:.2%}.",
        "",
    ]


if __name__ == "__main__":
    print("\n".join(lines(max(2, int(sys.argv[1])) if len(sys.argv) > 1 else ROUNDS)))
    sys.exit(0)
