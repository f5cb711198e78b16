"""Options of servers that limit connections. Defaults are those of ``ListenerOptions``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from cutwater.cli.framework.command import Bundle
from cutwater.wire.options import ListenerOptions

_PANEL = "Connections"
_DEFAULTS = ListenerOptions()


@dataclass(frozen=True)
class ListenLimits(Bundle):
    """How many connections a server takes, and how long a handshake may last (ADR 0037)."""

    connections_max: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CUTWATER_CONNECTIONS_MAX",
            help="Connections of clients, after the handshake.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.connections_max
    connections_per_address_max: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CUTWATER_CONNECTIONS_PER_ADDRESS_MAX",
            help="Connections from one address; beyond this it must leave --other-connections-reserved free.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.connections_per_address_max
    other_connections_reserved: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="CUTWATER_OTHER_CONNECTIONS_RESERVED",
            help="Connections kept for addresses that have few.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.other_connections_reserved
    server_connections_reserved: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="CUTWATER_SERVER_CONNECTIONS_RESERVED",
            help="Further connections, kept for servers of the cluster.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.server_connections_reserved
    handshakes_max: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CUTWATER_HANDSHAKES_MAX",
            help="Connections before the end of their handshake. One more replaces the oldest.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.handshakes_max
    handshakes_per_address_max: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CUTWATER_HANDSHAKES_PER_ADDRESS_MAX",
            help="Connections from one address before the end of their handshake.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.handshakes_per_address_max
    handshake_ms_max: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CUTWATER_HANDSHAKE_MS_MAX",
            help="Milliseconds that a handshake may take, TLS included.",
            rich_help_panel=_PANEL,
        ),
    ] = _DEFAULTS.handshake_ms_max

    def options(self) -> ListenerOptions:
        return ListenerOptions(
            connections_max=self.connections_max,
            connections_per_address_max=self.connections_per_address_max,
            other_connections_reserved=self.other_connections_reserved,
            server_connections_reserved=self.server_connections_reserved,
            handshakes_max=self.handshakes_max,
            handshakes_per_address_max=self.handshakes_per_address_max,
            handshake_ms_max=self.handshake_ms_max,
        )
