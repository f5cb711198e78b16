"""Decisions about access control. They are part of the one sequence of decisions, see ``core.order.decisions``.

None of them contains a secret: of a token there is the SHA-256 only.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, UnsetType

from cutwater.core.access.principals import CertificateRule, JobOfToken, PrincipalGroup, Scope
from cutwater.core.access.quotas import QuotaLimits
from cutwater.core.access.rights import ResourcePattern
from cutwater.core.order.origin import Dated
from cutwater.types import CutTime


class AccessMode(enum.StrEnum):
    """``off``: every client may do everything. ``permissive``: the same, but what the rules would deny is recorded, and
    access control itself is protected. ``enforced``: the rules hold."""

    OFF = "off"
    PERMISSIVE = "permissive"
    ENFORCED = "enforced"


class CreateToken(Dated, frozen=True, tag=True):
    """Makes a token known. Its creator is the principal of the decision."""

    id: str
    sha256: str
    principal: str
    scopes: tuple[Scope, ...] = ()
    expires: CutTime = CutTime(0)
    of_job: JobOfToken | UnsetType = UNSET
    """The token is a job's, and ends with its assignment. It is stored only if it is so, as the field is younger than
    the format."""
    parent: str | UnsetType = UNSET
    """The token of which it is a child. Children that have expired by now are forgotten."""


class RevokeToken(Dated, frozen=True, tag=True):
    """Ends a token and its children."""

    id: str


class ExpireToken(Dated, frozen=True, tag=True):
    """A token ends at this time, earlier than it would have, and so do its children at the latest."""

    id: str
    expires: CutTime


class NoteTokenUse(Dated, frozen=True, tag=True):
    """Tokens were used on these days, counted from 1970-01-01. This changes no right, and so no revision."""

    days: dict[str, int]


class AllowRights(Dated, frozen=True, tag=True):
    """Adds rights to the rule of this subject and pattern."""

    subject: str
    rights: tuple[str, ...]
    pattern: ResourcePattern


class RemoveRights(Dated, frozen=True, tag=True):
    """Removes rights from the rule of this subject and pattern. A rule without rights is gone."""

    subject: str
    rights: tuple[str, ...]
    pattern: ResourcePattern


class SetGroup(Dated, frozen=True, tag=True):
    """The group has exactly these members from now on."""

    group: PrincipalGroup


class DeleteGroup(Dated, frozen=True, tag=True):
    """Deletes a group, and the rules and the quota that name it."""

    name: str


class SetCertificateRules(Dated, frozen=True, tag=True):
    """Replaces all rules that map certificates to principals. The first that matches decides."""

    rules: tuple[CertificateRule, ...]


class SetQuota(Dated, frozen=True, tag=True):
    subject: str
    limits: QuotaLimits


class RemoveQuota(Dated, frozen=True, tag=True):
    subject: str


class SetAccessMode(Dated, frozen=True, tag=True):
    mode: AccessMode


AccessDecision = (
    CreateToken
    | RevokeToken
    | ExpireToken
    | NoteTokenUse
    | AllowRights
    | RemoveRights
    | SetGroup
    | DeleteGroup
    | SetCertificateRules
    | SetQuota
    | RemoveQuota
    | SetAccessMode
)

WIDENING = CreateToken | NoteTokenUse | AllowRights | SetQuota | RemoveQuota
"""Decisions that take no right away from any caller."""
