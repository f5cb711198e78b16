"""Finds replicas that cannot serve and do not recover by themselves, and logs a message about them.

A damaged replica usually learns from a peer within a second. Without a peer, as with one copy per record, it would
wait silently. This module says what is lost, and what an operator can do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cutwater.protocol.storage_api import DamageStatus
from cutwater.storagenode.node import StorageNode
from cutwater.types import LogStreamId

_log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LOOKS_BEFORE_TOLD = 5
"""A replica that a peer can repair is usually repaired by then."""


def stuck_replicas(node: StorageNode, damage: tuple[DamageStatus, ...]) -> dict[LogStreamId, str]:
    """Return replicas that cannot serve, and why, unless they are being repaired, reopened or learned."""
    at_work = {found.stream for found in damage if not found.trouble}
    at_work |= {
        stream for stream, driver in node.replicas.items() if driver.is_reopening or driver.replica.learner is not None
    }
    untrusted = {
        stream: driver.problem
        for stream, driver in node.replicas.items()
        if not driver.replica.trusted and stream not in at_work
    }
    found = {**node.unreadable, **untrusted}
    return {stream: why for stream, why in sorted(found.items()) if stream not in node.leftovers}


class StuckReplicas:
    """Logs one message about each stuck replica."""

    def __init__(self, node: StorageNode, damage: Callable[[], tuple[DamageStatus, ...]]) -> None:
        self._node, self._damage = node, damage
        self._looks: dict[LogStreamId, int] = {}

    async def watch_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        found = stuck_replicas(self._node, self._damage())
        self._looks = {stream: self._looks.get(stream, 0) + 1 for stream in found}
        for stream, why in found.items():
            if self._looks[stream] == LOOKS_BEFORE_TOLD:
                _log.error(
                    "log stream %s cannot be served here (%s), and no other storage node has offered a copy. If "
                    "another one holds the log stream, start it. If none does, no copy exists: stop this storage node, "
                    "restore the damaged file from a backup and start it again, or delete the topic to give up its "
                    "records",
                    stream,
                    why,
                    extra={"stream": stream},
                )
