"""The rights that a call needs: how they are found in its argument.

A need asks questions: pairs of a right and a resource. All of them must be answered with yes. Arguments name log
streams, topics, runs and parts by number, and rules name topics and runs by name, so a server provides ``NameLookup``.
What cannot be looked up has the name ``UNKNOWN_NAME``, which only a rule on all names of its kind (``topic:*``)
matches: other callers do not learn whether it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from cutwater.core.access.rights import ANY_NAME, CLUSTER, PROGRAMS_TOPIC, Resource, ResourceKind, Right
from cutwater.core.jobs.errands import ErrandKind
from cutwater.core.jobs.job_spec import principal_of_job
from cutwater.types import LogStreamId, RunId, TopicId

UNKNOWN_NAME = ""

Question = tuple[Right, Resource]

SOME_APPEND: Question = (Right.APPEND, Resource(ResourceKind.TOPIC, ANY_NAME))


class RunNames(NamedTuple):
    """The name of a run, which may be empty, and the principal that opened it; empty if access control was off."""

    name: str
    opener: str


class NameLookup(Protocol):
    """Names of what arguments name otherwise, as far as the server knows them; None if it does not."""

    def topic_of_stream(self, stream: LogStreamId) -> str | None: ...

    def topic_of_number(self, topic: TopicId) -> str | None: ...

    def topic_of_part(self, part: str) -> str | None:
        """Return the topic for which a part is staged; None if there is no such part. Storage nodes only."""
        ...

    def run(self, which: RunId | str) -> RunNames | None:
        """Find a run by its number or its key. The leader only."""
        ...

    def job_of_operation(self, operation: str) -> str | None:
        """Return the name of the job on which an operation is, or was. The leader only."""
        ...

    def principal_of_token(self, token: str) -> str | None: ...

    def conceal_stream(self, stream: LogStreamId) -> None:
        """Return if a log stream that did not exist would be denied by now. Raise what would be raised otherwise."""
        ...

    def conceal_number(self, topic: TopicId) -> None:
        """The same for the number of a topic."""
        ...


class Need(Struct, frozen=True):
    """Rights that a call needs. ``text`` says which, for the docs. ``is_by_number``: the argument names the resource by
    a number, so a caller that may not describe the resource must not learn its name. ``conceal`` is called before such
    a caller is denied: it makes the answer the one that it would get if nothing had that number."""

    questions: Callable[[Any, NameLookup], Iterable[Question]]
    text: str
    is_by_number: bool = False
    conceal: Callable[[Any, NameLookup], None] = lambda argument, names: None


def on_cluster(right: Right) -> Need:
    question = (right, CLUSTER)
    return Need(lambda argument, names: (question,), f"{right} on cluster")


def on_one(right: Right, resource: Resource) -> Need:
    """The right on this resource, whatever the argument is."""
    question = (right, resource)
    return Need(lambda argument, names: (question,), f"{right} on {resource}")


def on_named(right: Right, kind: ResourceKind, field: str) -> Need:
    """The right on the resource that a field of the argument names."""
    get = attrgetter(field)
    return Need(lambda argument, names: ((right, Resource(kind, get(argument))),), f"{right} on {kind}:<{field}>")


def on_topic_of_stream(right: Right) -> Need:
    """The right on the topic to which the log stream in the argument belongs."""
    return Need(
        lambda argument, names: ((right, _topic(names.topic_of_stream(argument.stream))),),
        f"{right} on topic:<topic of the log stream>",
        is_by_number=True,
        conceal=lambda argument, names: names.conceal_stream(argument.stream),
    )


def on_principal_or_all(field: str) -> Need:
    """To describe the principal that a field names; ``cluster-admin`` if it names none, or a group."""
    get = attrgetter(field)

    def questions(argument: Any, names: NameLookup) -> Iterable[Question]:
        name = get(argument)
        if not name or ":" in name:
            return ((Right.CLUSTER_ADMIN, CLUSTER),)
        return ((Right.DESCRIBE, Resource(ResourceKind.PRINCIPAL, name)),)

    return Need(questions, f"describe on principal:<{field}>, or cluster-admin on cluster for all")


def _append_as(argument: Any, names: NameLookup) -> Iterable[Question]:
    tag = argument.batch.producer
    return () if tag is None else ((Right.PRODUCE_AS, Resource(ResourceKind.PRODUCER, tag.producer)),)


def _append_to_part_topic(argument: Any, names: NameLookup) -> Iterable[Question]:
    return ((Right.APPEND, _topic(names.topic_of_number(argument.part.topic))),)


def _append_to_topic_of_part(part: Callable[[Any], str]) -> Callable[[Any, NameLookup], Iterable[Question]]:
    """A part that is not there needs no right, and the caller learns that: it stages the part again. The names of parts
    cannot be guessed."""

    def questions(argument: Any, names: NameLookup) -> Iterable[Question]:
        topic = names.topic_of_part(part(argument))
        return () if topic is None else ((Right.APPEND, _topic(topic)),)

    return questions


def _publish_run(argument: Any, names: NameLookup) -> Iterable[Question]:
    run = names.run(argument.run)
    return () if run is None else (*_use_run(run), *_as_assigned(argument, run.name))


def _use_run(run: RunNames) -> Iterable[Question]:
    """A run without a name belongs to the principal that opened it."""
    if run.name or not run.opener:
        return ((Right.PUBLISH, Resource(ResourceKind.RUN, run.name or UNKNOWN_NAME)),)
    return ((Right.ACT_AS, Resource(ResourceKind.PRINCIPAL, run.opener)), SOME_APPEND)


def _append_to_topics_of_parts(argument: Any, names: NameLookup) -> Iterable[Question]:
    topics = sorted({part.topic for part in argument.parts})
    return [(Right.APPEND, _topic(names.topic_of_number(topic))) for topic in topics]


def _open_run(argument: Any, names: NameLookup) -> Iterable[Question]:
    if not argument.name:
        return (SOME_APPEND,)
    return ((Right.PUBLISH, Resource(ResourceKind.RUN, argument.name)), *_as_assigned(argument, argument.name))


def _as_assigned(argument: Any, run: str) -> Iterable[Question]:
    """An epoch is a plain number, and a high one fences the job for good. So only the job itself may name one: its
    principal, for which agents get tokens, or one that may act as it."""
    if not isinstance(argument.job_epoch, int):
        return ()
    return ((Right.ACT_AS, Resource(ResourceKind.PRINCIPAL, principal_of_job(run))),)


def _open_again(argument: Any, names: NameLookup) -> Iterable[Question]:
    run = names.run(argument.key)
    return () if run is None or (run.name and run.name == argument.name) else _use_run(run)


def _delete_run(argument: Any, names: NameLookup) -> Iterable[Question]:
    run = names.run(argument.run)
    return ((Right.DELETE, Resource(ResourceKind.RUN, run.name if run is not None else UNKNOWN_NAME)),)


def _describe_owner(argument: Any, names: NameLookup) -> Iterable[Question]:
    owner = names.principal_of_token(argument.id) or UNKNOWN_NAME
    return ((Right.DESCRIBE, Resource(ResourceKind.PRINCIPAL, owner)),)


def on_job(right: Right, field: str = "name") -> Need:
    return on_named(right, ResourceKind.JOB, field)


def _as_job(argument: Any, names: NameLookup) -> Iterable[Question]:
    return ((Right.ACT_AS, Resource(ResourceKind.PRINCIPAL, principal_of_job(argument.name))),)


def _from_other_job(argument: Any, names: NameLookup) -> Iterable[Question]:
    other = argument.from_job
    return ((Right.JOB_OPERATE, Resource(ResourceKind.JOB, other)),) if other else ()


def _of_operation(argument: Any, names: NameLookup) -> Iterable[Question]:
    return ((Right.DESCRIBE, Resource(ResourceKind.JOB, names.job_of_operation(argument.operation) or UNKNOWN_NAME)),)


def _ask_agent(argument: Any, names: NameLookup) -> Iterable[Question]:
    job = Resource(ResourceKind.JOB, argument.name)
    if argument.kind is ErrandKind.VALIDATE:
        return ((Right.JOB_SUBMIT, job), *_as_job(argument, names))
    changes_or_shows = argument.kind in (ErrandKind.SAVEPOINT_DELETE, ErrandKind.STATE)
    return ((Right.JOB_OPERATE if changes_or_shows else Right.DESCRIBE, job),)


def _topic(name: str | None) -> Resource:
    return Resource(ResourceKind.TOPIC, UNKNOWN_NAME if name is None else name)


PRODUCE_AS_OF_BATCH = Need(_append_as, "produce-as on producer:<producer of the batch>, if it has one")
APPEND_FOR_PART = Need(
    _append_to_part_topic,
    "append on topic:<topic of the part>",
    True,
    lambda argument, names: names.conceal_number(argument.part.topic),
)
APPEND_FOR_FINISHED = Need(_append_to_topic_of_part(attrgetter("part")), "append on topic:<topic of the part>", True)
APPEND_FOR_DISCARDED = Need(_append_to_topic_of_part(str), APPEND_FOR_FINISHED.text, True)
_OF_RUN = "publish on run:<name of the run>; without a name, act-as on principal:<its opener> and append on some topic"
_OF_JOB = "with the epoch of a job, act-as on principal:job:<name>, too"
PUBLISH_RUN = Need(_publish_run, f"{_OF_RUN}; {_OF_JOB}", True)
APPEND_FOR_PARTS = Need(_append_to_topics_of_parts, "append on topic:<topic of each part>", True)
OPEN_RUN = Need(_open_run, f"publish on run:<name>; without a name, append on some topic; {_OF_JOB}")
OPEN_AGAIN = Need(_open_again, f"if the key is that of another name: {_OF_RUN}", True)
DELETE_RUN = Need(_delete_run, "delete on run:<name of the run>", True)
DESCRIBE_OWNER = Need(_describe_owner, "describe on principal:<principal of the token>", True)
AS_JOB = Need(_as_job, "act-as on principal:job:<name>")
FROM_OTHER_JOB = Need(_from_other_job, "job-operate on job:<from_job>, if it names one")
DESCRIBE_OPERATION = Need(_of_operation, "describe on job:<job of the operation>", True)
ASK_AGENT = Need(
    _ask_agent,
    "validate: job-submit on job:<name> and act-as on principal:job:<name>; state and savepoint-delete: job-operate on "
    "job:<name>; others: describe on job:<name>",
)
FIND_PROGRAM = on_one(Right.DESCRIBE, Resource(ResourceKind.TOPIC, PROGRAMS_TOPIC))
STORE_PROGRAMS = on_one(Right.APPEND, Resource(ResourceKind.TOPIC, PROGRAMS_TOPIC))
