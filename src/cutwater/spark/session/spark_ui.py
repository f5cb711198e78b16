"""Switches Spark's own pages on, on loopback only.

Spark serves them at the address in ``SPARK_LOCAL_IP``, and at all addresses without it; there is no setting for it. But
Spark also takes that address for the one by which executors reach the driver. So with executors on other machines both
addresses of the driver are set: its own for the executors, and loopback for the pages.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from cutwater.errors import InvalidArgument
from cutwater.jobs.spark_conf import LOOPBACK, ON_THIS_MACHINE, UI_FILTERS, is_on_this_machine, wants_ui

LOCAL_IP = "SPARK_LOCAL_IP"
_HOST = re.compile(r"(?:spark|k8s|https?)://(?:https?://)?\[?([^/,\[\]]+?)\]?(?::(\d+))?(?:[/,].*)?")
_ROUTE_PORT = 9
"""No packet is sent there: connecting a datagram socket only chooses the address of this machine."""


def serve_on_loopback(settings: Mapping[str, str], master: str) -> dict[str, str]:
    """Return settings that are needed in addition if Spark's pages are switched on. Changes the environment of this
    process, which the JVM inherits. Raises if other machines could open the pages without authentication."""
    if not wants_ui(settings):
        return {}
    found = os.environ.get(LOCAL_IP, LOOPBACK[0])
    if found not in LOOPBACK and not settings.get(UI_FILTERS):
        raise InvalidArgument(
            f"Spark's pages are switched on, and {LOCAL_IP}={found} would serve them to other machines, to everybody: "
            f"take {LOCAL_IP} out of the environment, and they are served on loopback; or let {UI_FILTERS} name a "
            "servlet filter that authenticates users"
        )
    os.environ[LOCAL_IP] = found
    # Nobody can be asked for a name there, so nobody can end jobs there.
    more = {"spark.ui.killEnabled": settings.get("spark.ui.killEnabled", "false")}
    if is_on_this_machine(master) or found not in LOOPBACK:
        return more
    host, bind = ON_THIS_MACHINE
    address = settings.get(host) or address_towards(master)
    if not address:
        raise InvalidArgument(
            f"Spark's pages are switched on, and the address by which executors of {master} reach this machine is not "
            f"known: say it with --conf {host}=ADDRESS"
        )
    return {**more, host: address, bind: settings.get(bind) or address}


def address_towards(master: str) -> str:
    """Return the address of this machine by which the machine of the master reaches it; empty if it is not known."""
    found = _HOST.fullmatch(master)
    if found is None:
        return ""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(found[1], _ROUTE_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asked:
            asked.connect(place)
            return str(asked.getsockname()[0])
    except OSError:
        return ""
