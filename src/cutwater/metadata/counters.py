"""Counters of a metadata node, for operators. ``metrics`` exports them, with their annotations as help texts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from cutwater.core.order.decisions import Cut, Decision


class MetadataCounters(Struct):
    """Counts since the process started."""

    cuts: Annotated[int, "Cuts with records"] = 0
    ticks: Annotated[int, "Cuts without records"] = 0
    decisions: Annotated[int, "Decisions stored"] = 0
    records: Annotated[int, "Records committed"] = 0
    store_writes: Annotated[int, "Writes to the store"] = 0
    store_seconds: Annotated[float, "Seconds that those writes took"] = 0.0
    reports: Annotated[int, "Reports taken in as the leader"] = 0
    relayed: Annotated[int, "Reports and complaints passed on as a follower"] = 0
    requests: Annotated[int, "Requests dealt with as the leader"] = 0
    refused: Annotated[int, "Events that the order layer refused"] = 0
    fenced: Annotated[int, "Writes that the store refused, because another node leads"] = 0
    alarms: Annotated[int, "Things that must not happen"] = 0
    terms: Annotated[int, "Times that this node became the leader"] = 0

    def stored(self, seconds: float, decisions: tuple[Decision, ...]) -> None:
        self.store_writes += 1
        self.store_seconds += seconds
        self.decisions += len(decisions)
        for decision in decisions:
            if isinstance(decision, Cut) and decision.commits:
                self.cuts += 1
                for commit in decision.commits:
                    self.records += commit.context.count
            elif isinstance(decision, Cut):
                self.ticks += 1
