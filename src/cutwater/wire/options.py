"""Every limit of the wire, with its unit last in its name. Exceeding a limit gives an error that says so."""

from __future__ import annotations

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.protocol.errors import HEADER_BYTES_MIN

KIB = 1024
MIB = 1024 * KIB


class WireOptions(Struct, frozen=True, kw_only=True):
    """Limits of one connection, in size and time.

    Each side has its own limits and tells the peer those that concern it, so an honest peer never sends what would be
    refused.
    """

    frame_bytes_max: int = 16 * MIB
    """Size of one message, header and body."""
    header_bytes_max: int = MIB
    """Size of the structured part of one message. Bulk data belongs into the body."""
    handshake_bytes_max: int = 16 * KIB
    """Size of a message before the handshake is done."""
    handshake_ms_max: int = 10_000

    calls_max: int = 1_024
    """Requests and streams of the peer that are served at the same time."""
    call_bytes_max: int = 64 * MIB
    """Bytes of those requests."""
    retry_ms: int = 50
    """How long a refused peer is told to wait."""

    send_high_bytes: int = MIB
    send_low_bytes: int = 256 * KIB
    """Above the first, streams pause, and nothing is read from a peer that only asks. Below the second, both resume."""
    send_bytes_max: int = 128 * MIB
    """A peer that lets more than this pile up is disconnected. Beyond half of it, requests and notices are refused."""

    ping_ms: int = 10_000
    """A peer that is silent for this long is asked whether it is there, and given up after another interval."""
    frame_ms_max: int = 60_000
    """How long one message may take to arrive."""
    stall_ms_max: int = 600_000
    """How long a stream waits for a receiver that takes no items."""
    linger_ms_max: int = 1_000
    """How long a failed connection stays open, so that the peer can read the reason."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidArgument(f"wire option {name} must be at least 1, not {getattr(self, name)}")
        if min(self.header_bytes_max, self.handshake_bytes_max) < HEADER_BYTES_MIN:
            raise InvalidArgument(f"header_bytes_max and handshake_bytes_max must be at least {HEADER_BYTES_MIN}")
        if self.header_bytes_max > self.frame_bytes_max:
            raise InvalidArgument("header_bytes_max must not exceed frame_bytes_max: a frame contains its header")
        if self.frame_bytes_max > self.call_bytes_max:
            raise InvalidArgument("call_bytes_max must be at least frame_bytes_max, or large requests never pass")
        if self.frame_bytes_max >= 2**32:
            raise InvalidArgument("frame_bytes_max must be below 4 GiB: lengths have 32 bits")
        if self.send_low_bytes > self.send_high_bytes or self.send_high_bytes > self.send_bytes_max:
            raise InvalidArgument("send_low_bytes ≤ send_high_bytes ≤ send_bytes_max must hold")


class ListenerOptions(Struct, frozen=True, kw_only=True):
    """Limits of all connections of one listener together.

    A process needs a file descriptor for each of ``connections_max``, ``server_connections_reserved``,
    ``handshakes_max`` and ``refusals_max``.
    """

    connections_max: int = 1_024
    """Connections whose handshake is done."""
    server_connections_reserved: int = 128
    """Further connections that only servers of the cluster may take."""
    connections_per_address_max: int = 256
    other_connections_reserved: int = 128
    """The last places of ``connections_max``. An address with ``connections_per_address_max`` connections cannot take
    these, but may take others.
    """
    handshakes_max: int = 512
    """Connections whose handshake is not done. One more replaces the oldest of the address that has most."""
    handshakes_per_address_max: int = 256
    """The same for one address. One more replaces the oldest connection of this address."""
    handshake_ms_max: int = 5_000
    """Time from accepting a connection to the end of its handshake, TLS included."""
    refusals_max: int = 64
    """Dropped connections that are told why at the same time. Further ones are closed without a reply."""
    bytes_max: int = 512 * MIB
    """Bytes of requests that are being received or served, and of notices that are being received."""
    retry_ms: int = 1_000
    backlog: int = 1_024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            least = 0 if name.endswith("_reserved") else 1
            if getattr(self, name) < least:
                raise InvalidArgument(f"listener option {name} must be at least {least}, not {getattr(self, name)}")


class Budget:
    """A number of bytes that several connections share."""

    __slots__ = ("bytes_max", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes. Returns False if there is no room."""
        if self.used + size > self.bytes_max:
            return False
        self.used += size
        return True

    def give_back(self, size: int) -> None:
        assert self.used >= size
        self.used -= size
