"""Counters of a metadata node, for operators. Plain numbers; presenting them is left to others."""

from __future__ import annotations

from cutwater.core.order.decisions import Cut, Decision


class MetadataCounters:
    """Counts since the process started."""

    def __init__(self) -> None:
        self.cuts = 0
        self.ticks = 0
        self.decisions = 0
        self.records = 0
        self.store_writes = 0
        self.store_seconds = 0.0
        self.reports = 0
        self.relayed = 0
        self.requests = 0
        self.refused = 0
        self.fenced = 0
        self.alarms = 0
        self.terms = 0

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
