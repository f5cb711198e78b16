"""The faults of a simulated disk: which there are, and when they strike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random

from msgspec import Struct


class DiskFault(StrEnum):
    READ_ERROR = "read error"
    """A read, or listing a directory, fails (EIO)."""
    FLIPPED_READ = "flipped read"
    """A read returns one wrong bit. The next one may be right."""
    STALE_READ = "stale read"
    """A read returns what was there before one of the last writes."""
    MISDIRECTED_READ = "misdirected read"
    """A read returns what is in another place of the file."""
    WRITE_ERROR = "write error"
    """A write or a change of a name fails (EIO). A part of the write may be done."""
    FULL = "full"
    """A write or a new name fails (ENOSPC). A part of the write may be done."""
    MISDIRECTED_WRITE = "misdirected write"
    """The disk puts a write in another place, of this file or another one, and reports success.

    The cache of the operating system hides it until ``evict`` or a crash.
    """
    SYNC_ERROR = "sync error"
    """A sync fails (EIO). Some of the writes are lost, and the system takes all of them for written."""
    SLOW_SYNC = "slow sync"
    """A sync takes some seconds more. What it covers is durable at its end."""
    HUNG_SYNC = "hung sync"
    """The same, but for minutes."""
    FLIP_AT_REST = "flip at rest"
    """When a file is synced, one of its bits on the disk changes for good."""


SECONDS = {DiskFault.SLOW_SYNC: (0.005, 2.0), DiskFault.HUNG_SYNC: (60.0, 600.0)}
"""How long syncs take, unless a rule says otherwise."""


class DiskFaultRule(Struct, frozen=True):
    """A fault that strikes paths that match ``pattern`` (as in a shell; ``*`` also matches slashes)."""

    fault: DiskFault
    probability: float
    pattern: str = "*"
    seconds: tuple[float, float] | None = None
    """Least and most seconds that a slow or hung sync takes."""


class ProcessDied(BaseException):
    """The process was killed during a file operation.

    It is no ``Exception``, so that the code of the process does not handle it. Every later operation raises it again,
    in ``finally`` blocks for example, until the disk is used by the next process.
    """


class DiskFaults:
    """Decides which operations are struck. The random number generator is used only where a rule matches."""

    def __init__(self, rng: Random, rules: Iterable[DiskFaultRule] = ()) -> None:
        self.rng = rng
        self.struck: Counter[tuple[DiskFault, str]] = Counter()
        """How often each fault struck each operation."""
        self._rules: dict[DiskFault, list[DiskFaultRule]] = {}
        for rule in rules:
            self.add(rule)

    @property
    def rules(self) -> list[DiskFaultRule]:
        return [rule for rules in self._rules.values() for rule in rules]

    def add(self, rule: DiskFaultRule) -> None:
        self._rules.setdefault(rule.fault, []).append(rule)

    def clear(self) -> None:
        """Remove all rules."""
        self._rules.clear()

    def has(self, fault: DiskFault) -> bool:
        return fault in self._rules

    def strikes(self, fault: DiskFault, operation: str, path: Path | str) -> bool:
        return self._striking(fault, operation, path) is not None

    def seconds(self, operation: str, path: Path | str) -> float:
        """Return how many more seconds a sync takes."""
        total = 0.0
        for fault, usual in SECONDS.items():
            rule = self._striking(fault, operation, path)
            if rule is not None:
                total += self.rng.uniform(*(rule.seconds or usual))
        return total

    def _striking(self, fault: DiskFault, operation: str, path: Path | str) -> DiskFaultRule | None:
        for rule in self._rules.get(fault, ()):
            if fnmatchcase(str(path), rule.pattern) and self.rng.random() < rule.probability:
                self.struck[fault, operation] += 1
                return rule
        return None
