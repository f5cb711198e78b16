"""One leader's memory of nodes and replicas: when each was heard, which replicas stall their streams, which links fail.

Nothing here is decided or stored. A new leader starts with a fresh memory and assumes that every node is well.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from cutwater.types import LLSN, Epoch, Instant, LogStreamId, StorageNodeId

ACCUSED_PEERS_MAX = 1
"""A replica that accuses more peers of one stream than this is more likely to be cut off itself."""


class Backoff:
    """Doubles the wait with every failure."""

    def __init__(self, us_min: int, us_max: int) -> None:
        self._us_min, self._us_max = us_min, us_max
        self._waits: dict[object, tuple[int, int]] = {}

    def fail(self, what: object, now: Instant) -> None:
        if self.waits(what, now):
            return
        until, wait = self._waits.get(what, (0, 0))
        if now.monotonic - until > self._us_max:
            # The last failure was long ago.
            wait = 0
        wait = max(self._us_min, min(wait * 2, self._us_max))
        self._waits[what] = (now.monotonic + wait, wait)

    def waits(self, what: object, now: Instant) -> bool:
        until, _ = self._waits.get(what, (0, 0))
        return now.monotonic < until

    def clear(self, what: object) -> None:
        self._waits.pop(what, None)


Place = tuple[Epoch, LLSN, LLSN]
"""Where a replica that is behind the others was last seen: its epoch, durable end and committed end."""


class Liveness:
    """Tracks which nodes are alive. All times are from the monotonic clock of the leader."""

    def __init__(self, nodes: Iterable[StorageNodeId], now: Instant, *, dead_after_us: int, links: Backoff) -> None:
        self._dead_after_us = dead_after_us
        self._heard = dict.fromkeys(nodes, now.monotonic)
        self._lost: set[StorageNodeId] = set()
        self._behind: dict[tuple[LogStreamId, StorageNodeId], tuple[Place, int]] = {}
        self._accusations: dict[tuple[LogStreamId, StorageNodeId], dict[StorageNodeId, int]] = {}
        self._links = links
        self._woke = now.monotonic

    # Nodes.

    def hear(self, node: StorageNodeId, now: Instant) -> None:
        self._heard[node] = now.monotonic
        self._lost.discard(node)

    def lose(self, node: StorageNodeId, now: Instant) -> None:
        """Mark the node as dead at once, without waiting for its silence. A report brings it back."""
        if node in self._heard:
            self._heard[node] = min(self._heard[node], now.monotonic - self._dead_after_us)
            self._lost.add(node)

    def forget(self, node: StorageNodeId) -> None:
        self._heard.pop(node, None)
        self._lost.discard(node)

    def forget_streams(self, known: Container[LogStreamId]) -> None:
        """Forget streams that no longer exist."""
        self._behind = {key: seen for key, seen in self._behind.items() if key[0] in known}
        self._accusations = {key: accused for key, accused in self._accusations.items() if key[0] in known}

    def silence(self, node: StorageNodeId, now: Instant) -> int | None:
        """Return how long the node has been silent, at most since this leader began. None if the node is unknown."""
        heard = self._heard.get(node)
        return None if heard is None else now.monotonic - heard

    def is_lost(self, node: StorageNodeId) -> bool:
        """Whether the node is dead for another reason than its silence."""
        return node in self._lost

    def is_alive(self, node: StorageNodeId, now: Instant) -> bool:
        silence = self.silence(node, now)
        return silence is not None and silence < self._dead_after_us

    def wake(self, now: Instant) -> None:
        self._woke = now.monotonic

    def notice_sleep(self, now: Instant) -> int:
        """Notice that the leader itself was stopped for a while, and return for how long; 0 if it was short.

        That time does not count as silence of the nodes, whose reports still wait to be read.
        """
        slept = now.monotonic - self._woke
        if slept <= self._dead_after_us // 2:
            return 0
        self._heard = {node: heard + slept for node, heard in self._heard.items()}
        self._behind.clear()
        self._woke = now.monotonic
        return slept

    # Replicas.

    def is_stuck(
        self, stream: LogStreamId, node: StorageNodeId, place: Place, now: Instant, *, is_behind: bool
    ) -> bool:
        """Whether a replica has been behind the others, without moving, for so long that it holds up the stream."""
        key = (stream, node)
        if not is_behind:
            self._behind.pop(key, None)
            return False
        seen = self._behind.get(key)
        if seen is None or seen[0] != place:
            self._behind[key] = (place, now.monotonic)
            return False
        return now.monotonic - seen[1] >= self._dead_after_us

    # Links.

    def accuse(self, stream: LogStreamId, complainer: StorageNodeId, peer: StorageNodeId, now: Instant) -> None:
        """Note that a replica could not pass entries on to a peer. The first accusation is believed. A replica that
        soon accuses another peer too is left out itself."""
        accused = self._accusations.setdefault((stream, complainer), {})
        recent = {node: at for node, at in accused.items() if now.monotonic - at < 4 * self._dead_after_us}
        recent[peer] = now.monotonic
        self._accusations[stream, complainer] = recent
        if len(recent) > ACCUSED_PEERS_MAX:
            for node in recent:
                self._links.clear((stream, node))
            self.avoid(stream, complainer, now)
        else:
            self.avoid(stream, peer, now)

    def avoid(self, stream: LogStreamId, node: StorageNodeId, now: Instant) -> None:
        self._links.fail((stream, node), now)

    def is_avoided(self, stream: LogStreamId, node: StorageNodeId, now: Instant) -> bool:
        return self._links.waits((stream, node), now)

    def pardon(self, stream: LogStreamId, node: StorageNodeId) -> None:
        """Forget failures of a node that was restarted: their cause may be gone."""
        self._links.clear((stream, node))
        self._accusations.pop((stream, node), None)
