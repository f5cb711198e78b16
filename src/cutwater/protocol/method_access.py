"""Access to every method of both servers, and to every request to the metadata repository.

``CLIENT`` means every connected peer. All other methods are for servers that have proved their identity (ADR 0036).
A method that is not in its server's table cannot be answered. ``tests/unit/test_method_access.py`` compares the tables
with the methods that servers answer, in both directions.
"""

from __future__ import annotations

from operator import attrgetter

from msgspec.structs import replace

from cutwater.core import requests as r
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, MethodAccess

CLIENT = MethodAccess()
FROM_STORAGE = MethodAccess((STORAGE_NODE,))
FROM_METADATA = MethodAccess((METADATA_NODE,))
INTERNAL = MethodAccess(is_internal=True)


def _by_its_own(kind: str, field: str, *, is_admission: bool = False) -> MethodAccess:
    return MethodAccess((kind,), attrgetter(field), is_admission)


STORAGE_NODE_ACCESS: dict[str, MethodAccess] = {
    storage_api.APPEND.name: CLIENT,
    storage_api.READ.name: CLIENT,
    storage_api.FOLLOW.name: CLIENT,
    storage_api.FIND.name: CLIENT,
    storage_api.EVENT_TIME.name: CLIENT,
    storage_api.FATE.name: CLIENT,
    storage_api.STATUS.name: CLIENT,
    storage_api.DESCRIBE.name: CLIENT,
    storage_api.VERIFY.name: CLIENT,
    storage_api.STAGE.name: CLIENT,
    storage_api.FINISH_PART.name: CLIENT,
    storage_api.DISCARD_PART.name: CLIENT,
    storage_api.STAGED.name: CLIENT,
    storage_api.VERIFY_STAGED.name: CLIENT,
    scan_api.MEASURE.name: CLIENT,
    scan_api.HEADS.name: CLIENT,
    scan_api.GROUPS.name: CLIENT,
    scan_api.SCAN.name: CLIENT,
    storage_api.REPLICATE.name: FROM_STORAGE,
    storage_api.ENTRY_REFUSED.name: _by_its_own(STORAGE_NODE, "node"),
    storage_api.SYNC.name: FROM_STORAGE,
    storage_api.COPY.name: FROM_STORAGE,
    storage_api.FETCH.name: FROM_STORAGE,
    storage_api.KEEP_UP.name: FROM_STORAGE,
    storage_api.LEADER_SAYS.name: FROM_METADATA,
    storage_api.ADDRESSES.name: FROM_METADATA,
    storage_api.ADD_VOLUME.name: FROM_METADATA,
    storage_api.REMOVE_VOLUME.name: FROM_METADATA,
}

METADATA_ACCESS: dict[str, MethodAccess] = {
    metadata_api.ASK.name: CLIENT,
    metadata_api.WHO_LEADS.name: CLIENT,
    metadata_api.CHANGE_VOLUMES.name: CLIENT,
    storage_api.JOIN.name: _by_its_own(STORAGE_NODE, "node", is_admission=True),
    storage_api.REPORT.name: _by_its_own(STORAGE_NODE, "storage_node_id"),
    storage_api.COMPLAINT.name: replace(_by_its_own(STORAGE_NODE, "complainer"), client_subject=storage_api.A_CLIENT),
    storage_api.GROUP_OUTCOME.name: _by_its_own(STORAGE_NODE, "node"),
    metadata_api.MEET.name: _by_its_own(METADATA_NODE, "node", is_admission=True),
    metadata_api.FOLLOW.name: _by_its_own(METADATA_NODE, "node"),
    metadata_api.HEARTBEAT.name: _by_its_own(METADATA_NODE, "node"),
    metadata_api.ASK_LEADER.name: FROM_METADATA,
    metadata_api.JOIN_LEADER.name: FROM_METADATA,
    metadata_api.REPORT_UP.name: FROM_METADATA,
    metadata_api.COMPLAINT_UP.name: FROM_METADATA,
    metadata_api.GROUP_OUTCOME_UP.name: FROM_METADATA,
    metadata_api.SUSPECT_UP.name: FROM_METADATA,
    metadata_api.RELAY_DOWN.name: FROM_METADATA,
}

REQUEST_ACCESS: dict[type, MethodAccess] = {
    r.FoundClusterRequest: INTERNAL,
    r.JoinRequest: INTERNAL,
    r.StagedRequest: _by_its_own(STORAGE_NODE, "node"),
    r.AddNodeRequest: CLIENT,
    r.RemoveNodeRequest: CLIENT,
    r.CreateTopicRequest: CLIENT,
    r.ChangeTopicRequest: CLIENT,
    r.DeleteTopicRequest: CLIENT,
    r.AddStreamRequest: CLIENT,
    r.SealRequest: CLIENT,
    r.UnsealRequest: CLIENT,
    r.ReplaceRequest: CLIENT,
    r.LearnRequest: CLIENT,
    r.TrimRequest: CLIENT,
    r.OpenProducerRequest: CLIENT,
    r.MoveProducerRequest: CLIENT,
    r.RenewProducerRequest: CLIENT,
    r.CommitCursorRequest: CLIENT,
    r.ReadCursorRequest: CLIENT,
    r.DropCursorRequest: CLIENT,
    r.OpenRunRequest: CLIENT,
    r.PublishRequest: CLIENT,
    r.DropRunRequest: CLIENT,
    r.ForgetOutputRequest: CLIENT,
    r.CatalogRequest: CLIENT,
    r.ClockRequest: CLIENT,
    r.EventsRequest: CLIENT,
    r.DescribeRequest: CLIENT,
}
"""By the type of the request in ``ask``. The follower has already checked requests in ``ask_leader``."""
