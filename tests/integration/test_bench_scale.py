"""The benchmark of scale runs real metadata nodes and virtual storage nodes, here of a tiny size."""

from __future__ import annotations

import pytest

from benchmarks.local_etcd import MISSING
from benchmarks.scale import HEAD, Phases, ScaleFigures, figures_of, row
from cutwater.admin.local_etcd import find_etcd

pytestmark = [
    pytest.mark.skipif(find_etcd() is None, reason=MISSING),
    pytest.mark.timeout(120),
]


def test_cuts_are_made_before_and_after_the_leader_is_killed() -> None:
    (found,) = figures_of([(4, 40)], Phases(idle=0.5, load=1.5, failover_max=30.0))
    assert found.trouble == ""
    assert found.cuts > 0
    assert found.failover > 0.0
    assert found.load_bytes > found.idle_bytes > 0
    assert found.leader_bytes > 0
    columns = HEAD[0].count("|")
    assert row(found).count("|") == columns
    assert row(ScaleFigures(4, 40, trouble="it does not start")).count("|") == columns
