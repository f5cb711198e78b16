"""Places for what takes long: some in all, and fewer for one caller, so that no caller keeps the others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from cutwater.service.http.http_problems import HttpRefusal


class Places:
    """Places for ``what``, such as "streams". Callers are told apart by their tokens; those without one are not."""

    def __init__(self, what: str, most: int, most_of_caller: int) -> None:
        self._what, self._most, self._most_of_caller = what, most, most_of_caller
        self._of: Counter[str] = Counter()
        self.taken = 0

    @contextmanager
    def one(self, token: str) -> Iterator[None]:
        """Hold a place during this context."""
        if self.taken >= self._most:
            raise self._full(f"{self._most} {self._what} are under way already: try later")
        if token and self._of[token] >= self._most_of_caller:
            raise self._full(f"{self._most_of_caller} {self._what} of this caller are under way: end one, or try later")
        self.taken += 1
        self._of[token] += 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of[token] -= 1
            if not self._of[token]:
                del self._of[token]

    def _full(self, detail: str) -> HttpRefusal:
        return HttpRefusal(429, f"too_many_{self._what}", detail)
