"""Access to every method of both servers, and to every request to the metadata repository: the one table.

``client(...)`` rows are for every connected peer, and name the rights that a client needs when access control is on.
Metadata nodes need no rights; storage nodes need them except in rows that are ``for_storage``, and have none.
All other rows are for servers that have proved their identity (ADR 0036). A method that is not in its server's table
cannot be answered. ``tests/unit/test_method_access.py`` compares the tables with the methods that servers answer, in
both directions.
"""

from __future__ import annotations

from operator import attrgetter
from typing import get_args

from msgspec.structs import replace

from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.rights import ResourceKind, Right
from cutwater.core.audit.audit_requests import NoteAuditedRequest, RecordDenialsRequest
from cutwater.core.jobs import job_requests as j
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol import needs as n
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, ClientAnswers, MethodAccess
from cutwater.protocol.needs import NameLookup, Need, Question, on_cluster, on_named, on_topic_of_stream

FROM_STORAGE = MethodAccess((STORAGE_NODE,))
FROM_METADATA = MethodAccess((METADATA_NODE,))
FROM_SERVERS = MethodAccess((STORAGE_NODE, METADATA_NODE))
INTERNAL = MethodAccess(is_internal=True)


def client(*needs: Need, answers: ClientAnswers = ClientAnswers.ALL) -> MethodAccess:
    return MethodAccess(needs=needs, answers=answers)


def for_storage(row: MethodAccess) -> MethodAccess:
    """Let storage nodes, too, call what is for clients."""
    return replace(row, free=(METADATA_NODE, STORAGE_NODE))


def brings_data(row: MethodAccess) -> MethodAccess:
    return replace(row, brings_data=True)


def has_answer_limit(row: MethodAccess) -> MethodAccess:
    return replace(row, has_answer_limit=True)


def _by_its_own(kind: str, field: str, *, is_admission: bool = False) -> MethodAccess:
    return MethodAccess((kind,), attrgetter(field), is_admission)


OPEN = client(answers=ClientAnswers.OPEN)
FILTERED = client(answers=ClientAnswers.FILTERED)
CARRIES = client(answers=ClientAnswers.CARRIED)

READS = client(on_topic_of_stream(Right.READ))
OPERATES = client(on_cluster(Right.CLUSTER_OPERATE))
ADMINISTERS = client(on_cluster(Right.CLUSTER_ADMIN))
DESCRIBES = client(on_cluster(Right.DESCRIBE))
OPERATES_JOB = client(n.on_job(Right.JOB_OPERATE))
CHANGES_JOB = client(n.on_job(Right.JOB_OPERATE), n.AS_JOB)
DESCRIBES_JOB = client(n.on_job(Right.DESCRIBE))
RUNS_JOBS = client(on_cluster(Right.RUN_JOBS))

STORAGE_NODE_ACCESS: dict[str, MethodAccess] = {
    storage_api.APPEND.name: brings_data(client(on_topic_of_stream(Right.APPEND), n.PRODUCE_AS_OF_BATCH)),
    storage_api.READ.name: has_answer_limit(READS),
    storage_api.FOLLOW.name: has_answer_limit(READS),
    storage_api.FIND.name: READS,
    storage_api.EVENT_TIME.name: READS,
    storage_api.FATE.name: client(on_named(Right.PRODUCE_AS, ResourceKind.PRODUCER, "producer")),
    storage_api.STATUS.name: DESCRIBES,
    storage_api.DESCRIBE.name: DESCRIBES,
    storage_api.VERIFY.name: OPERATES,
    storage_api.STAGE.name: brings_data(client(n.APPEND_FOR_PART)),
    storage_api.FINISH_PART.name: brings_data(client(n.APPEND_FOR_FINISHED)),
    storage_api.DISCARD_PART.name: brings_data(client(n.APPEND_FOR_DISCARDED)),
    storage_api.STAGED.name: DESCRIBES,
    storage_api.VERIFY_STAGED.name: OPERATES,
    scan_api.MEASURE.name: READS,
    scan_api.HEADS.name: READS,
    scan_api.GROUPS.name: READS,
    scan_api.SCAN.name: has_answer_limit(READS),
    storage_api.REPLICATE.name: FROM_STORAGE,
    storage_api.ENTRY_REFUSED.name: _by_its_own(STORAGE_NODE, "node"),
    storage_api.SYNC.name: FROM_STORAGE,
    storage_api.COPY.name: FROM_STORAGE,
    storage_api.FETCH.name: FROM_STORAGE,
    storage_api.KEEP_UP.name: FROM_STORAGE,
    storage_api.LEADER_SAYS.name: FROM_METADATA,
    storage_api.ADDRESSES.name: FROM_METADATA,
    storage_api.ACCESS_CHANGED.name: FROM_METADATA,
    storage_api.ADD_VOLUME.name: FROM_METADATA,
    storage_api.REMOVE_VOLUME.name: FROM_METADATA,
}

