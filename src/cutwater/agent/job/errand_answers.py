"""Answers questions about programs and savepoints: what ``errand_bodies`` says, as JSON.

Only ``validate`` imports a program. It answers with the error that a start would fail with, but does not mind that
output is published already: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, Final, TypeVar

import msgspec

from cutwater.agent.job.job_process import master_of, where_of_cluster
from cutwater.agent.job.job_setup import ErrandSetup
from cutwater.agent.job.program_entry import load_job
from cutwater.client.convert.json_values import encode
from cutwater.core.jobs import errand_bodies as b
from cutwater.core.jobs.errands import ERRAND_ANSWER_BYTES_MAX, ErrandKind
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.jobs.spark_conf import check_conf, refuse_open_ui
from cutwater.pipeline.graph import SinkNode, SourceNode
from cutwater.pipeline.keyed_state.keys import SLICES_DEFAULT
from cutwater.pipeline.local.run_checks import check_writes
from cutwater.pipeline.stream import Pipeline
from cutwater.savepoints.diffs import diff
from cutwater.savepoints.evolution import Restoration
from cutwater.savepoints.files import Files
from cutwater.savepoints.lookups import first_rows, uids_of
from cutwater.savepoints.savepoint import Savepoint, delete_savepoint, open_savepoint
from cutwater.schema_text import shown_columns
from cutwater.spark.pipeline.program import Program
from cutwater.spark.pipeline.runner import checked, connected
from cutwater.spark.savepoint.savepoint_restore import check_restores

STATE_ROWS_MAX: Final = 10_000
STATE_BYTES_MAX: Final = ERRAND_ANSWER_BYTES_MAX - 100_000
"""Size of the rows in an answer about state."""

OpenFiles = Callable[[], AbstractContextManager[Files]]
Question = TypeVar("Question")


def answer_of(setup: ErrandSetup, files: OpenFiles) -> bytes:
    """Return the answer to a question as JSON, or raise. ``files`` opens where savepoints are."""
    if setup.kind is ErrandKind.VALIDATE:
        return encode(_validated(setup, files))
    if not setup.savepoint:
        raise InvalidArgument(f"{setup.kind} is about a savepoint, and the question names none")
    with files() as opened:
        match setup.kind:
            case ErrandKind.SAVEPOINT_DESCRIBE:
                return encode(open_savepoint(setup.savepoint, files=opened).manifest)
            case ErrandKind.SAVEPOINT_VERIFY:
                found = open_savepoint(setup.savepoint, files=opened)
                found.verify()
                return encode(b.VerifyAnswer(len(found.manifest.files), found.manifest.bytes))
            case ErrandKind.SAVEPOINT_DIFF:
                pair = [open_savepoint(path, files=opened) for path in (setup.savepoint, setup.other_savepoint)]
                return encode(diff(*pair))
            case ErrandKind.SAVEPOINT_DELETE:
                delete_savepoint(setup.savepoint, files=opened)
                return encode({"deleted": setup.savepoint_id})
            case ErrandKind.STATE:
                return _state(open_savepoint(setup.savepoint, files=opened), _question(setup, b.StateQuestion))
    raise InvalidArgument(f"no process answers an errand of kind {setup.kind}")


def _question(setup: ErrandSetup, kind: type[Question]) -> Question:
    try:
        return msgspec.json.decode(setup.body, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the question is no {kind.__name__}: {error}") from None


def _state(savepoint: Savepoint, question: b.StateQuestion) -> bytes:
    if not 1 <= question.limit <= STATE_ROWS_MAX:
        raise InvalidArgument(f"the limit of rows is 1 to {STATE_ROWS_MAX}, not {question.limit}")
    uids = uids_of(savepoint, question.uid)
    if question.key and len(uids) != 1:
        raise InvalidArgument(f"say of which operator the key is: {', '.join(uids) or 'this savepoint has none'}")
    told: list[bytes] = []
    room, is_more = STATE_BYTES_MAX, False
    for uid in uids:
        rows = first_rows(savepoint, uid, question.key, question.limit + 1).to_pylist()
        is_more = is_more or len(rows) > question.limit
        kept: list[bytes] = []
        for row in rows[: question.limit]:
            kept.append(encode(row))
            room -= len(kept[-1])
            if room < 0:
                is_more = True
                kept.pop()
                break
        told.append(encode(uid) + b":[" + b",".join(kept) + b"]")
        if rows and not kept:
            raise InvalidArgument(
                f"the state of a key of operator {uid!r} is too large for an answer of {ERRAND_ANSWER_BYTES_MAX} bytes"
            )
    more = b',"more":true' if is_more else b""
    return b'{"operators":{' + b",".join(told) + b"}" + more + b"}"


def _validated(setup: ErrandSetup, files: OpenFiles) -> b.ValidateAnswer:
    question = _question(setup, b.ValidateQuestion)
    if setup.program is None or setup.cluster is None:
        raise InvalidArgument("only a program on a cluster can be validated")
    check_conf(setup.conf, master_of(setup.master))
    pipeline = load_job(setup.name, setup.program)
    where = where_of_cluster(setup.cluster)
    pipeline.log = where.servers
    if where.token():
        refuse_open_ui(setup.conf)
    check_writes(pipeline.name, pipeline.graph)
    with closing(connected(where)) as client:
        existing = {topic.name for topic in client.topics()}
        program = checked(pipeline, client, setup.parallelism, max(SLICES_DEFAULT, setup.parallelism))
        restored = Restoration((), (), ())
        if setup.savepoint:
            with files() as opened:
                try:
                    savepoint = open_savepoint(setup.savepoint, files=opened)
                    restored = check_restores(
                        client, program, savepoint, allow_non_restored_state=question.allow_non_restored_state
                    )
                except CutwaterError as error:
                    error.add_note(f"This is about savepoint {setup.savepoint_id}.")
                    if not question.allow_non_restored_state and "allow_non_restored_state" in error.message:
                        error.add_note("A rollback leaves no state behind; an upgrade to the same program can.")
                    raise
    sinks = _sinks(program)
    return b.ValidateAnswer(
        pipeline.name,
        pipeline.explain(),
        _sources(pipeline, program),
        sinks,
        tuple(own.uid for own in restored.operators),
        restored.left_behind,
        restored.empty,
        tuple(
            f"the topic {sink.topic!r} does not exist, and the job will create it"
            for sink in sinks
            if sink.topic not in existing
        ),
    )


def _sources(pipeline: Pipeline, program: Program) -> tuple[b.DataInfo, ...]:
    nodes = pipeline.graph.of_type(SourceNode)
    return tuple(b.DataInfo(node.topic, schema=shown_columns(program.rows_of(node.topic).schema)) for node in nodes)


def _sinks(program: Program) -> tuple[b.DataInfo, ...]:
    found = []
    for node in program.plan.graph.of_type(SinkNode):
        rows: Any = program.plan.rows_at(node.inputs[0])
        found.append(b.DataInfo(node.topic, node.uid, shown_columns(rows.schema)))
    return tuple(found)
