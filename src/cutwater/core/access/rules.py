"""Allow rules, and which rights follow from which.

Nothing is allowed without a rule, and no rule forbids. A rule gives rights on a pattern of resources to a principal or
a group. There is one rule for each pair of subject and pattern; allowing more adds rights to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from cutwater.core.access.rights import (
    AUDIT_TOPIC,
    CLUSTER,
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
    5. For everything, ``cluster-admin``, except ``GUARDED`` rights on internal names.
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
    if right is not Right.CLUSTER_ADMIN and not (right in GUARDED and is_internal(resource.name)):
        yield Right.CLUSTER_ADMIN, CLUSTER
