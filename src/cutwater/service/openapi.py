"""Describes the API in the form of OpenAPI 3.1, from the table of routes and the types that it names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from cutwater import __version__
from cutwater.service.http.http_problems import PROBLEM_TYPE, TITLES, WITH_RETRY_AFTER, Problem
from cutwater.service.http.sessions import COOKIE
from cutwater.service.routes import KEY_PATTERN, BodyKind, RestRoute, RouteAccess, StillWorking

TITLE = "Cutwater"
_PARAMETER = re.compile(r"\{(\w+)\}")
_COMMON = (400, 413, 414, 421, 429, 431, 500)
_OF_CALLERS = (401, 403, 404, 409, 410, 422, 502, 503, 504)
_OF_CHANGES = (403,)
_OF_BODIES = (408, 415)
_TEMPLATE = "#/components/schemas/{name}"
_RETRY_AFTER = {"description": "Seconds to wait.", "required": True, "schema": {"type": "integer"}}
TAGS = {
    "cluster": "The cluster, its nodes, and what happens in it.",
    "records": "Topics, records and cursors.",
    "jobs": "Jobs, and what is asked of them.",
    "savepoints": "Savepoints of jobs.",
    "agents": "Agents, which run jobs.",
    "programs": "Programs of jobs.",
    "session": "Callers, and sessions of browsers.",
    "service": "The service itself.",
}


def describe(routes: Sequence[RestRoute]) -> dict[str, Any]:
    """Return the description as plain values."""
    named = _types(routes)
    schemas, components = msgspec.json.schema_components(named, ref_template=_TEMPLATE)
    of_type = dict(zip(map(repr, named), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of_type, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": __version__,
            "summary": "A replicated, totally ordered log, and jobs over it.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {_response_name(status): _problem_response(status) for status in sorted(TITLES)},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "A token of the cluster (cwt_...)."},
                "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
            },
        },
    }


def encode_document(routes: Sequence[RestRoute]) -> bytes:
    return msgspec.json.encode(describe(routes))


def path_parameters(path: str) -> tuple[str, ...]:
    return tuple(_PARAMETER.findall(path))


def statuses_of(route: RestRoute) -> tuple[int, ...]:
    """Return the statuses of problems with which a route may answer."""
    found = {*_COMMON}
    if route.access is RouteAccess.CALLER or route.name == "ready":
        found |= {*_OF_CALLERS}
    if route.changes:
        found |= {*_OF_CHANGES}
    if route.body_kind is not BodyKind.NONE:
        found |= {*_OF_BODIES}
    if route.changes:
        found.add(408)
    return tuple(sorted(found))


def _types(routes: Sequence[RestRoute]) -> list[Any]:
    found: dict[str, Any] = {repr(Problem): Problem, repr(StillWorking): StillWorking}
    for route in routes:
        for kind in (route.query, route.body, route.answer):
            if kind is not None and kind is not bytes:
                found[repr(kind)] = kind
    return list(found.values())


def _operation(route: RestRoute, of_type: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path(route), *_query(route, components), *_headers(route)],
        "responses": {**_answers(route, of_type), **_problems(route)},
        "security": [{}] if route.access is RouteAccess.OPEN else [{"token": []}, {"session": []}, {}],
    }
    if route.rights:
        found["x-cutwater-rights"] = list(route.rights)
        found["description"] = "Rights: " + "; ".join(route.rights) + "."
    if route.body_kind is BodyKind.JSON:
        found["requestBody"] = {
            "required": True,
            "content": {BodyKind.JSON.value: {"schema": of_type[repr(route.body)]}},
        }
    elif route.body_kind is BodyKind.ZIP:
        schema = {"type": "string", "format": "binary", "maxLength": route.body_bytes_max}
        found["requestBody"] = {"required": True, "content": {BodyKind.ZIP.value: {"schema": schema}}}
    return found


def _path(route: RestRoute) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": route.path_types.get(name, {"type": "string", "minLength": 1, "maxLength": 255}),
        }
        for name in path_parameters(route.path)
    ]


def _query(route: RestRoute, components: dict[str, Any]) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = components[route.query.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _parameter(told)}
        for name, told in schema["properties"].items()
    ]


def _parameter(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an argument of an address, which cannot be null."""
    found = {name: value for name, value in schema.items() if not (name == "default" and value is None)}
    options = found.pop("anyOf", None)
    if options is not None:
        (only,) = [option for option in options if option != {"type": "null"}]
        found |= only
    return found


def _headers(route: RestRoute) -> list[dict[str, Any]]:
    found = []
    if route.has_key:
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same request again under the same key, within 24 hours, is the same operation.",
                "schema": {"type": "string", "pattern": KEY_PATTERN},
            }
        )
    if route.is_stream and route.event_id:
        found.append(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "Go on after this event.",
                "schema": {"type": "string", "pattern": route.event_id},
            }
        )
    return found


def _answers(route: RestRoute, of_type: dict[str, Any]) -> dict[str, Any]:
    found = {str(status): _answer(route, of_type) for status in (route.status, *route.more_statuses)}
    if route.may_wait:
        found["202"] = {
            "description": "An agent works on it. The same request again waits for the answer.",
            "content": {"application/json": {"schema": of_type[repr(StillWorking)]}},
            "headers": {"Retry-After": _RETRY_AFTER},
        }
    return found


def _answer(route: RestRoute, of_type: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"description": "Done." if route.answer is None else "The answer."}
    if route.is_stream:
        found["description"] = "Server-sent events; the data of each is JSON of this type."
        found["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        found["x-cutwater-event"] = of_type[repr(route.answer)]
    elif route.answer is bytes:
        found["content"] = {"application/json": {"schema": {"type": "object"}}}
    elif route.answer is not None:
        found["content"] = {"application/json": {"schema": of_type[repr(route.answer)]}}
    if route.has_location:
        found["headers"] = {
            "Location": {"description": "Where the operation can be followed.", "schema": {"type": "string"}}
        }
    return found


def _problems(route: RestRoute) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{_response_name(status)}"} for status in statuses_of(route)}


def _response_name(status: int) -> str:
    return f"Problem{status}"


def _problem_response(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": f"{TITLES[status]}.",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": _TEMPLATE.format(name="Problem")}}},
    }
    if status in WITH_RETRY_AFTER:
        found["headers"] = {"Retry-After": _RETRY_AFTER}
    return found
