"""Every kind of event has its handler, and every kind of effect someone who carries it out."""

from __future__ import annotations

from typing import Any, get_args
from unittest.mock import Mock

from cutwater.core.replica.events import Barrier, Remove, Reopen, ReplicaEffect, ReplicaEvent
from cutwater.core.replica.replica import Replica
from cutwater.storagenode.replica.replica_driver import ReplicaDriver


def kinds(union: Any) -> set[type]:
    return {kind for one in get_args(union) for kind in (kinds(one) if get_args(one) else {one})}


def test_a_replica_knows_what_to_do_about_every_event() -> None:
    assert set(Replica._table(Mock())) == kinds(ReplicaEvent)


def test_a_driver_carries_out_every_effect_once() -> None:
    at_once = set(ReplicaDriver._table(Mock()))
    apart = {*kinds(Barrier), Reopen, Remove}
    assert at_once | apart == kinds(ReplicaEffect)
    assert not at_once & apart
