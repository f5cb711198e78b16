"""The operator of windows: like any keyed operator, with a faster way for rows that only add to a window."""

from __future__ import annotations

from cutwater.pipeline.keyed import KeyedOperator, OperatorSpec
from cutwater.pipeline.store import KeyedStore


class WindowOperator(KeyedOperator):
    """Runs a ``WindowFunction``."""

    def __init__(self, spec: OperatorSpec, store: KeyedStore, first: bool = True) -> None:
        super().__init__(spec, store, first)
        self._function.on_late = self._count_late

    def _count_late(self) -> None:
        # A late row changes nothing, so a call that drops one cannot fail after it.
        self.dropped_late += 1
