"""Readers give up on damage of the only replica, and wait for other replicas if there are any."""

from __future__ import annotations

from types import SimpleNamespace

from cutwater.client.read.point_reads import LastingDamage
from cutwater.client.subscribe.stream_readers import Feed
from cutwater.errors import CutwaterError, Unavailable
from cutwater.format.errors import DamagedEntries
from cutwater.types import LLSN


def damaged() -> CutwaterError:
    return DamagedEntries("entries", LLSN(6), LLSN(6), "the checksum is wrong")


def test_damage_of_the_only_replica_lasts_after_a_second() -> None:
    damage = LastingDamage()
    assert damage.take(damaged(), 1, 10.0) is None
    assert damage.take(damaged(), 1, 10.9) is None
    assert damage.take(Unavailable("gone"), 1, 11.0) is None
    assert damage.take(damaged(), 1, 11.1) is None, "what came between counts"
    lasting = damage.take(damaged(), 1, 12.1)
    assert lasting is not None
    assert lasting.code == "damaged_entries"
    assert "There is no other replica: `cutwater verify`" in str(lasting)


def test_another_replica_may_have_an_intact_copy() -> None:
    damage = LastingDamage()
    assert [damage.take(damaged(), 2, float(now)) for now in range(60)] == [None] * 60


def test_damage_is_named_before_other_reasons_for_silence() -> None:
    failures = {1: damaged(), 2: Unavailable("storage node 2 is down")}
    feed = SimpleNamespace(
        _readers={1: SimpleNamespace(is_cut_off=True, failures=failures)},
        catalogs=SimpleNamespace(view=SimpleNamespace(addresses={1: "a:1", 2: "b:2"})),
    )
    told = vars(Feed)["trouble"].fget(feed)
    assert "1 at a:1, 2 at b:2. One is damaged: entries: the entries of LLSN 6 to 6 are damaged" in told
    assert "`cutwater verify`" in told
