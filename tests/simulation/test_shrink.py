"""A failing run is reduced to what it needs, and the printed command replays it. A soak says what it has tested."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from cutwater.testing import simulate as command
from cutwater.testing import soak as campaign
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.options import PROFILES, ShippedOptions, changed
from cutwater.testing.virtual.shrink import shrink
from cutwater.testing.virtual.simulation import ShippedResult, ShippedSimulation

GUARANTEE = "3 durable"


def outcome(seed: int, options: ShippedOptions, guarantee: str | None) -> ShippedResult:
    violation = None if guarantee is None else f"{guarantee}: planted here"
    return ShippedResult(seed, options, "", 0, violation, guarantee, {}, 0, 0, 0, 0, 0.0)


def test_only_what_a_violation_needs_is_left() -> None:
    def run(seed: int, options: ShippedOptions) -> ShippedResult:
        needed = options.kill_every and options.reset_every and options.storage_nodes >= 2 and options.seconds >= 1
        return outcome(seed, options, GUARANTEE if needed else None)

    storm = structs.replace(PROFILES["storm"](1), kill_every=0.7, reset_every=0.3)
    found = shrink(run(1, storm), run)
    options = found.result.options
    left = {name for name in options.faults() if name.endswith("_every") or name.endswith("failure")}
    assert left == {"kill_every", "reset_every"}
    assert (options.storage_nodes, options.appenders, options.producers) == (2, 0, 0)
    assert 1 <= options.seconds < 2


def test_a_violation_of_another_guarantee_is_another_fault() -> None:
    def run(seed: int, options: ShippedOptions) -> ShippedResult:
        return outcome(seed, options, GUARANTEE if options.kill_every else "15 liveness")

    found = shrink(run(1, ShippedOptions(kill_every=1.0, pause_every=1.0)), run)
    assert found.result.guarantee == GUARANTEE
    assert (found.result.options.kill_every, found.result.options.pause_every) == (1.0, 0.0)


def test_it_ends_although_every_run_fails() -> None:
    found = shrink(outcome(1, PROFILES["storm"](1), GUARANTEE), lambda s, o: outcome(s, o, GUARANTEE), 40)
    assert found.runs <= 40


def test_the_printed_command_replays_the_reduced_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A violation is planted that only needs one power cut, in real runs."""

    def broken(self: ShippedSimulation) -> None:
        if self.nemesis.struck.get("cut power"):
            raise Violation(GUARANTEE, "planted here")

    monkeypatch.setattr(ShippedSimulation, "_inspect", broken)
    monkeypatch.setattr(command, "shrink", partial(shrink, runs_max=8))
    sets = ["--set", "power_every=0.2", "--set", "seconds=1", "--set", "reset_every=1", "--set", "subscribers=0"]
    assert command.main(["--seed", "1", "--profile", "quiet", "--shrink", *sets]) == 1
    out = capsys.readouterr().out
    replay = re.findall(r'^replay it: make simulate SEED=(\d+) PROFILE=quiet ARGS="(.*)"$', out, re.MULTILINE)
    assert len(replay) == 2, out
    assert replay[0] == ("1", " ".join(sets)), "the run as it was given"
    seed, arguments = replay[1]
    assert "power_every" in arguments
    assert "reset_every" not in arguments
    assert "loses its power" in out or "power" in out.split("what happened")[1]
    assert command.main(["--seed", seed, "--profile", "quiet", *arguments.split()]) == 1
    assert "planted here" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "said"), [("sconds=3", "no option 'sconds'"), ("seconds=long", "Expected `float`")])
def test_wrong_changes_are_refused(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        changed(ShippedOptions(), [change])


def test_a_soak_lists_failing_seeds_and_what_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulate(seed: int, options: ShippedOptions) -> ShippedResult:
        result = outcome(seed, options, GUARANTEE if seed == 7 else None)
        return structs.replace(result, appends={"ok": 2}, struck={"kill": 1}, operations={"append": 2})

    monkeypatch.setattr(campaign, "simulate_shipped", simulate)
    failed = tmp_path / "failed.txt"
    assert campaign.main(["--hours", "0.0001", "--first", "5", "--jobs", "1", "--failed", str(failed)]) == 1
    out = capsys.readouterr().out
    assert failed.read_text().startswith(f"make simulate SEED=7 PROFILE=random  # {GUARANTEE}")
    assert re.search(r"\d+ histories in 0\.00 h: [\d,]+ an hour", out)
    assert out.splitlines()[-1].startswith("kill")


def test_pairs_that_never_met_are_shown_as_zero() -> None:
    table = campaign.coverage(Counter({("kill", "append"): 3, ("pause", "read"): 1}))
    assert table[-2:] == ["kill        3     0", "pause       0     1"]
