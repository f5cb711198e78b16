"""The error tree: one class per thing that can go wrong, with a stable code.

::

    CutwaterError
     ├─ InvalidArgument              invalid_argument       the caller's input is wrong; nothing was done
     ├─ NotFound                     not_found              no such topic, log stream or storage node
     ├─ AlreadyExists                already_exists         the name or number is taken
     ├─ Refused                      refused                the state of the cluster forbids it; nothing was done
     │   ├─ StreamSealed             stream_sealed          the log stream takes no appends; will never appear
     │   ├─ WrongEpoch               wrong_epoch            named an epoch that is not the current one    (retriable)
     │   ├─ NotSealed                not_sealed             this needs a sealed log stream
     │   ├─ ConditionFailed          condition_failed       a conditional append found another end
     │   ├─ StagedExpired            staged_expired         the staged rows expired before they were decided on
     │   ├─ OutputExists             output_exists          what the run would publish is in the log under its name
     │   ├─ BatchDiffers             batch_differs          the batch was decided for another range of the input
     │   ├─ PermissionDenied         permission_denied      the caller lacks a right; names the command that gives it
     │   ├─ WrongIdentity            wrong_identity         data or a key belongs to another cluster, node or log stream
     │   └─ LastCopy                 last_copy              would remove the last copy of committed records
     ├─ Fenced                       fenced                 a newer holder has taken over
     │   ├─ LeaderFenced             leader_fenced          another metadata repository node leads now
     │   ├─ ProducerFenced           producer_fenced        the producer's name was opened again elsewhere
     │   └─ RunFenced                run_fenced             another run, or assignment of the job, has the name now
     ├─ SequenceError                sequence_error         a producer's numbering is broken
     │   ├─ SequenceGap              sequence_gap           a number before this one never arrived
     │   ├─ SequenceReused           sequence_reused        the same number with other bytes
     │   └─ SequenceExpired          sequence_expired       too old to tell whether it is a repeat
     ├─ AppendUnknown                append_unknown         the outcome is not known: it may or may not appear
     ├─ Trimmed                      trimmed                the position was trimmed; carries the first one left
     ├─ NotYetCommitted              not_yet_committed      the position is above the committed end        (retriable)
     ├─ NoRecordHere                 no_record_here         the position is a tick, a fence or a declaration
     ├─ Damaged                      damaged                the stored bytes fail their checksum           (retriable)
     │   ├─ SavepointDamaged         savepoint_damaged      a file of a savepoint is not what was written
     │   └─ CheckpointDamaged        checkpoint_damaged     a file of a checkpoint is missing or not what was written
     ├─ Malformed                    malformed              stored bytes are intact, but hold no records of their topic
     ├─ Unavailable                  unavailable            cannot be served now                           (retriable)
     │   ├─ NotLeader                not_leader             ask the leader                                 (retriable)
     │   ├─ ReadOnly                 read_only              the disk is full                               (retriable)
     │   ├─ NotAnswered              not_answered           an agent works on it: ask the same again       (retriable)
     │   ├─ ResourceExhausted        resource_exhausted     a limit is reached; carries a time to wait     (retriable)
     │   │   └─ QuotaExceeded        quota_exceeded         a quota is used up; nothing was done           (retriable)
     │   └─ DeadlineExceeded         deadline_exceeded      the caller's time is up                        (retriable)
     ├─ PipelineFailed               pipeline_failed        a pipeline's function failed; nothing of that call is kept
     └─ ProtocolViolation            protocol_violation     a part of the cluster broke the protocol; an alarm
         ├─ InvalidTransition        invalid_transition     a replica was asked for a step its state forbids
         ├─ ImpossibleReport         impossible_report      a report contradicts what was decided
         ├─ ContradictoryCommand     contradictory_command  two commands of one authority exclude each other
         └─ OrderLayerLostMemory     order_layer_lost_memory  a replica knows of a cut that the order layer does not

A *definite* failure means that the append will never appear. ``retriable`` means that the same request, tried again
later with a fresh catalog, may succeed. Errors of the core carry the recent ``history`` of the object concerned, so
that the first message already tells what happened before.
"""

from __future__ import annotations

from typing import ClassVar

from cutwater.types import GLSN, LLSN, BatchNumber, Epoch, LogStreamId, RunId, Sequence


class CutwaterError(Exception):
    """Base of all errors that Cutwater raises on purpose."""

    code: ClassVar[str] = "cutwater_error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, history: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.history = history

    def __str__(self) -> str:
        if not self.history:
            return self.message
        return "\n  ".join((self.message, "what happened before, newest last:", *self.history))


class InvalidArgument(CutwaterError):
    code = "invalid_argument"


class NotFound(CutwaterError):
    code = "not_found"


