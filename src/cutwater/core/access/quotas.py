"""Quotas: limits on what a principal, or all members of a group together, may use of the whole cluster."""

from __future__ import annotations

from msgspec import Struct, structs

from cutwater.errors import InvalidArgument

LIMIT_MAX = 2**53
"""The largest limit. JSON and floating point represent it exactly."""


class QuotaLimits(Struct, frozen=True):
    """Limits, None where there is none. Bytes count what clients send (in) and get (out)."""

    bytes_in_per_s: int | None = None
    bytes_out_per_s: int | None = None
    requests_per_s: int | None = None
    connections: int | None = None
    subscriptions: int | None = None
    staged_bytes: int | None = None

    def __str__(self) -> str:
        given = ((name, value) for name, value in structs.asdict(self).items() if value is not None)
        return ", ".join(f"{name} {value}" for name, value in given) or "no limit"


class Quota(Struct, frozen=True):
    """The limits of ``subject``, a principal or ``group:<name>``. All quotas that apply to a principal hold at once."""

    subject: str
    limits: QuotaLimits


NO_LIMITS = QuotaLimits()


def check_limits(limits: QuotaLimits) -> None:
    if limits == NO_LIMITS:
        names = ", ".join(QuotaLimits.__struct_fields__)
        raise InvalidArgument(f"a quota sets at least one limit of {names}: remove the quota if none shall hold")
    for name, value in structs.asdict(limits).items():
        if value is not None and not 1 <= value <= LIMIT_MAX:
            raise InvalidArgument(f"{name} is 1 to {LIMIT_MAX}, or not set (without limit), not {value}")
