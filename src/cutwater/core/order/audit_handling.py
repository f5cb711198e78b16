"""What requests have to do with the audit: which ones wait while too many records are not in the log."""

from __future__ import annotations

from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.audit.audit_requests import AUDIT_PRODUCER, AuditRequest, NoteAuditedRequest
from cutwater.core.internal_topics import AUDIT, JOB_LOGS, PROGRAMS, way_out
from cutwater.core.jobs import job_requests as jobs
from cutwater.core.order import decisions as d
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import OrderState
from cutwater.core.publish.run_requests import Outcome
from cutwater.errors import Refused, ResourceExhausted

RETRY_MS = 1_000

WAIT_FOR_AUDIT = (
    r.CreateTopicRequest
    | r.ChangeTopicRequest
    | r.DeleteTopicRequest
    | r.AddStreamRequest
    | r.TrimRequest
    | r.DropCursorRequest
    | r.OpenRunRequest
    | r.DropRunRequest
    | r.ForgetOutputRequest
    | q.CreateTokenRequest
    | q.CreateChildTokenRequest
    | q.AllowRequest
    | q.CreateGroupRequest
    | q.ChangeGroupRequest
    | q.SetCertificateRulesRequest
    | q.SetQuotaRequest
    | q.RemoveQuotaRequest
    | jobs.SubmitJobRequest
    | jobs.UpgradeJobRequest
    | jobs.RescaleJobRequest
    | jobs.RollBackJobRequest
    | jobs.OperateJobRequest
    | jobs.ForgetSavepointRequest
    | jobs.DrainAgentRequest
    | jobs.RemoveAgentRequest
)
"""Changes that are refused while too many audit records wait. Not among them is what may be needed to repair the log
(nodes, seals, replicas), and what takes rights away (tokens, rules, groups): a leaked token must be revocable at any
time. There are at most as many of the latter as there are tokens, rules and groups."""


def check_audit(request: r.Request, state: OrderState, origin: RequestOrigin | None) -> None:
    """Raise if the request cannot be decided because of the audit. Trims by retention are not recorded, and go on."""
    is_retention = isinstance(request, r.TrimRequest) and origin is None
    if state.audit.is_full and isinstance(request, WAIT_FOR_AUDIT) and not is_retention:
        raise ResourceExhausted(
            f"{len(state.audit.pending)} records of the audit wait, which is the most, because topic {AUDIT.name!r} "
            "takes no appends. Changes are refused until it does: see `cutwater topic describe _audit` for its log "
            "stream and bring its storage nodes back. Revoking tokens and removing rights are still possible",
            retry_ms=RETRY_MS,
        )
    if isinstance(request, q.SetAccessModeRequest) and request.mode is not AccessMode.OFF:
        for topic in (AUDIT, PROGRAMS, JOB_LOGS):
            taken = state.topic_named(topic.name)
            if taken is not None and not taken.is_internal:
                raise Refused(
                    f"with access control, the cluster needs a topic {topic.name!r} of its own, and a user created one "
                    f"with an earlier version. Nothing was changed. {way_out(taken.name, is_typed=bool(taken.schemas))}"
                )


def check_producer(request: r.OpenProducerRequest, origin: RequestOrigin | None) -> None:
    """Raise if a client opens the producer of the audit, which would end the leader's."""
    is_own = origin is not None and origin.principal == AUDIT_PRODUCER
    if request.producer == AUDIT_PRODUCER and not is_own:
        raise Refused(f"producer {AUDIT_PRODUCER!r} belongs to the cluster itself: choose another name")


def decide_audit(request: AuditRequest, state: OrderState) -> Outcome:
    if not isinstance(request, NoteAuditedRequest):
        raise Refused("denials are appended to the audit, not decided")
    if request.through <= state.audit.written:
        return (), r.Done()
    return (d.NoteAudited(request.through),), r.Done()
