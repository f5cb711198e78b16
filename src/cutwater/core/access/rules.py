"""Allow rules, and which rights follow from which.

Nothing is allowed without a rule, and no rule forbids. A rule gives rights on a pattern of resources to a principal or
a group. There is one rule for each pair of subject and pattern; allowing more adds rights to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from cutwater.core.access.rights import (
    ANY_NAME,
    AUDIT_TOPIC,
    CLUSTER,
    JOB_LOGS_TOPIC,
    PROGRAM_RUNS,
    PROGRAMS_TOPIC,
    RIGHTS_OF_KIND,
    Resource,
    ResourceKind,
    ResourcePattern,
    Right,
    is_internal,
)


class Rule(Struct, frozen=True):
    """``subject``, a principal or ``group:<name>``, has these rights on these resources."""

    subject: str
    rights: tuple[str, ...]
    pattern: ResourcePattern

    def __str__(self) -> str:
        return f"{self.subject} {','.join(self.rights)} {self.pattern}"


GUARDED = frozenset((Right.APPEND, Right.ALTER, Right.DELETE, Right.TRIM))
"""Rights on internal names that ``cluster-admin`` does not imply: a change of the audit needs a rule of its own, and
that rule is in the audit."""


def sufficient(right: Right, resource: Resource) -> Iterator[tuple[Right, Resource]]:
    """Return the questions of which one must be answered by a rule, the most direct first.

    1. The right itself.
    2. To describe a resource, any right on it.
    3. To describe anything, ``cluster-operate``.
    4. To read or describe the audit, ``audit-read``.
    5. To store programs, ``job-submit`` on some job.
    6. To read programs, to append to the logs of jobs, and to describe jobs, ``run-jobs``.
    7. For everything, ``cluster-admin``, except ``GUARDED`` rights on internal names. It may store programs, though.
    """
    yield right, resource
    is_question = right is Right.DESCRIBE
    if is_question:
        for other in RIGHTS_OF_KIND[ResourceKind(resource.kind)]:
            if other is not right:
                yield other, resource
        if resource != CLUSTER:
            yield Right.CLUSTER_OPERATE, CLUSTER
    is_audit = resource.kind == ResourceKind.TOPIC and resource.name == AUDIT_TOPIC
    if is_audit and (is_question or right is Right.READ):
        yield Right.AUDIT_READ, CLUSTER
    is_storing = _is_storing_programs(right, resource)
    if is_storing:
        yield _SOME_SUBMIT
    if is_question and resource.kind == ResourceKind.JOB:
        yield Right.RUN_JOBS, CLUSTER
    if (resource.kind, resource.name) in _OF_AGENTS and right in _OF_AGENTS[resource.kind, resource.name]:
        yield Right.RUN_JOBS, CLUSTER
    is_guarded = right in GUARDED and is_internal(resource.name) and not is_storing
    if right is not Right.CLUSTER_ADMIN and not is_guarded:
        yield Right.CLUSTER_ADMIN, CLUSTER


_SOME_SUBMIT = (Right.JOB_SUBMIT, Resource(ResourceKind.JOB, ANY_NAME))

_OF_AGENTS = {
    (ResourceKind.TOPIC.value, PROGRAMS_TOPIC): (Right.READ, Right.DESCRIBE),
    (ResourceKind.TOPIC.value, JOB_LOGS_TOPIC): (Right.APPEND, Right.DESCRIBE),
}
"""What the agents that run jobs may do with internal topics."""


def _is_storing_programs(right: Right, resource: Resource) -> bool:
    if resource.kind == ResourceKind.TOPIC:
        return resource.name == PROGRAMS_TOPIC and right in (Right.APPEND, Right.DESCRIBE)
    is_run = resource.kind == ResourceKind.RUN and resource.name.startswith(PROGRAM_RUNS)
    return is_run and right in (Right.PUBLISH, Right.DESCRIBE)
