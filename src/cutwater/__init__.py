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

from cutwater import errors
from cutwater.errors import (
    AlreadyExists,
    AppendUnknown,
    BatchDiffers,
    CheckpointDamaged,
    ConditionFailed,
    ContradictoryCommand,
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    Fenced,
    ImpossibleReport,
    InvalidArgument,
    InvalidTransition,
    LastCopy,
    LeaderFenced,
    Malformed,
    NoRecordHere,
    NotAnswered,
    NotFound,
    NotLeader,
    NotSealed,
    NotYetCommitted,
    OrderLayerLostMemory,
    OutputExists,
    PermissionDenied,
    PipelineFailed,
    ProducerFenced,
    ProtocolViolation,
    QuotaExceeded,
    ReadOnly,
    Refused,
    ResourceExhausted,
    RunFenced,
    SavepointDamaged,
    SequenceError,
    SequenceExpired,
    SequenceGap,
    SequenceReused,
    StagedExpired,
    StreamSealed,
    Trimmed,
    Unavailable,
    WrongEpoch,
    WrongIdentity,
)
from cutwater.types import Ack, Part, Retention

if TYPE_CHECKING:
    from cutwater.client.async_client import AsyncClient
    from cutwater.client.client import Client, Cursor, Producer, Stager, Subscription, connect
    from cutwater.client.cluster.credentials import tls_context
    from cutwater.client.cluster.cursors import AsyncCursor
    from cutwater.client.cluster.topics import Topic
    from cutwater.client.errors import ClientClosed, IncompatibleSchema, InvalidRecord, RecordTooLarge
    from cutwater.client.produce.producer import AsyncProducer
    from cutwater.client.publish.part_writer import AsyncStager
    from cutwater.client.publish.runs import Published, Run
    from cutwater.client.read.records import Record
    from cutwater.client.subscribe.subscriptions import AsyncSubscription
    from cutwater.embedded import open
    from cutwater.protocol.errors import (
        CannotListen,
        ConnectionLost,
        FrameTooLarge,
        InternalError,
        MalformedFrame,
        Unauthenticated,
        UnknownMethod,
        Unproven,
        Untrusted,
        WrongCluster,
        WrongVersion,
    )

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "AlreadyExists",
    "AppendUnknown",
    "AsyncClient",
    "AsyncCursor",
    "AsyncProducer",
    "AsyncStager",
    "AsyncSubscription",
    "BatchDiffers",
    "CannotListen",
    "CheckpointDamaged",
    "Client",
    "ClientClosed",
    "ConditionFailed",
    "ConnectionLost",
    "ContradictoryCommand",
    "Cursor",
    "CutwaterError",
    "Damaged",
    "DeadlineExceeded",
    "Fenced",
    "FrameTooLarge",
    "ImpossibleReport",
    "IncompatibleSchema",
    "InternalError",
    "InvalidArgument",
    "InvalidRecord",
    "InvalidTransition",
    "LastCopy",
    "LeaderFenced",
    "Malformed",
    "MalformedFrame",
    "NoRecordHere",
    "NotAnswered",
    "NotFound",
    "NotLeader",
    "NotSealed",
    "NotYetCommitted",
    "OrderLayerLostMemory",
    "OutputExists",
    "Part",
    "PermissionDenied",
    "PipelineFailed",
    "Producer",
    "ProducerFenced",
    "ProtocolViolation",
    "Published",
    "QuotaExceeded",
    "ReadOnly",
    "Record",
    "RecordTooLarge",
    "Refused",
    "ResourceExhausted",
    "Retention",
    "Run",
    "RunFenced",
    "SavepointDamaged",
    "SequenceError",
    "SequenceExpired",
    "SequenceGap",
    "SequenceReused",
    "StagedExpired",
    "Stager",
    "StreamSealed",
    "Subscription",
    "Topic",
    "Trimmed",
    "Unauthenticated",
    "Unavailable",
    "UnknownMethod",
    "Unproven",
    "Untrusted",
    "WrongCluster",
    "WrongEpoch",
    "WrongIdentity",
    "WrongVersion",
    "connect",
    "errors",
    "open",
    "tls_context",
]

_WHERE = {
    "AsyncClient": "cutwater.client.async_client",
    "AsyncCursor": "cutwater.client.cluster.cursors",
    "AsyncProducer": "cutwater.client.produce.producer",
    "AsyncStager": "cutwater.client.publish.part_writer",
    "AsyncSubscription": "cutwater.client.subscribe.subscriptions",
    "Client": "cutwater.client.client",
    "Cursor": "cutwater.client.client",
    "Producer": "cutwater.client.client",
    "Published": "cutwater.client.publish.runs",
    "Record": "cutwater.client.read.records",
    "Run": "cutwater.client.publish.runs",
    "Stager": "cutwater.client.client",
    "Subscription": "cutwater.client.client",
    "Topic": "cutwater.client.cluster.topics",
    "connect": "cutwater.client.client",
    "open": "cutwater.embedded",
    "tls_context": "cutwater.client.cluster.credentials",
}

_ERRORS = ("cutwater.client.errors", "cutwater.protocol.errors")
"""Modules of the other public names: every error that a program may handle is a name of this package."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a server, or a pipeline, need not load the client."""
    if name in _WHERE:
        found = getattr(import_module(_WHERE[name]), name)
    elif name in __all__:
        found = next(found for module in _ERRORS if (found := getattr(import_module(module), name, None)) is not None)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
