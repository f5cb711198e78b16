"""Rights, the resources that they are about, and patterns of resources.

Names that begin with ``_`` are internal. A pattern matches one only if it names it literally, or if its prefix begins
with ``_`` as well: ``topic:*`` does not match ``_audit``.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument


class Right(enum.StrEnum):
    READ = "read"
    APPEND = "append"
    DESCRIBE = "describe"
    CREATE = "create"
    ALTER = "alter"
    DELETE = "delete"
    TRIM = "trim"
    CURSOR = "cursor"
    PRODUCE_AS = "produce-as"
    PUBLISH = "publish"
    JOB_SUBMIT = "job-submit"
    JOB_OPERATE = "job-operate"
    ACT_AS = "act-as"
    CLUSTER_OPERATE = "cluster-operate"
    CLUSTER_ADMIN = "cluster-admin"
    AUDIT_READ = "audit-read"
    RUN_JOBS = "run-jobs"


class ResourceKind(enum.StrEnum):
    TOPIC = "topic"
    CURSOR = "cursor"
    PRODUCER = "producer"
    RUN = "run"
    JOB = "job"
    PRINCIPAL = "principal"
    CLUSTER = "cluster"


RIGHTS_OF_KIND: dict[ResourceKind, tuple[Right, ...]] = {
    ResourceKind.TOPIC: (
        *(Right.READ, Right.APPEND, Right.DESCRIBE, Right.CREATE, Right.ALTER, Right.DELETE, Right.TRIM),
    ),
    ResourceKind.CURSOR: (Right.CURSOR, Right.DESCRIBE),
    ResourceKind.PRODUCER: (Right.PRODUCE_AS, Right.DESCRIBE),
    ResourceKind.RUN: (Right.PUBLISH, Right.DELETE, Right.DESCRIBE),
    ResourceKind.JOB: (Right.JOB_SUBMIT, Right.JOB_OPERATE, Right.DESCRIBE),
    ResourceKind.PRINCIPAL: (Right.ACT_AS, Right.DESCRIBE),
    ResourceKind.CLUSTER: (
        *(Right.CLUSTER_OPERATE, Right.CLUSTER_ADMIN, Right.AUDIT_READ, Right.RUN_JOBS, Right.DESCRIBE),
    ),
}
"""The rights that exist on each kind of resource."""

INTERNAL_PREFIX = "_"
AUDIT_TOPIC = "_audit"
PROGRAMS_TOPIC = "_programs"
JOB_LOGS_TOPIC = "_job_logs"
PROGRAM_RUNS = "program:"
"""The beginning of the names of runs that store programs."""
ANY = "*"
"""At the end of a pattern: every name that begins like this."""


class Resource(Struct, frozen=True):
    """One resource. The cluster, of which there is one, has no name."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.kind != ResourceKind.CLUSTER else self.kind


CLUSTER = Resource(ResourceKind.CLUSTER)


class ResourcePattern(Struct, frozen=True, order=True):
    """A resource, or all resources of a kind whose names begin with ``name``."""

    kind: str
    name: str = ""
    is_prefix: bool = False

    def __str__(self) -> str:
        if self.kind == ResourceKind.CLUSTER:
            return self.kind
        return f"{self.kind}:{self.name}{ANY if self.is_prefix else ''}"

    def matches(self, resource: Resource) -> bool:
        if self.kind != resource.kind:
            return False
        return name_matches(self.name, resource.name) if self.is_prefix else self.name == resource.name


THE_CLUSTER = ResourcePattern(ResourceKind.CLUSTER)


def is_internal(name: str) -> bool:
    return name.startswith(INTERNAL_PREFIX)


ANY_NAME = "*"
"""In a question about topics or jobs: some name. Any rule that gives the right on a topic, or a job, answers it with
yes. No topic and no job can have this name; cursors, producers and runs can."""


def name_matches(prefix: str, name: str) -> bool:
    """Whether a prefix matches a name, see the module."""
    return name.startswith(prefix) and (not is_internal(name) or is_internal(prefix))


def parse_right(text: str) -> Right:
    try:
        return Right(text)
    except ValueError:
        raise InvalidArgument(f"there is no right {text!r}; rights: {', '.join(Right)}") from None


def parse_kind(text: str) -> ResourceKind:
    try:
        return ResourceKind(text)
    except ValueError:
        raise InvalidArgument(f"there is no kind of resource {text!r}; kinds: {', '.join(ResourceKind)}") from None


def parse_pattern(text: str) -> ResourcePattern:
    """Parse ``topic:orders``, ``topic:orders*``, ``topic:*`` or ``cluster``."""
    kind, _, name = text.partition(":")
    is_prefix = name.endswith(ANY)
    pattern = ResourcePattern(kind, name.removesuffix(ANY), is_prefix)
    check_pattern(pattern)
    return pattern


def parse_resource(text: str) -> Resource:
    """Parse ``topic:orders`` or ``cluster``."""
    kind, _, name = text.partition(":")
    resource = Resource(kind, name)
    check_resource(resource)
    return resource


def check_resource(resource: Resource) -> None:
    kind = parse_kind(resource.kind)
    if kind is ResourceKind.CLUSTER:
        if resource.name:
            raise InvalidArgument(f"the cluster has no name here: write 'cluster', not {str(resource.name)!r} after it")
        return
    check_name(kind, resource.name)


def check_pattern(pattern: ResourcePattern) -> None:
    kind = parse_kind(pattern.kind)
    if kind is ResourceKind.CLUSTER:
        if pattern.name or pattern.is_prefix:
            raise InvalidArgument("there is one cluster, without a name: write 'cluster'")
        return
    if ANY in pattern.name:
        raise InvalidArgument(
            f"{pattern.name!r} has a '*' that is not at its end: a pattern is a name, or the beginning of names and "
            "one '*'"
        )
    if pattern.name or not pattern.is_prefix:
        check_name(kind, pattern.name)


def check_rights(rights: tuple[str, ...], pattern: ResourcePattern) -> tuple[Right, ...]:
    """Return the rights in the order of ``Right``, each once. Raise if there are none, or if one of them does not exist
    on this kind of resource."""
    kind = parse_kind(pattern.kind)
    known = RIGHTS_OF_KIND[kind]
    asked = {parse_right(right) for right in rights}
    if not asked:
        raise InvalidArgument(f"name at least one right on {pattern}: {', '.join(known)}")
    wrong = [right for right in Right if right in asked and right not in known]
    if wrong:
        raise InvalidArgument(f"there is no right {wrong[0]!s} on a {kind}; rights on a {kind}: {', '.join(known)}")
    return tuple(right for right in Right if right in asked)
