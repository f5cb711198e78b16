"""Questions that only an agent can answer: answers within a while, or the advice to ask again.

The service remembers nothing of a question. The leader does: the same question of the same caller is the same errand,
as long as it is asked again soon enough.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from cutwater.errors import NotAnswered
from cutwater.service.routes import AnswerWith, StillWorking

A = TypeVar("A")

WAIT_SECONDS = 20
WAIT_SECONDS_MAX = 60
ROUTE_SECONDS = WAIT_SECONDS_MAX + 10.0
Wait = Annotated[
    int, Meta(ge=1, le=WAIT_SECONDS_MAX, description="How many seconds the request waits for the answer of an agent.")
]


class WaitQuery(Struct, frozen=True, forbid_unknown_fields=True):
    wait: Wait = WAIT_SECONDS


async def answered(found: Awaitable[A], view: Callable[[A], Any] = lambda answer: answer) -> Any:
    """Return what an agent answers, as the API shows it; if it has not answered in time, say that it works on it."""
    try:
        return view(await found)
    except NotAnswered as error:
        return AnswerWith(StillWorking(error.message), 202, {"Retry-After": "1"})
