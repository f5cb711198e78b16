"""The names of fields on the wire are part of the protocol: others read them."""

from __future__ import annotations

import msgspec

from cutwater.core.messages import CommitMessage
from cutwater.core.order.cut import StreamCommit
from cutwater.types import (
    GLSN,
    LLSN,
    CommitContext,
    CutTime,
    Epoch,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    Revision,
    StorageNodeId,
    UncommitReport,
)


def test_a_report_has_the_fields_of_the_protocol() -> None:
    ur = UncommitReport(LogStreamId(3), Epoch(1), ReplicaState.RUNNING, GLSN(10), LLSN(5), 2)
    report = Report(StorageNodeId(7), Incarnation(2), 9, LeaderEpoch(1), NodeState.READY, (ur,))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(report))
    assert sent["storage_node_id"] == 7
    assert sent["incarnation"] == 2
    assert sent["sequence"] == 9
    (told,) = sent["uncommit_reports"]
    assert told["log_stream_id"] == 3
    assert told["epoch"] == 1
    assert told["state"] == ReplicaState.RUNNING
    assert told["high_watermark"] == 10
    assert told["uncommitted_llsn_offset"] == 5
    assert told["uncommitted_llsn_length"] == 2


def test_a_commit_has_the_fields_of_the_protocol() -> None:
    context = CommitContext(Epoch(1), LLSN(5), GLSN(11), 3, GLSN(15), GLSN(10), CutTime(1))
    message = CommitMessage(GLSN(10), GLSN(15), Revision(1), (StreamCommit(LogStreamId(3), context),), ())
    encoded = msgspec.msgpack.encode(message)
    sent = msgspec.msgpack.decode(encoded)
    assert (sent["high_watermark"], sent["prev_high_watermark"]) == (15, 10)
    (result,) = sent["commit_results"]
    assert result["log_stream_id"] == 3
    assert result["context"]["committed_llsn_offset"] == 5
    assert result["context"]["committed_glsn_offset"] == 11
    assert result["context"]["committed_glsn_length"] == 3
    assert result["context"]["high_watermark"] == 15
    assert result["context"]["prev_high_watermark"] == 10
    assert msgspec.msgpack.decode(encoded, type=CommitMessage) == message
