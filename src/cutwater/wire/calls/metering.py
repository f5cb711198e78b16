"""What a connection asks of the meter of its client, if the client is under a quota.

Servers make meters (``access.quota_meter``). A connection of a client without a quota has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec import structs

from cutwater.protocol.methods import Payload

if TYPE_CHECKING:
    from cutwater.wire.calls.incoming_calls import Call


class CallMeter(Protocol):
    """Lets calls begin at the rate of the quotas, and counts what is sent."""

    answer_bytes_max: int
    """The size that one part of an answer should have at most, so that a quota is used evenly."""

    def enter(self, call: Call[Any], begin: Callable[[], None], *, brings_data: bool) -> None:
        """Call ``begin``, at once or after a moment, or fail the call. Calls that bring data begin in order."""
        ...

    async def enter_stream(self, call: Call[Any]) -> None:
        """Return when a stream may begin, or raise."""
        ...

    def takes_notice(self, size: int) -> bool:
        """Count a notice of this size. Returns whether it may be handled."""
        ...

    def sent(self, size: int) -> None:
        """Count an answer."""
        ...

    async def pay_item(self, size: int) -> None:
        """Return when an item of a stream may be sent."""
        ...


def size_of(body: Payload) -> int:
    if isinstance(body, list | tuple):
        return sum(memoryview(piece).nbytes for piece in body)
    return memoryview(cast(bytes, body)).nbytes


def with_answer_limit(argument: Any, bytes_max: int) -> Any:
    """Ask for less at a time, if the argument asks for more."""
    return argument if argument.bytes_max <= bytes_max else structs.replace(argument, bytes_max=bytes_max)
