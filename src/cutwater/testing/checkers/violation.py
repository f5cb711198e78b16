"""The one error of all checkers."""

from __future__ import annotations


class Violation(Exception):
    """A guarantee does not hold."""

    def __init__(self, guarantee: str, what: str) -> None:
        super().__init__(f"{guarantee}: {what}")
        self.guarantee = guarantee