class AlreadyExists(CutwaterError):
    code = "already_exists"


class Refused(CutwaterError):
    code = "refused"


class StreamSealed(Refused):
    code = "stream_sealed"


class WrongEpoch(Refused):
    code = "wrong_epoch"
    retriable = True

    def __init__(self, stream: LogStreamId, given: Epoch, current: Epoch, *, history: tuple[str, ...] = ()) -> None:
        super().__init__(
            f"log stream {stream} is in epoch {current}, not {given}: fetch the catalog and try again", history=history
        )
        self.stream, self.given, self.current = stream, given, current


class NotSealed(Refused):
    code = "not_sealed"


class ConditionFailed(Refused):
    code = "condition_failed"

    def __init__(self, stream: LogStreamId, expected: LLSN, actual: LLSN) -> None:
        super().__init__(
            f"log stream {stream}: the next LLSN is {actual}, not {expected} as the append demands: "
            "read what was appended meanwhile and decide again"
        )
        self.stream, self.expected, self.actual = stream, expected, actual


class StagedExpired(Refused):
    code = "staged_expired"

    def __init__(self, run: RunId, given: int, current: int) -> None:
        super().__init__(
            f"rows of run {run} were staged in generation {given} and have expired, {current} is the present one: "
            "open the run again and stage the rows again"
        )
        self.run, self.given, self.current = run, given, current

    def because(self, text: str) -> StagedExpired:
        """Replace the message, for rows that are gone for another reason than their age."""
        self.message = text
        self.args = (text,)
        return self


class OutputExists(Refused):
    code = "output_exists"

    def __init__(self, name: str, rows: int, glsn: GLSN, position: GLSN, what: str) -> None:
        """``rows`` and ``position`` are -1 if they are not known. ``what`` names the refused start."""
        published = "an unknown number of rows" if rows < 0 else f"{rows} row{'' if rows == 1 else 's'}"
        last = f", the last at GLSN {glsn}" if glsn else ", not all of them in the log yet"
        read = "an unknown position" if position < 0 else f"GLSN {position}"
        beyond = (
            ""
            if position < 0
            else (
                f"begin after that input (start={position + 1}, --start {position + 1}), without the state of earlier "
                "input: open windows, timers and values of keys are lost; "
            )
        )
        super().__init__(
            f"{name!r} has published {published}{last}, from input up to {read}, and {what} would publish rows of that "
            f"input again. Go on with the checkpoint of before, or from a newer savepoint; {beyond}publish the rows a "
            "second time (replay_output=True, --replay-output, option replayOutput); run under another name; or let "
            f"the name begin anew with `cutwater run forget {name}`"
        )
        self.name, self.rows, self.glsn, self.position, self.what = name, rows, glsn, position, what


class BatchDiffers(Refused):
    """The checkpoint of a driver is not the one from which the batch was published. ``after`` and ``through`` are the
    range of the input for which the batch was decided, and ``given`` is the range of this driver, as text."""

    code = "batch_differs"

    def __init__(self, run: RunId, batch: BatchNumber, after: GLSN, through: GLSN, given: str) -> None:
        super().__init__(
            f"batch {batch} of run {run} was decided for the input from GLSN {after + 1} to {through}, and this driver "
            f"has planned it for {given}: its checkpoint is an old copy, or another driver works with the same one. "
            "Stop this driver; go on with the checkpoint that was used last, or start from a savepoint with a new one"
        )
        self.run, self.batch, self.after, self.through, self.given = run, batch, after, through, given


class PermissionDenied(Refused):
    """``core.access.denials`` has the words. ``principal`` is empty if the caller showed no credentials."""

    code = "permission_denied"

    def __init__(self, message: str, *, principal: str, right: str, resource: str) -> None:
        super().__init__(message)
        self.principal, self.right, self.resource = principal, right, resource


class WrongIdentity(Refused):
    code = "wrong_identity"


class LastCopy(Refused):
    code = "last_copy"


class Fenced(CutwaterError):
    code = "fenced"


class LeaderFenced(Fenced):
    code = "leader_fenced"


class ProducerFenced(Fenced):
    code = "producer_fenced"


class RunFenced(Fenced):
    code = "run_fenced"

    def __init__(self, name: str, run: RunId, by: RunId) -> None:
        super().__init__(
            f"run {run} was dropped by an operator, and what it had decided and not published is lost: start the query "
            "with a new checkpoint, at the position from which on its rows are wanted"
            if by == run
            else f"run {by} publishes under the name {name!r} now, run {run} is over: "
            "stop this query, or start it under another name"
        )
        self.name, self.run, self.by = name, run, by

    @classmethod
    def of_epoch(cls, name: str, run: RunId, epoch: int, newest: int) -> RunFenced:
        """Return the error for a driver of an assignment of a job that is over. ``name`` is empty if it is not known.
        ``newest`` is the same assignment if there is no later one."""
        error = cls(name, run, run)
        job = f"job {name!r}" if name else f"the job of run {run}"
        later = f", and assignment {newest} publishes now" if newest > epoch else ""
        error.message = f"assignment {epoch} of {job} is over{later}: stop this driver"
        error.args = (error.message,)
        return error


