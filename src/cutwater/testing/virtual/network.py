"""A network in memory for ``VirtualLoop``: streams of bytes between hosts, with everything that TCP does not promise.

A connection is two pipes, one for each direction. A pipe delivers bytes in order, torn at random places, and never
loses or changes one while both ends live: that is what TCP promises. Bytes may take any time. A direction may be cut
for a while or for good. Either end may be reset while the other does not learn of it, and a host that lost its power
says nothing at all. An accepted connection may be one whose answer never reached the client.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from random import Random
from typing import Any

from cutwater.testing.virtual.loop import Callback, VirtualLoop
from cutwater.testing.virtual.processes import SimProcess, current_process
from cutwater.testing.virtual.transport import SimListener, SimSocket, SimTransport

FIRST_PORT = 20_000
SYN_AGAIN_SECONDS = 1.0
"""How long a client's system waits before it repeats an attempt to connect that got no answer."""


class Line:
    """What one host sends to another, over all connections between them."""

    __slots__ = ("bytes_per_second", "delay_seconds_max", "held", "is_cut")

    def __init__(self, delay_seconds_max: float) -> None:
        self.delay_seconds_max = delay_seconds_max
        self.bytes_per_second: float | None = None
        self.is_cut = False
        self.held: list[Callback] = []
        """What arrives when the line is no longer cut."""


class SimNetwork:
    """All hosts and the connections between them. Faults are attributes that a nemesis changes."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        loop.network = self
        self.delay_seconds_max = 0.001
        self.lost_answers = 0.0
        """Share of connections that the server accepts and whose client never hears of it."""
        self.tears = 0.5
        """Share of pieces that are torn at a random byte."""
        self._lines: dict[tuple[str, str], Line] = {}
        self._listeners: dict[tuple[str, int], SimListener] = {}
        self._next_port = FIRST_PORT
        self._dark: set[str] = set()
        """Hosts without power."""
        self.transports: dict[SimTransport, None] = {}
        """All ends that are not lost, in the order in which they were made."""

    # Faults.

    def line(self, source: str, target: str) -> Line:
        line = self._lines.get((source, target))
        if line is None:
            line = self._lines[source, target] = Line(self.delay_seconds_max)
        return line

    def set_delay(self, seconds_max: float) -> None:
        self.delay_seconds_max = seconds_max
        for line in self._lines.values():
            line.delay_seconds_max = seconds_max

    def cut(self, source: str, target: str) -> None:
        self.line(source, target).is_cut = True

    def heal(self, source: str, target: str) -> None:
        """Deliver what was held back since the line was cut."""
        line = self.line(source, target)
        line.is_cut = False
        held, line.held = line.held, []
        for act in held:
            self.loop.call_as(None, act)

    def heal_all(self) -> None:
        self.lost_answers = 0.0
        for (source, target), line in self._lines.items():
            line.bytes_per_second = None
            self.heal(source, target)

    def between(self, one: str, other: str) -> list[SimTransport]:
        """One end of each connection between two hosts."""
        return [end for end in self.transports if end.address[0] == one and end.peer.address[0] == other]

    def break_connection(self, end: SimTransport, *, both: bool) -> None:
        """Reset one end, as a box in the network does. With ``both``, the other learns it too; otherwise it stays
        half-open."""
        end.reset()
        if both:
            self.deliver(end, end.peer.reset)

    def process_ended(self, process: SimProcess) -> None:
        """Do what the system does when a process ends: close its sockets. What it gave the system is still sent, to
        some byte."""
        for end in [end for end in self.transports if end.process is process]:
            end.orphan(self.random)
        self._forget_listeners(process)

    def power_lost(self, process: SimProcess) -> None:
        """Forget the connections of a host without a word to their peers."""
        self._dark.add(process.host)
        for end in [end for end in self.transports if end.process is process]:
            end.vanish()
        self._forget_listeners(process)

    def power_returned(self, host: str) -> None:
        """Answer what peers still send on old connections with resets."""
        if host in self._dark:
            self._dark.discard(host)
            for end in list(self.transports):
                if end.peer.address[0] == host and end.peer.is_gone and end.waits_for_peer:
                    self.deliver(end.peer, end.reset)

    def is_dark(self, host: str) -> bool:
        return host in self._dark

    # What the event loop uses.

    def listen(self, host: str, port: int, backlog: int) -> SimListener:
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        if (host, port) in self._listeners:
            raise OSError(errno.EADDRINUSE, "address already in use")
        listener = self._listeners[host, port] = SimListener(self, host, port, backlog)
        return listener

    def forget(self, listener: SimListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]

    def _forget_listeners(self, process: SimProcess) -> None:
        for listener in [listener for listener in self._listeners.values() if listener.process is process]:
            self.forget(listener)

    async def connect(self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> SimTransport:
        process = current_process()
        source = process.host if process is not None else "127.0.0.1"
        self._next_port += 1
        here = SimTransport(self, (source, self._next_port), process)
        there = SimTransport(self, (host, port), None)
        here.peer, there.peer = there, here
        answered: asyncio.Future[bool] = self.loop.create_future()

        def answer(is_taken: bool) -> None:
            if not answered.done():
                answered.set_result(is_taken)
            elif is_taken:
                # The client has given up: its system resets the connection that it no longer knows.
                self.deliver(here, there.reset)

        def arrive() -> None:
            if self.is_dark(host):
                self.loop.call_as_later(None, SYN_AGAIN_SECONDS, self.deliver, here, arrive)
                return
            listener = self._listeners.get((host, port))
            is_taken = False
            if listener is not None:
                there.process = listener.process
                self.transports[there] = None
                is_taken = listener.offer(SimSocket(there))
                if not is_taken:
                    del self.transports[there]
            if is_taken and self.random.random() < self.lost_answers:
                return
            self.deliver(there, lambda: self.loop.call_as(process, answer, is_taken))

        self.transports[here] = None
        self.deliver(here, arrive)
        try:
            if not await answered:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        except BaseException:
            here.vanish()
            raise
        here.attach(protocol_factory())
        return here

    def deliver(self, sender: SimTransport, act: Callback, size: int = 0) -> None:
        """Do something at the receiver after a delay, or when a cut line is healed."""
        line = sender.line
        if line is None:
            line = sender.line = self.line(sender.address[0], sender.peer.address[0])
        delay = self.random.random() * line.delay_seconds_max
        if line.bytes_per_second is not None:
            delay += size / line.bytes_per_second
        self.loop.call_as_later(None, delay, self._arrive, line, act)

    def _arrive(self, line: Line, act: Callable[[], Any]) -> None:
        if line.is_cut:
            line.held.append(act)
        else:
            act()
