"""The table of routes of the REST service is complete, and its description says what the table says."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import msgspec
import pytest

from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS
from cutwater.service.app import RestService, ServiceSettings
from cutwater.service.gateway import Gateway, GatewayOptions
from cutwater.service.http.http_problems import STATUS_OF, TITLES
from cutwater.service.http.request_guard import allowed_hosts
from cutwater.service.openapi import describe, path_parameters, statuses_of
from cutwater.service.routes import BodyKind, RestRoute, RouteAccess
from cutwater.service.table import ROUTES

by_name = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
DOCUMENT = describe(ROUTES)


async def served() -> set[tuple[str, str]]:
    gateway = Gateway(GatewayOptions(("127.0.0.1:1",)))
    service = RestService(ServiceSettings(allowed_hosts("127.0.0.1", ())), gateway, ROUTES)
    return {(getattr(route, "path", ""), type(route).__name__) for route in service.router.routes}


def test_every_address_that_is_served_has_an_entry_and_every_entry_is_served() -> None:
    """Whatever is added to the router without an entry of the table is found here."""
    assert asyncio.run(served()) == {(route.path, "Route") for route in ROUTES}
    described = {(path, method.upper()) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == {(route.path, route.method) for route in ROUTES}


def test_names_and_methods_are_unique() -> None:
    assert [name for name, count in Counter(route.name for route in ROUTES).items() if count > 1] == []
    places = Counter((route.method, re.sub(r"{\w+}", "{}", route.path)) for route in ROUTES)
    assert [place for place, count in places.items() if count > 1] == []


@by_name
def test_a_route_says_what_it_asks_of_the_cluster(route: RestRoute) -> None:
    """A route of callers names requests or methods, all of which the table of access has a row for clients for."""
    is_caller = route.access is RouteAccess.CALLER
    assert is_caller == bool(route.requests or route.methods), route.name
    assert all(REQUEST_ACCESS[kind].is_for_clients for kind in route.requests)
    rows = [STORAGE_NODE_ACCESS.get(name) or METADATA_ACCESS[name] for name in route.methods]
    assert all(row.is_for_clients for row in rows)
    if not is_caller:
        assert not route.changes


@by_name
def test_a_route_is_described(route: RestRoute) -> None:
    found = DOCUMENT["paths"][route.path][route.method.lower()]
    assert found["operationId"] == route.name
    assert found["summary"] == route.summary
    assert route.summary[0].isupper()
    assert not route.summary.endswith(".")
    assert {*map(str, route.statuses), *map(str, statuses_of(route))} == set(found["responses"])
    assert {one["name"] for one in found["parameters"] if one["in"] == "path"} == set(path_parameters(route.path))
    assert set(route.path_types) >= {name for name in route.path_types if name in path_parameters(route.path)}
    query = {one["name"] for one in found["parameters"] if one["in"] == "query"}
    assert query == (set(route.query.__struct_fields__) if route.query is not None else set())
    assert ("requestBody" in found) == (route.body_kind is not BodyKind.NONE)
    assert found.get("x-cutwater-rights", []) == list(route.rights)
    if route.query is not None:
        assert route.query.__struct_config__.forbid_unknown_fields
    if route.body_kind is BodyKind.JSON:
        assert isinstance(route.body, type)
        assert route.method != "GET"


def test_every_status_of_an_error_has_a_title_and_is_described() -> None:
    assert set(STATUS_OF.values()) <= set(TITLES)
    assert {f"Problem{status}" for status in TITLES} == set(DOCUMENT["components"]["responses"])


def test_the_description_is_json_whose_references_lead_somewhere() -> None:
    text = msgspec.json.encode(DOCUMENT).decode()
    for reference in set(re.findall(r'"\$ref":"#/([^"]+)"', text)):
        place = DOCUMENT
        for part in reference.split("/"):
            place = place[part]
    assert DOCUMENT["openapi"].startswith("3.1.")


def test_nothing_of_a_request_can_name_a_file() -> None:
    """No module of the service opens files, but for the token and the certificate that its operator names."""
    import ast
    from pathlib import Path

    import cutwater.service

    folder = Path(cutwater.service.__file__).parent
    used = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            used |= {(path.name, name.partition(".")[0]) for name in names}
            if isinstance(node, ast.Name) and node.id in ("open", "eval", "exec", "compile"):
                used.add((path.name, node.id))
    forbidden = {"os", "io", "shutil", "tempfile", "glob", "subprocess", "urllib", "httpx", "http", "eval", "exec"}
    forbidden |= {"open", "compile", "pickle", "importlib", "pathlib", "zipfile", "cloudpickle"}
    # Options name files of the operator; addresses are unquoted with a function of urllib.
    allowed = {("options.py", "pathlib"), ("query.py", "urllib")}
    assert {one for one in used if one[1] in forbidden} == allowed
