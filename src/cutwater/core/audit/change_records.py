"""Derives audit records from decisions: the audit of changes follows from the sequence of decisions alone.

A change is what a principal asks for, and what changes the members of the cluster or its access control. No changes in
this sense are cuts, repairs, moves of producers and groups, and trims by retention: the cluster decides them by itself
as its settings say. Cursors, producers and batches are data: there are thousands of them. ADR 0053 has the reasons.
"""

from __future__ import annotations

from typing import Protocol

from cutwater.core.access import access_decisions as a
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, audit_text
from cutwater.core.jobs import job_decisions as j
from cutwater.core.order import decisions as d
from cutwater.core.order.event_log import event_of
from cutwater.core.order.origin import RequestOrigin
from cutwater.types import CutTime, DecisionIndex, JobNumber, LogStreamId, RunId, TopicId

NEVER = (
    d.Cut
    | d.CreateStream
    | d.OpenProducer
    | d.MoveProducer
    | d.CommitCursor
    | d.DecideBatch
    | d.GroupPublished
    | d.MoveGroup
    | d.ExpireStaged
    | d.DropSurvivor
    | d.AddSurvivor
    | d.NoteAudited
    | a.NoteTokenUse
    | j.ExpireAgent
    | j.AssignJob
    | j.ReleaseJob
    | j.BeginAttempt
    | j.EndAttempt
    | j.EndAssignment
    | j.NoteCheckpoint
    | j.NoteFirstBatch
    | j.NoteSavepoint
    | j.FinishStep
    | j.FailOperation
)
"""Data, progress, what the cluster and its agents do by themselves, and log streams, which come with a change of their
topic."""

IF_ASKED = (
    d.Seal
    | d.Unseal
    | d.Release
    | d.AssignReplicas
    | d.Trim
    | d.DropCursor
    | d.OpenRun
    | d.RaiseRunEpoch
    | d.DropRun
    | d.ForgetOutput
)
"""A change if a principal asked for it. The cluster also decides some of these by itself."""

ALWAYS = (
    d.FoundCluster
    | d.AddNode
    | d.RemoveNode
    | d.CreateTopic
    | d.ChangeTopic
    | d.DeleteTopic
    | a.CreateToken
    | a.RevokeToken
    | a.ExpireToken
    | a.AllowRights
    | a.RemoveRights
    | a.SetGroup
    | a.DeleteGroup
    | a.SetCertificateRules
    | a.SetQuota
    | a.RemoveQuota
    | a.SetAccessMode
    | j.RegisterAgent
    | j.DrainAgent
    | j.RemoveAgent
    | j.BeginOperation
    | j.ForgetSavepoint
)

_NOBODY = RequestOrigin("")


class AuditNames(Protocol):
    """The names of what decisions refer to by number, before the decision. Empty if there is none."""

    def topic_name(self, topic: TopicId) -> str: ...

    def stream_topic_name(self, stream: LogStreamId) -> str: ...

    def run_name(self, run: RunId) -> str: ...

    def job_name(self, job: JobNumber) -> str: ...

    def knows_agent(self, name: str) -> bool: ...


def audit_record(
    index: DecisionIndex, decision: d.Decision, names: AuditNames, cut_time: CutTime
) -> AuditRecord | None:
    """Return the record of a decision, or None if the audit does not record it. ``cut_time`` is its time if it has none
    of its own."""
    if isinstance(decision, NEVER):
        return None
    if isinstance(decision, a.CreateToken) and decision.of_job:
        # It comes with an assignment, and again and again.
        return None
    if isinstance(decision, j.RegisterAgent) and names.knows_agent(decision.agent.name):
        # It was started again, or tells what has changed.
        return None
    by = decision.by or _NOBODY
    if isinstance(decision, IF_ASKED) and not by.principal:
        return None
    event = event_of(index, decision, cut_time)
    words = f"{event.what}; {event.reason}" if event is not None and event.reason else event.what if event else ""
    return AuditRecord(
        event.time if event is not None else cut_time,
        operation_name(type(decision).__name__),
        AuditOutcome.DONE,
        by.principal,
        audit_text(_resource(decision, names)),
        audit_text(_more(decision) or words),
        by.token,
        by.request,
        index,
        via=by.via,
    )


def operation_name(kind: str) -> str:
    """Return the name of a decision or method as audit records have it: ``CreateTopic`` is ``create-topic``."""
    words = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in kind)
    return words.removeprefix("-").replace("_", "-")


def _more(decision: d.Decision) -> str:
    """Return what events leave out because it may be long."""
    match decision:
        case a.SetGroup():
            return f"group {decision.group.name} has the members {', '.join(decision.group.members) or '(none)'}"
        case a.SetCertificateRules():
            rules = "; ".join(f"{rule.field} {rule.pattern} is {rule.principal}" for rule in decision.rules)
            return f"certificates are mapped to principals: {rules or '(no rules)'}"
    return ""


def _resource(decision: d.Decision, names: AuditNames) -> str:
    """Return what the decision is about, as rules name it."""
    match decision:
        case d.CreateTopic():
            return f"topic:{decision.name}"
        case d.ChangeTopic() | d.DeleteTopic() | d.Trim():
            return f"topic:{names.topic_name(decision.topic)}"
        case d.Seal() | d.Unseal() | d.Release() | d.AssignReplicas():
            return f"topic:{names.stream_topic_name(decision.stream)}"
        case d.DropCursor():
            return f"cursor:{decision.cursor}"
        case d.OpenRun() | d.ForgetOutput():
            return f"run:{decision.name}"
        case d.DropRun() | d.RaiseRunEpoch():
            return f"run:{names.run_name(decision.run)}"
        case j.BeginOperation():
            return f"job:{decision.operation.name}"
        case j.ForgetSavepoint():
            return f"job:{names.job_name(decision.job)}"
        case a.CreateToken():
            return f"principal:{decision.principal}"
        case a.AllowRights() | a.RemoveRights() | a.SetQuota() | a.RemoveQuota():
            return _subject(decision.subject)
        case a.SetGroup():
            return f"group:{decision.group.name}"
        case a.DeleteGroup():
            return f"group:{decision.name}"
        case a.RevokeToken() | a.ExpireToken():
            return f"token:{decision.id}"
    return "cluster"


def _subject(subject: str) -> str:
    return subject if subject.startswith("group:") else f"principal:{subject}"
