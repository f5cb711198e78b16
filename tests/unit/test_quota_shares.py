"""Shares of quotas: random servers, demands, losses and leaders against one rule: shares never exceed a quota."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from cutwater.core.access.demand import MEMORY_SECONDS, Demand
from cutwater.core.access.quota_shares import (
    RATE_UNIT,
    QuotaAnswer,
    QuotaQuestion,
    QuotaShares,
    QuotaUse,
    fair_shares,
    wanted_share,
)
from cutwater.core.access.quotas import QuotaLimits
from cutwater.core.access.rate_bucket import BURST_SECONDS, RateBucket

LEASE = 10.0
ANN = "ann"
RATE, STOCK = "requests_per_s", "connections"
QUOTAS = {ANN: QuotaLimits(requests_per_s=100, connections=7)}
UNITS = {RATE: 100 * RATE_UNIT, STOCK: 7}


class Server(Struct, eq=False):
    """Does what ``access.quota_control`` does: one question at a time, and shares that end with the lease."""

    name: int
    session: int
    number: int = 0
    term: int = 0
    shares: dict[str, int] = {}
    valid_until: float = 0.0
    wants: dict[str, int] = {}
    held: int = 0
    """What it has of the limit that is held."""

    def question(self, now: float) -> QuotaQuestion:
        self.expire(now)
        self.number += 1
        uses = tuple(
            QuotaUse(ANN, limit, self.shares.get(limit, 0), wanted, self.held if limit == STOCK else 0)
            for limit, wanted in self.wants.items()
        )
        self.shares = {limit: share for limit, share in self.shares.items() if limit in self.wants}
        return QuotaQuestion(self.session, self.number, self.term, uses)

    def take(self, answer: QuotaAnswer, sent: float) -> None:
        self.term = answer.term
        told = {share.limit: share.share for share in answer.shares}
        self.shares = {limit: told.get(limit, 0) for limit in self.wants}
        self.valid_until = sent + LEASE

    def expire(self, now: float) -> None:
        if now >= self.valid_until:
            # What a server holds that is cut off for so long is beyond the quota, if others get its share.
            self.shares, self.held = {}, 0


class Late(Struct):
    """A question that arrives after its server gave it up."""

    server: Server
    question: QuotaQuestion


class Cluster:
    """Servers and their leader. A new leader knows nothing of what its predecessor answered."""

    def __init__(self, random: Random) -> None:
        self.random, self.now = random, 0.0
        self.servers = [Server(name, 1) for name in range(random.randint(1, 4))]
        self.leader: QuotaShares[int] = QuotaShares(LEASE, -LEASE, 1)
        self.late: list[Late] = []
        self.sessions = self.terms = 1

    def check(self) -> None:
        for limit, units in UNITS.items():
            for server in self.servers:
                server.expire(self.now)
            held = sum(server.held for server in self.servers) if limit == STOCK else 0
            total = sum(server.shares.get(limit, 0) for server in self.servers)
            assert max(total, held) <= units, (limit, self.servers)

    def step(self) -> None:
        random = self.random
        self.now += random.choice((0.0, 0.1, 0.5, 1.0, 3.0, 11.0) if random.random() < 0.3 else (0.1,))
        server = random.choice(self.servers)
        server.expire(self.now)
        if (share := server.shares.get(STOCK, 0)) > server.held and random.random() < 0.5:
            server.held = random.randint(server.held, share)
        elif random.random() < 0.2:
            server.held = random.randint(0, server.held)
        match random.randrange(12):
            case 0:
                server.wants = {limit: random.randint(0, 2 * units) for limit, units in UNITS.items()}
            case 1:
                server.wants, server.held = {}, 0
            case 2:
                self.servers.append(Server(max(one.name for one in self.servers) + 1, self.sessions))
            case 3:
                # It starts again, and does not know its shares.
                self.sessions += 1
                self.servers[self.servers.index(server)] = Server(server.name, self.sessions)
            case 4:
                self.terms += 1
                self.leader = QuotaShares(LEASE, self.now, self.terms)
            case 5:
                self.late.append(Late(server, server.question(self.now)))
            case 6 if self.late:
                late = self.late.pop()
                self.answer(late.question, late.server.name)
            case 7:
                # The answer is lost.
                self.answer(server.question(self.now), server.name)
            case _:
                sent, question = self.now, server.question(self.now)
                if random.random() < 0.3:
                    # Its first answer is lost, and it repeats the question, through another metadata node.
                    self.answer(question, server.name)
                    self.now += 1.0
                    other = random.choice(self.servers)
                    if other is not server:
                        other.take(self.answer(other.question(self.now), other.name), self.now)
                self.now += random.choice((0.0, 0.01))
                server.take(self.answer(question, server.name), sent)
        self.check()

    def answer(self, question: QuotaQuestion, name: int) -> QuotaAnswer:
        return self.leader.answer(name, question, QUOTAS, [one.name for one in self.servers], self.now)


@pytest.mark.parametrize("seed", range(150))
def test_shares_in_use_never_exceed_the_quota(seed: int) -> None:
    cluster = Cluster(Random(seed))
    for _ in range(150):
        cluster.step()


def settle(wants: list[int], rounds: int = 6, limit: str = STOCK) -> list[int]:
    """Return the shares of servers that want so much for a while."""
    leader: QuotaShares[int] = QuotaShares(LEASE, -LEASE, 1)
    servers = [Server(name, 1, wants={limit: wanted}) for name, wanted in enumerate(wants)]
    for at in range(rounds):
        for server in servers:
            server.take(leader.answer(server.name, server.question(at), QUOTAS, [], at), at)
    return [server.shares[limit] for server in servers]


def test_shares_follow_demand() -> None:
    assert settle([200_000], limit=RATE) == [100_000], "one server alone gets everything that it wants"
    assert settle([200_000, 200_000], limit=RATE) == [50_000, 50_000]
    busy, quiet = settle([200_000, 10_000], limit=RATE)
    assert quiet >= 12_500, "it has some headroom"
    assert busy >= 85_000
    assert settle([7, 0, 0])[0] == 7
    assert sum(settle([7, 7, 7])) >= 6


def test_what_is_used_is_told_as_long_as_servers_ask() -> None:
    leader: QuotaShares[int] = QuotaShares(LEASE, -LEASE, 1)
    for server, at in ((1, 0.0), (2, 5.0)):
        uses = QuotaUse(ANN, RATE, 0, 90_000, used=30_400), QuotaUse(ANN, STOCK, 0, 5, held=2)
        leader.answer(server, QuotaQuestion(1, 1, 1, uses), QUOTAS, [], at)
    assert (leader.used(ANN, RATE, 5.0), leader.used(ANN, STOCK, 5.0)) == (61, 4)
    assert (leader.used(ANN, RATE, 12.0), leader.used(ANN, STOCK, 12.0)) == (30, 2), "server 1 does not ask any more"
    assert leader.used("bob", RATE, 5.0) == 0


def test_a_new_leader_confirms_shares_and_enlarges_none_before_all_have_asked() -> None:
    old: QuotaShares[int] = QuotaShares(LEASE, -LEASE, 1)
    one, two = Server(1, 1, wants={RATE: 80_000}), Server(2, 1, wants={RATE: 80_000})
    for server in (one, two, one, two, one, two):
        server.take(old.answer(server.name, server.question(0), QUOTAS, [], 0), 0)
    held = one.shares[RATE]
    assert (held, two.shares[RATE]) == (50_000, 50_000)
    new: QuotaShares[int] = QuotaShares(LEASE, 1.0, 2)
    one.wants = {RATE: 100_000}

    def ask(server: Server, at: float) -> int:
        server.take(new.answer(server.name, server.question(at), QUOTAS, [1, 2], at), at)
        return server.shares.get(RATE, 0)

    assert [ask(one, 1.0), ask(one, 1.1)] == [held, held], "server 2 may have the rest"
    two.wants = {}
    ask(two, 1.2)
    assert ask(one, 1.3) == held, "the question of server 2 may have been an old one"
    ask(two, 1.4)
    assert ask(one, 1.5) == 100_000
    # A server that never asks counts until its lease must be over.
    new.begin(20.0, 3)
    three = Server(3, 1, wants={RATE: 1_000})
    assert [ask(three, at) for at in (21.0, 22.0, 29.9)] == [0, 0, 0]
    assert ask(three, 30.0) >= 1_000


def test_a_late_question_of_an_earlier_term_says_nothing() -> None:
    leader: QuotaShares[int] = QuotaShares(LEASE, 0.0, 2)
    one, two = Server(1, 1, term=1, wants={RATE: 10}), Server(2, 1, term=1, wants={RATE: 100_000})
    late = one.question(0.0)
    # Meanwhile the earlier leader has given it everything.
    one.shares, one.valid_until = {RATE: 100_000}, LEASE
    leader.answer(1, late, QUOTAS, [1, 2], 0.1)
    for at in (0.2, 0.3):
        two.take(leader.answer(2, two.question(at), QUOTAS, [1, 2], at), at)
    assert two.shares == {RATE: 0}


@given(st.integers(0, 10**9), st.dictionaries(st.integers(), st.integers(0, 10**9), min_size=1, max_size=8))
def test_a_division_is_fair(quota: int, wants: dict[int, int]) -> None:
    shares = fair_shares(quota, wants)
    assert sum(shares.values()) <= quota
    assert all(share <= wants[server] for server, share in shares.items())
    assert sum(wants.values()) > quota or shares == wants
    cut = [share for server, share in shares.items() if share < wants[server]]
    assert all(share >= max(shares.values()) - 1 for share in cut), "nobody is cut while another one has more"
    assert sum(wanted_share(quota, wants, server, is_rate=True) for server in wants) <= quota


# The bucket of one server.


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 500)), min_size=1, max_size=80), st.integers(1, 1_000))
def test_what_passes_is_bounded_by_the_rate_a_burst_and_the_last_request(
    arrivals: list[tuple[float, int]], rate: int
) -> None:
    bucket, now, passed, last = RateBucket(0.0), 0.0, 0, 0
    bucket.set_rate(rate, now)
    for pause, amount in arrivals:
        now += pause
        if bucket.may_pass(now):
            bucket.take(amount, now)
            passed, last = passed + amount, amount
        assert passed - last <= rate * (now + BURST_SECONDS) + 1e-6


def test_a_request_larger_than_the_quota_passes_and_is_paid_for() -> None:
    bucket = RateBucket(0.0)
    assert not bucket.may_pass(100.0), "nothing passes without a share"
    bucket.set_rate(10, 100.0)
    assert bucket.may_pass(100.0)
    bucket.take(500, 100.0)
    assert bucket.wait_seconds(0, 100.0) == pytest.approx(50.0)
    assert bucket.wait_seconds(20, 100.0) == pytest.approx(52.0)
    assert not bucket.may_pass(149.0)
    assert bucket.may_pass(150.1)


def test_a_clock_that_jumps_neither_fills_nor_empties_it() -> None:
    bucket = RateBucket(100.0)
    bucket.set_rate(10, 100.0)
    bucket.take(10, 100.0)
    assert bucket.wait_seconds(0, 40.0) == pytest.approx(1.0)
    assert bucket.wait_seconds(0, 100.0) == pytest.approx(1.0)
    assert bucket.may_pass(1e9)
    bucket.take(10 * BURST_SECONDS, 1e9)
    assert bucket.may_pass(1e9)
    bucket.take(1, 1e9)
    assert not bucket.may_pass(1e9), "a jump ahead gives no more than a burst"


# The demand at one server.


def demand_of(lump: float, every: float, seconds: float) -> list[float]:
    """Return the estimates, ten in a second, of a server that is sent a lump from time to time."""
    demand, found, due = Demand(), [], 0.0
    for tick in range(int(seconds * 10)):
        now = 100 + tick / 10
        if now >= 100 + due:
            demand.note(lump, now)
            due += every
        found.append(demand.rate(now))
    return found


@pytest.mark.parametrize("every", [0.1, 0.5, 1.0, 2.5])
def test_the_demand_of_lumps_is_known_soon_and_does_not_swing(every: float) -> None:
    rate = 400.0
    found = demand_of(rate * every, every, 20.0)
    after = found[50:]
    assert all(0.7 * rate <= one <= 1.6 * rate for one in after), (min(after), max(after))


def test_demand_that_ends_is_given_up_within_seconds() -> None:
    demand = Demand()
    for tick in range(200):
        demand.note(10.0, tick / 10)
    assert demand.rate(20.0) == pytest.approx(100.0, rel=0.05)
    assert demand.rate(21.0) <= 60.0
    assert demand.rate(23.0) <= 20.0
    # A lump after a long time is no demand of ten times its size.
    demand.note(100.0, 20.0 + 10 * MEMORY_SECONDS)
    assert demand.rate(20.1 + 10 * MEMORY_SECONDS) <= 100.0


def test_demand_that_grows_tenfold_is_seen() -> None:
    demand = Demand()
    for tick in range(100):
        demand.note(1.0, tick / 10)
    for tick in range(100, 200):
        demand.note(10.0, tick / 10)
    assert 75.0 <= demand.rate(20.0) <= 100.0


def test_a_clock_that_goes_back_does_no_harm() -> None:
    demand = Demand()
    demand.note(100.0, 50.0)
    demand.note(100.0, 10.0)
    assert 0 < demand.rate(10.0) <= 200.0
