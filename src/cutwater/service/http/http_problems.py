"""Problems as HTTP answers: ``application/problem+json`` (RFC 9457) with the codes of Cutwater's errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from cutwater.errors import (
    AlreadyExists,
    AppendUnknown,
    CheckpointDamaged,
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    Fenced,
    InvalidArgument,
    Malformed,
    NoRecordHere,
    NotFound,
    NotYetCommitted,
    PermissionDenied,
    PipelineFailed,
    ProtocolViolation,
    Refused,
    ResourceExhausted,
    SavepointDamaged,
    SequenceError,
    Trimmed,
    Unavailable,
)
from cutwater.protocol.errors import (
    FrameTooLarge,
    InternalError,
    Unauthenticated,
    UnknownMethod,
    Unproven,
    Untrusted,
    WrongCluster,
    WrongVersion,
)
from cutwater.runtime.redaction import without_secrets

PROBLEM_TYPE = "application/problem+json"
DETAIL_CHARS_MAX = 4_096
RETRY_SECONDS = 1

STATUS_OF: dict[type[CutwaterError], int] = {
    InvalidArgument: 400,
    FrameTooLarge: 413,
    UnknownMethod: 502,
    NotFound: 404,
    AlreadyExists: 409,
    Refused: 409,
    PermissionDenied: 403,
    Unauthenticated: 401,
    Unproven: 502,
    Untrusted: 502,
    WrongCluster: 502,
    WrongVersion: 502,
    Fenced: 409,
    SequenceError: 409,
    AppendUnknown: 504,
    Trimmed: 410,
    NotYetCommitted: 404,
    NoRecordHere: 404,
    Damaged: 503,
    SavepointDamaged: 422,
    CheckpointDamaged: 422,
    Malformed: 422,
    Unavailable: 503,
    ResourceExhausted: 429,
    DeadlineExceeded: 504,
    PipelineFailed: 422,
    ProtocolViolation: 502,
    InternalError: 502,
}
"""An error has the status of its nearest class in this table."""
WITH_RETRY_AFTER = frozenset({429, 503, 504})

TITLES = {
    400: "The request is wrong",
    401: "Credentials are needed",
    403: "Not allowed",
    404: "Not found",
    405: "No such method here",
    408: "The request came too slowly",
    409: "Refused in the present state",
    410: "No longer there",
    411: "The size is needed",
    413: "Too large",
    414: "The address is too long",
    415: "Another form is needed",
    421: "This service has another name",
    422: "Cannot be processed",
    429: "Too much at once",
    431: "The headers are too large",
    500: "A fault in the service",
    502: "The cluster gave no usable answer",
    503: "Not available now",
    504: "The time is up",
}


class Problem(Struct, frozen=True, omit_defaults=True):
    """What went wrong. ``code`` is stable and says what; ``detail`` is for people, and names a way out. ``retriable``:
    the same request may succeed later. ``request_id`` finds the request in the logs of the service."""

    type: str
    title: str
    status: int
    code: str
    detail: str = ""
    retriable: bool = False
    request_id: str = ""


class HttpRefusal(Exception):
    """A request that the service refuses by itself. ``reason`` is the label under which it is counted."""

    def __init__(self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.headers = dict(headers or {})


def status_of(error: CutwaterError) -> int:
    if isinstance(error, PermissionDenied) and not error.principal:
        return 401
    if isinstance(error, Unavailable) and not error.retriable:
        # What an agent says of one question, such as that its answer would be too large: nothing is down.
        return 422
    return next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)


def problem_of(error: CutwaterError, request_id: str) -> tuple[Problem, dict[str, str]]:
    """Return an error as a problem, and the headers that belong to it."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="cutwater"'
    if status in WITH_RETRY_AFTER:
        seconds = math.ceil(error.retry_ms / 1_000) if isinstance(error, ResourceExhausted) else RETRY_SECONDS
        headers["Retry-After"] = str(max(1, seconds))
    return make_problem(status, error.code, error.message, request_id, retriable=error.retriable), headers


def problem_of_refusal(refusal: HttpRefusal, request_id: str) -> tuple[Problem, dict[str, str]]:
    headers = dict(refusal.headers)
    if refusal.status == 401:
        headers.setdefault("WWW-Authenticate", 'Bearer realm="cutwater"')
    if refusal.status in WITH_RETRY_AFTER:
        headers.setdefault("Retry-After", str(RETRY_SECONDS))
    is_retriable = refusal.status in WITH_RETRY_AFTER or refusal.status == 408
    return make_problem(refusal.status, refusal.code, refusal.detail, request_id, retriable=is_retriable), headers


def make_problem(status: int, code: str, detail: str, request_id: str, *, retriable: bool = False) -> Problem:
    return Problem(
        f"urn:cutwater:error:{code}",
        TITLES.get(status, "Refused"),
        status,
        code,
        # It repeats parts of the request, such as a token in the place of a name.
        without_secrets(detail)[:DETAIL_CHARS_MAX],
        retriable,
        request_id,
    )


def encode_problem(problem: Problem) -> bytes:
    return msgspec.json.encode(problem)