METADATA_ACCESS: dict[str, MethodAccess] = {
    metadata_api.ASK.name: CARRIES,
    metadata_api.WHO_LEADS.name: OPEN,
    metadata_api.CHANGE_VOLUMES.name: OPERATES,
    metadata_api.CHECK_PROGRAM.name: client(n.STORE_PROGRAMS),
    metadata_api.JOB_LOG.name: client(on_named(Right.DESCRIBE, ResourceKind.JOB, "name")),
    storage_api.JOIN.name: _by_its_own(STORAGE_NODE, "node", is_admission=True),
    storage_api.REPORT.name: _by_its_own(STORAGE_NODE, "storage_node_id"),
    storage_api.COMPLAINT.name: replace(
        _by_its_own(STORAGE_NODE, "complainer"),
        client_subject=storage_api.A_CLIENT,
        needs=(on_topic_of_stream(Right.DESCRIBE),),
    ),
    storage_api.GROUP_OUTCOME.name: _by_its_own(STORAGE_NODE, "node"),
    metadata_api.MEET.name: _by_its_own(METADATA_NODE, "node", is_admission=True),
    metadata_api.FOLLOW.name: _by_its_own(METADATA_NODE, "node"),
    metadata_api.HEARTBEAT.name: _by_its_own(METADATA_NODE, "node"),
    metadata_api.ACCESS.name: _by_its_own(STORAGE_NODE, "number"),
    metadata_api.ACCESS_LEADER.name: FROM_METADATA,
    metadata_api.ASK_LEADER.name: replace(FROM_METADATA, answers=ClientAnswers.CARRIED),
    metadata_api.ASK_LEADER_AS.name: replace(FROM_METADATA, answers=ClientAnswers.CARRIED),
    metadata_api.CHANGE_VOLUMES_AS.name: replace(FROM_METADATA, answers=ClientAnswers.CARRIED),
    metadata_api.JOIN_LEADER.name: FROM_METADATA,
    metadata_api.REPORT_UP.name: FROM_METADATA,
    metadata_api.COMPLAINT_UP.name: FROM_METADATA,
    metadata_api.COMPLAINT_OF.name: FROM_METADATA,
    metadata_api.GROUP_OUTCOME_UP.name: FROM_METADATA,
    metadata_api.SUSPECT_UP.name: FROM_METADATA,
    metadata_api.RELAY_DOWN.name: FROM_METADATA,
}

