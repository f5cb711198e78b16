"""Describes recent decisions for operators: every decision except cuts and other frequent ones, with its reason."""

from __future__ import annotations

from msgspec import UNSET

from cutwater.core.access.access_decisions import AccessDecision, CreateToken, NoteTokenUse
from cutwater.core.access.access_text import tell_access
from cutwater.core.jobs.job_decisions import JobDecision
from cutwater.core.jobs.job_text import QUIET, tell_job
from cutwater.core.order import decisions as d
from cutwater.core.requests import Event
from cutwater.core.text import counted, hold, listed, nodes_in_words
from cutwater.types import CutTime, DecisionIndex

EVENTS_MAX = 1_000
"""Number of events that are kept, in memory and in the store. Older ones are in the log files of the servers."""


KEY_DIGITS_SHOWN = 16
_TOO_MANY = d.Cut | d.CommitCursor | d.OpenProducer | d.DecideBatch | d.GroupPublished | d.NoteAudited | NoteTokenUse
"""Frequent decisions. There are thousands of them, and they would push out the events that operators look for."""


def event_of(index: DecisionIndex, decision: d.Decision, cut_time: CutTime) -> Event | None:
    """Return the event for a decision, or None if it does not concern operators. Decisions of earlier versions have no
    time of their own; they get the time of the last cut, which came shortly before."""
    if isinstance(decision, _TOO_MANY | QUIET) or (isinstance(decision, CreateToken) and decision.of_job):
        return None
    if isinstance(decision, JobDecision):
        what, reason = tell_job(decision)
    else:
        what, reason = (tell_access(decision), "") if isinstance(decision, AccessDecision) else _tell(decision)
    time = (decision.time if isinstance(decision, d.CreateStream) else decision.at) or cut_time
    return Event(index, time, type(decision).__name__, what, reason)


def _tell(decision: d.OrderDecision) -> tuple[str, str]:
    match decision:
        case d.Seal():
            kind = "sealed for good" if decision.final else "sealed"
            told = f"log stream {decision.stream} {kind} in epoch {decision.epoch} at LLSN {decision.sealed_at}"
            return f"{told}; {hold(decision.survivors)} every record", decision.reason
        case d.Unseal():
            told = f"log stream {decision.stream} opened in epoch {decision.epoch} after LLSN {decision.start}"
            return f"{told} on {nodes_in_words(decision.chain)}", decision.reason
        case d.Release():
            return f"log stream {decision.stream} may be opened again", "unsealed by an operator"
        case d.DropSurvivor():
            told = f"the replica of log stream {decision.stream} on storage node {decision.node} must learn"
            return told, decision.reason
        case d.AddSurvivor():
            return f"the replica of log stream {decision.stream} on storage node {decision.node} is complete again", ""
        case d.FoundCluster():
            return f"cluster {decision.cluster} founded", ""
        case d.AddNode():
            where = f"at {decision.address or 'an unknown address'}, with {listed(decision.volumes or ['no volume'])}"
            # It is decided twice when a node is new: its key is known after it was asked for it.
            key = f"key {decision.server_key[:KEY_DIGITS_SHOWN]}" if decision.server_key else "its key is not known yet"
            return f"storage node {decision.node} belongs to the cluster, {where}; {key}", ""
        case d.RemoveNode():
            return f"storage node {decision.node} removed", ""
        case d.CreateTopic():
            told = f"topic {decision.name!r} created as number {decision.topic}"
            return f"{told}: {counted(decision.streams, 'log stream')}, replication {decision.replication}", ""
        case d.ChangeTopic():
            told = f"topic number {decision.topic} changed: {counted(decision.streams, 'log stream')}"
            told += f", retention {decision.retention}{', a new schema' if decision.schema else ''}"
            return f"{told}{f', replication {decision.replication}' if decision.replication is not UNSET else ''}", ""
        case d.DeleteTopic():
            return f"topic number {decision.topic} deleted", ""
        case d.CreateStream():
            told = f"log stream {decision.stream} of topic number {decision.topic} created"
            return f"{told} on {nodes_in_words(decision.replicas)}", decision.reason
        case d.AssignReplicas():
            told = f"log stream {decision.stream} belongs on {nodes_in_words(decision.replicas)}"
            if decision.leaving:
                told += f"; {nodes_in_words(decision.leaving)} will leave when the others hold every record"
            return told, decision.reason
        case d.Trim():
            return f"topic number {decision.topic} trimmed before GLSN {decision.before}", ""
        case d.MoveProducer():
            return f"producer {decision.producer!r} moved to log stream {decision.stream}", ""
        case d.DropCursor():
            return f"cursor {decision.cursor!r} dropped", ""
        case d.OpenRun():
            return f"run {decision.run} opened{f' under the name {decision.name!r}' if decision.name else ''}", ""
        case d.RaiseRunEpoch():
            return (
                f"run {decision.run} opened by assignment {decision.job_epoch} of its job, which ends earlier ones",
                "",
            )
        case d.MoveGroup():
            told = f"batch {decision.batch} of run {decision.run} goes to log stream {decision.stream}"
            return f"{told} of topic number {decision.topic}", decision.reason
        case d.DropRun():
            return f"run {decision.run} was dropped, and what it had not published is lost", decision.reason
        case d.ForgetOutput():
            return f"what was published under the name {decision.name!r} does not keep new runs from it any more", ""
        case d.ExpireStaged():
            return f"what was staged for run {decision.run} and not decided on expired", decision.reason
        case d.Cut() | d.CommitCursor() | d.OpenProducer() | d.DecideBatch() | d.GroupPublished() | d.NoteAudited():
            return "", ""
