"""The examples give what they say, in one thread; the demo runs one of them on Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    known = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_fraud(example: Any) -> None:
    result = example("fraud").pipeline().test({"payments": example("shared").rows("payments")})
    found = [(row["user"], row["small"], row["large"]) for row in result["alerts"]]
    assert found == [("user-03", 1.0, 940.0), ("user-07", 0.5, 780.5), ("user-11", 1.2, 1200.0)]
    assert result["big-spenders"]


def test_sessions(example: Any) -> None:
    clicks = example("shared").rows("clicks")
    result = example("sessions").pipeline().test({"clicks": clicks})
    assert len(result["late-clicks"]) == 3
    # A click within the allowed lateness gives a visit once more, so results are at least as many as visits.
    last = {(row["visitor"], row["window_start"]): row["clicks"] for row in result["visits"]}
    assert sum(last.values()) + len(result["late-clicks"]) >= len(clicks)
    assert {row["exit"] for row in result["purchases"]} == {"/pay"}


def test_sensors(example: Any) -> None:
    shared = example("shared")
    places: dict[str, list[dict[str, Any]]] = {"readings": [], "rules": []}
    glsn, rules = 0, shared.rows("rules")
    for i, reading in enumerate(shared.rows("readings")):
        for rule in (rule for rule in rules if rule["after"] == i):
            glsn += 1
            places["rules"].append({"kind": rule["kind"], "above": rule["above"], "_glsn": glsn})
        glsn += 1
        places["readings"].append({**reading, "_glsn": glsn})
    alerts = example("sensors").pipeline().test(places)["sensor-alerts"]
    found = [(row["sensor"], row["state"], row["limit"]) for row in alerts]
    assert found == [("s5", "high", 30.0), ("s5", "normal", 30.0), ("s2", "high", 27.0), ("s2", "normal", 27.0)]
