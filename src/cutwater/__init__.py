"""Cutwater: one totally ordered, replicated log, and exactly-once event-time pipelines over it.

::

    import cutwater

    with cutwater.open("./data") as log:
        log.create_topic("orders")
        ack = log.append("orders", b"hello")
        for record in log.subscribe("orders", start=ack.glsn, follow=False):
            print(record.glsn, record.value)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutwater.client.access import tls_context
    from cutwater.client.async_client import AsyncClient
    from cutwater.client.client import Client, Cursor, Producer, Stager, Subscription, connect
    from cutwater.client.cursors import AsyncCursor
    from cutwater.client.producer import AsyncProducer
    from cutwater.client.records import Record
    from cutwater.client.runs import Published, Run
    from cutwater.client.staging import AsyncStager
    from cutwater.client.subscriptions import AsyncSubscription
    from cutwater.client.topics import Topic
    from cutwater.embedded import open
    from cutwater.errors import CutwaterError
    from cutwater.types import Ack, Part, Retention

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "AsyncClient",
    "AsyncCursor",
    "AsyncProducer",
    "AsyncStager",
    "AsyncSubscription",
    "Client",
    "Cursor",
    "CutwaterError",
    "Part",
    "Producer",
    "Published",
    "Record",
    "Retention",
    "Run",
    "Stager",
    "Subscription",
    "Topic",
    "connect",
    "open",
    "tls_context",
]

_WHERE = {
    "Ack": "cutwater.types",
    "AsyncClient": "cutwater.client.async_client",
    "AsyncCursor": "cutwater.client.cursors",
    "AsyncProducer": "cutwater.client.producer",
    "AsyncStager": "cutwater.client.staging",
    "AsyncSubscription": "cutwater.client.subscriptions",
    "Client": "cutwater.client.client",
    "Cursor": "cutwater.client.client",
    "CutwaterError": "cutwater.errors",
    "Part": "cutwater.types",
    "Producer": "cutwater.client.client",
    "Published": "cutwater.client.runs",
    "Record": "cutwater.client.records",
    "Retention": "cutwater.types",
    "Run": "cutwater.client.runs",
    "Stager": "cutwater.client.client",
    "Subscription": "cutwater.client.client",
    "Topic": "cutwater.client.topics",
    "connect": "cutwater.client.client",
    "open": "cutwater.embedded",
    "tls_context": "cutwater.client.access",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: a server, or a pipeline, need not load the client."""
    if name in _WHERE:
        found = getattr(import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