REQUEST_ACCESS: dict[type, MethodAccess] = {
    r.FoundClusterRequest: INTERNAL,
    r.JoinRequest: INTERNAL,
    r.StagedRequest: _by_its_own(STORAGE_NODE, "node"),
    r.AddNodeRequest: OPERATES,
    r.RemoveNodeRequest: OPERATES,
    r.CreateTopicRequest: client(on_named(Right.CREATE, ResourceKind.TOPIC, "name")),
    r.ChangeTopicRequest: client(on_named(Right.ALTER, ResourceKind.TOPIC, "name")),
    r.DeleteTopicRequest: client(on_named(Right.DELETE, ResourceKind.TOPIC, "name")),
    r.AddStreamRequest: client(on_named(Right.ALTER, ResourceKind.TOPIC, "topic")),
    r.SealRequest: OPERATES,
    r.UnsealRequest: OPERATES,
    r.ReplaceRequest: OPERATES,
    r.LearnRequest: OPERATES,
    r.TrimRequest: client(on_named(Right.TRIM, ResourceKind.TOPIC, "topic")),
    r.OpenProducerRequest: client(
        on_named(Right.PRODUCE_AS, ResourceKind.PRODUCER, "producer"),
        on_named(Right.APPEND, ResourceKind.TOPIC, "topic"),
    ),
    r.MoveProducerRequest: client(on_named(Right.PRODUCE_AS, ResourceKind.PRODUCER, "producer")),
    r.RenewProducerRequest: client(on_named(Right.PRODUCE_AS, ResourceKind.PRODUCER, "producer")),
    r.CommitCursorRequest: client(on_named(Right.CURSOR, ResourceKind.CURSOR, "cursor")),
    r.ReadCursorRequest: client(on_named(Right.DESCRIBE, ResourceKind.CURSOR, "cursor")),
    r.DropCursorRequest: client(on_named(Right.CURSOR, ResourceKind.CURSOR, "cursor")),
    r.OpenRunRequest: client(n.OPEN_RUN, n.OPEN_AGAIN),
    r.PublishRequest: client(n.PUBLISH_RUN, n.APPEND_FOR_PARTS),
    r.DropRunRequest: client(n.DELETE_RUN),
    r.ForgetOutputRequest: client(on_named(Right.PUBLISH, ResourceKind.RUN, "name")),
    r.CatalogRequest: for_storage(FILTERED),
    r.ClockRequest: OPEN,
    r.EventsRequest: FILTERED,
    r.DescribeRequest: FILTERED,
    q.CreateTokenRequest: ADMINISTERS,
    q.RevokeTokenRequest: ADMINISTERS,
    q.ExpireTokenRequest: ADMINISTERS,
    q.CreateChildTokenRequest: OPEN,
    q.EndOwnTokenRequest: OPEN,
    q.ListTokensRequest: client(n.on_principal_or_all("principal")),
    q.DescribeTokenRequest: client(n.DESCRIBE_OWNER),
    q.NoteTokenUseRequest: FROM_SERVERS,
    q.AllowRequest: ADMINISTERS,
    q.RemoveRightsRequest: ADMINISTERS,
    q.ListRulesRequest: client(n.on_principal_or_all("subject")),
    q.CheckAccessRequest: client(n.on_principal_or_all("principal")),
    q.CreateGroupRequest: ADMINISTERS,
    q.ChangeGroupRequest: ADMINISTERS,
    q.DeleteGroupRequest: ADMINISTERS,
    q.ListGroupsRequest: ADMINISTERS,
    q.SetCertificateRulesRequest: ADMINISTERS,
    q.ListCertificateRulesRequest: ADMINISTERS,
    q.SetQuotaRequest: ADMINISTERS,
    q.RemoveQuotaRequest: ADMINISTERS,
    q.ListQuotasRequest: client(n.on_principal_or_all("subject")),
    q.ListPrincipalsRequest: ADMINISTERS,
    q.DescribePrincipalRequest: client(n.on_principal_or_all("principal")),
    q.SetAccessModeRequest: ADMINISTERS,
    q.WhoAmIRequest: OPEN,
    q.ConfirmAccessRequest: ADMINISTERS,
    j.SubmitJobRequest: client(n.on_job(Right.JOB_SUBMIT), n.AS_JOB, n.FROM_OTHER_JOB),
    j.UpgradeJobRequest: client(n.on_job(Right.JOB_SUBMIT), n.AS_JOB),
    j.RescaleJobRequest: CHANGES_JOB,
    j.RollBackJobRequest: CHANGES_JOB,
    j.OperateJobRequest: OPERATES_JOB,
    j.ForgetSavepointRequest: OPERATES_JOB,
    j.ListJobsRequest: FILTERED,
    j.DescribeJobRequest: DESCRIBES_JOB,
    j.FetchVersionRequest: DESCRIBES_JOB,
    j.DescribeOperationRequest: client(n.DESCRIBE_OPERATION),
    j.ListOperationsRequest: DESCRIBES_JOB,
    j.AskAgentRequest: client(n.ASK_AGENT),
    j.FetchProgramPlaceRequest: client(n.FIND_PROGRAM),
    j.ListAgentsRequest: DESCRIBES,
    j.DrainAgentRequest: OPERATES,
    j.RemoveAgentRequest: OPERATES,
    j.RegisterAgentRequest: RUNS_JOBS,
    **dict.fromkeys(get_args(j.FromAgent), RUNS_JOBS),
    r.MakeInternalTopicsRequest: INTERNAL,
    r.MakeJobTopicRequest: client(on_named(Right.APPEND, ResourceKind.TOPIC, "topic")),
    NoteAuditedRequest: INTERNAL,
    RecordDenialsRequest: FROM_SERVERS,
}
"""By the type of the request in ``ask``. The leader applies the same rows to requests that followers pass on."""


def questions_of(request: r.Request, names: NameLookup) -> list[Question]:
    """Return the rights that a client needs for a request to the metadata repository."""
    return REQUEST_ACCESS[type(request)].questions(request, names)