class SequenceError(CutwaterError):
    code = "sequence_error"


class SequenceGap(SequenceError):
    code = "sequence_gap"

    def __init__(self, message: str, *, expected: Sequence) -> None:
        super().__init__(message)
        self.expected = expected


class SequenceReused(SequenceError):
    code = "sequence_reused"


class SequenceExpired(SequenceError):
    code = "sequence_expired"


class AppendUnknown(CutwaterError):
    code = "append_unknown"


class Trimmed(CutwaterError):
    code = "trimmed"

    def __init__(self, asked: GLSN, first_left: GLSN, topic: str = "") -> None:
        """``topic`` is the name of the topic, or empty if it is not known where the error is raised."""
        of_topic = f" of topic {topic!r}" if topic else ""
        super().__init__(f"GLSN {asked}{of_topic} was trimmed: the first one left is {first_left}, start there")
        self.asked, self.first_left, self.topic = asked, first_left, topic

    def with_way_out(self, text: str) -> Trimmed:
        """Replace the way out in the message, for a reader that cannot simply start at the first position left."""
        self.message = f"{self.message.removesuffix(', start there')}. {text}"
        self.args = (self.message,)
        return self


class NotYetCommitted(CutwaterError):
    code = "not_yet_committed"
    retriable = True


class NoRecordHere(CutwaterError):
    code = "no_record_here"


class Damaged(CutwaterError):
    code = "damaged"
    retriable = True


class SavepointDamaged(Damaged):
    code = "savepoint_damaged"
    retriable = False


class CheckpointDamaged(Damaged):
    code = "checkpoint_damaged"
    retriable = False


class Malformed(CutwaterError):
    """A stored batch holds no records of its topic. Only versions that did not check batches stored such bytes. All
    replicas have the same bytes."""

    code = "malformed"

    def __init__(self, first_glsn: GLSN, last_glsn: GLSN, topic: str, why: str) -> None:
        of = f"GLSN {first_glsn} to {last_glsn}" if last_glsn > first_glsn else f"GLSN {first_glsn}"
        super().__init__(
            f"{of} of topic {topic!r} cannot be read: the checksum of the batch is right, but {why}. Its bytes are the "
            "same on all replicas: on_malformed='skip' goes on behind it, or trim the topic"
        )
        self.first_glsn, self.last_glsn, self.topic, self.why = first_glsn, last_glsn, topic, why


class Unavailable(CutwaterError):
    code = "unavailable"
    retriable = True


class NotLeader(Unavailable):
    code = "not_leader"


class ReadOnly(Unavailable):
    code = "read_only"


class NotAnswered(Unavailable):
    code = "not_answered"


class ResourceExhausted(Unavailable):
    code = "resource_exhausted"

    def __init__(self, message: str, *, retry_ms: int) -> None:
        super().__init__(f"{message}: try again in {retry_ms} ms")
        self.retry_ms = retry_ms


class QuotaExceeded(ResourceExhausted):
    """The request was not begun. ``retry_after`` is in seconds; ``subject`` and ``limit`` name the quota."""

    code = "quota_exceeded"

    def __init__(self, subject: str, limit: str, quota: int, retry_after: float) -> None:
        super().__init__(
            f"the quota of {subject} is used up ({limit} {quota} for the whole cluster), and nothing was done: send "
            f"less, or ask an administrator for more (`cutwater quota set {subject}`)",
            retry_ms=max(1, round(retry_after * 1_000)),
        )
        self.subject, self.limit, self.quota, self.retry_after = subject, limit, quota, retry_after


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class PipelineFailed(CutwaterError):
    code = "pipeline_failed"

    def __init__(self, message: str, *, pipeline: str, uid: str, glsn: GLSN) -> None:
        super().__init__(f"pipeline {pipeline!r}, operator {uid!r}, at GLSN {glsn}: {message}")
        self.pipeline, self.uid, self.glsn = pipeline, uid, glsn


class ProtocolViolation(CutwaterError):
    code = "protocol_violation"


class InvalidTransition(ProtocolViolation):
    code = "invalid_transition"


class ImpossibleReport(ProtocolViolation):
    code = "impossible_report"


class ContradictoryCommand(ProtocolViolation):
    code = "contradictory_command"


class OrderLayerLostMemory(ProtocolViolation):
    code = "order_layer_lost_memory"
