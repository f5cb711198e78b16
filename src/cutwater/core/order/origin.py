"""What decisions have in common: on whose request they were made, and when."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from cutwater.types import CutTime


class RequestOrigin(Struct, frozen=True, array_like=True):
    """The principal on whose request something is done, the request's id, and the token that it showed, if any. ``via``
    is the principal of the gateway that asked for it, if one did."""

    principal: str
    request: str = ""
    token: str = ""
    via: str = ""


class Attributed(Struct, frozen=True, kw_only=True):
    """A decision that may follow from a request. ``by`` is stored only if a principal is known, as the field is younger
    than the format."""

    by: RequestOrigin | UnsetType = UNSET


class Dated(Attributed, frozen=True, kw_only=True):
    """A decision that operators see. ``at`` is its time by the leader's clock, never before the last cut."""

    at: CutTime = CutTime(0)
