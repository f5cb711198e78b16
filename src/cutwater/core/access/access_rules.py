"""All of access control at one revision, as data."""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import CertificateRule, PrincipalGroup, TokenRecord
from cutwater.core.access.quotas import Quota
from cutwater.core.access.rules import Rule
from cutwater.types import Revision


class AccessRules(Struct, frozen=True):
    """All of access control at one revision: in snapshots, and as servers get it. It contains hashes of tokens, and so
    goes to servers of the cluster only."""

    revision: Revision = Revision(0)
    mode: AccessMode = AccessMode.OFF
    tokens: tuple[TokenRecord, ...] = ()
    rules: tuple[Rule, ...] = ()
    groups: tuple[PrincipalGroup, ...] = ()
    certificate_rules: tuple[CertificateRule, ...] = ()
    quotas: tuple[Quota, ...] = ()
