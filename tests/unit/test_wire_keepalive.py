"""When a peer is asked whether it is there, and when it is given up."""

from __future__ import annotations

from typing import Any

import pytest

from cutwater.wire.keepalive import Keepalive, KeepaliveVerdict

INTERVAL = 10.0
FRAME_MAX = 25.0


def verdicts(*ticks: dict[str, Any]) -> list[KeepaliveVerdict]:
    """One judgement per tick; a tick says what is not as in silence, and ``after`` how long it took."""
    now = 100.0
    keepalive = Keepalive(INTERVAL, FRAME_MAX, now)
    found = []
    for tick in ticks:
        seen: dict[str, Any] = {"heard": False, "unsent": 0, "frames": 0, "is_amid_frame": False} | tick
        now += seen.pop("after", INTERVAL)
        found.append(keepalive.judge(now, **seen))
    return found


SILENT: dict[str, Any] = {}
HEARD = {"heard": True}


def test_a_silent_peer_is_asked_once_and_then_given_up() -> None:
    assert verdicts(HEARD, SILENT, SILENT) == [KeepaliveVerdict.FINE, KeepaliveVerdict.ASK, KeepaliveVerdict.GONE]


def test_a_peer_that_answers_stays() -> None:
    assert verdicts(SILENT, HEARD, SILENT, HEARD) == [
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.FINE,
    ]


def test_a_peer_that_reads_is_there() -> None:
    assert verdicts({"unsent": 9}, {"unsent": 8}, {"unsent": 8}, {"unsent": 8}) == [
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.GONE,
    ]


def test_a_process_that_stood_still_holds_nothing_against_its_peer() -> None:
    """The answer may have come in the meantime and wait to be read."""
    assert verdicts(SILENT, {"after": 60.0}, SILENT, SILENT) == [
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.ASK,
        KeepaliveVerdict.GONE,
    ]


@pytest.mark.parametrize("heard", [True, False])
def test_a_message_that_does_not_end(heard: bool) -> None:
    amid = {"is_amid_frame": True, "frames": 5, "heard": True}
    late = amid | {"heard": heard}
    assert verdicts(amid, amid, amid, late) == [
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.STUCK,
    ]


def test_messages_that_end_may_follow_each_other_without_a_gap() -> None:
    ticks = [{"is_amid_frame": True, "frames": i, "heard": True} for i in range(10)]
    assert set(verdicts(*ticks)) == {KeepaliveVerdict.FINE}


def test_a_process_that_stood_still_gives_a_message_time_again() -> None:
    amid = {"is_amid_frame": True, "frames": 5, "heard": True}
    assert verdicts(amid, amid | {"after": 60.0}, amid, amid, amid)[-2:] == [
        KeepaliveVerdict.FINE,
        KeepaliveVerdict.STUCK,
    ]
