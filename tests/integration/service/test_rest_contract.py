"""The service answers as its own description says, whatever is asked: schemathesis tries each operation of the API with
what the description allows, and with what it does not.

The service and its cluster are processes. Nothing is down, so no answer may be 5xx, and every status, header, type
and body has to be one that is described. A failure prints a line that replays it (see ``tests/conftest.py``), and the
request as curl.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis import checks as c
from schemathesis.config import SchemathesisConfig

from cutwater.service.table import ROUTES
from tests.integration.service.rest_processes import PROGRAM, SHA256, ZIP, RestProcesses, rest_processes
from tests.soak import IS_SOAK, rounds

pytestmark = [pytest.mark.timeout(7_000 if IS_SOAK else 150), pytest.mark.xdist_group("rest-contract")]
EXAMPLES = int(os.environ.get("CUTWATER_CONTRACT_EXAMPLES", rounds(4, 150)))
STREAM_EXAMPLES = rounds(1, 20)
STREAMS = {route.name for route in ROUTES if route.is_stream}
CHECKS: list[Any] = [
    c.not_a_server_error,
    c.status_code_conformance,
    c.content_type_conformance,
    c.response_headers_conformance,
    c.response_schema_conformance,
    c.negative_data_rejection,
    c.unsupported_method,
    c.allow_header_conformance,
]
NAMES = sorted(route.name for route in ROUTES)


@schemathesis.serializer("application/zip")
def bytes_as_they_are(context: schemathesis.SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class KnownNames:
    """Things that exist, in place of names that schemathesis makes up."""

    def __init__(self, place: RestProcesses) -> None:
        self.place = place
        self.http = place.http()
        self.savepoint = self.operation = ""

    def prepare(self) -> None:
        """Make what earlier requests have removed."""
        assert self.http.put(f"/v1/programs/{SHA256}", content=PROGRAM, headers=ZIP).status_code == 200
        self.http.post("/v1/agents/a1/undrain")
        for row in self.http.get("/v1/jobs?limit=1000").json()["items"][20:]:
            self.http.delete(f"/v1/jobs/{row['name']}")
        spec = {"program": SHA256, "entry": "fraud.py:p"}
        answer = self.http.post("/v1/jobs", json={"name": "fraud", "spec": spec})
        if answer.status_code == 202:
            self._follow(answer)
        known = self.http.get("/v1/jobs/fraud/savepoints").json()["items"]
        if not known:
            self.http.post("/v1/jobs/fraud/start")
            answer = self.http.post("/v1/jobs/fraud/savepoints")
            if answer.status_code == 202:
                self._follow(answer)
            known = self.http.get("/v1/jobs/fraud/savepoints").json()["items"]
        self.savepoint = known[0]["id"] if known else "0" * 32
        self.operation = self.http.get("/v1/jobs/fraud/operations").json()["items"][0]["id"]

    def _follow(self, answer: httpx.Response) -> None:
        self.http.get(f"{answer.headers['location']}/follow?seconds=20")

    @property
    def by_parameter(self) -> dict[str, str]:
        return {
            "job": "fraud",
            "topic": "payments",
            "agent": "a1",
            "version": "1",
            "node": "1",
            "stream": "1",
            "run": "1",
            "glsn": "1",
            "cursor": "billing",
            "sha256": SHA256,
            "savepoint": self.savepoint,
            "operation": self.operation,
        }


@pytest.fixture(scope="module", params=[False, True], ids=["open", "secure"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnownNames]:
    with rest_processes(tmp_path_factory.mktemp("contract"), is_secure=request.param) as place:
        place.cutwater("topic", "create", "payments", "--schema", "user string, amount bigint")
        names = KnownNames(place)
        yield names
        names.http.close()


@pytest.fixture(scope="module")
def api(known: KnownNames) -> Any:
    # Any 4xx refuses. Whether it is one that is described, another check says.
    rejection = {"negative_data_rejection": {"expected-statuses": ["4xx"]}}
    config = SchemathesisConfig.from_dict({"checks": rejection})
    return schemathesis.openapi.from_url(f"{known.place.url}/v1/openapi.json", config=config)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_as_described(known: KnownNames, api: Any, name: str) -> None:
    known.prepare()
    operation = api.find_operation_by_id(name)
    is_stream = name in STREAMS

    @settings(
        max_examples=STREAM_EXAMPLES if is_stream else EXAMPLES,
        deadline=None,
        phases=[Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=st.one_of(
            operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
            operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
        ),
        is_known=st.booleans(),
    )
    def check(case: Any, is_known: bool) -> None:
        if is_known and case.path_parameters:
            case.path_parameters = {
                name: known.by_parameter.get(name, value) for name, value in case.path_parameters.items()
            }
        if is_stream and isinstance(case.query, dict) and str(case.query.get("seconds", 9)).isdigit():
            case.query["seconds"] = 1
        case.call_and_validate(base_url=known.place.url, headers=known.place.headers, checks=CHECKS, timeout=100)

    check()


def test_nothing_failed_inside(known: KnownNames) -> None:
    log = (known.place.directory.parent / "service.log").read_text()
    assert "Traceback" not in log, log[-4_000:]
