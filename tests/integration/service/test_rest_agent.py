"""A real agent behind the service: it loads programs that callers upload, in processes of their own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from cutwater.admin import local_cluster
from tests.integration.service.rest_kit import check_problem
from tests.integration.service.rest_processes import ZIP, rest_processes, zipped

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import os
from cutwater.pipeline import Pipeline

open({note!r}, "a").write(f"{{os.getpid()}}\\n")
p = Pipeline("clicks", log="./data")
p.source("clicks").filter(lambda row: row["page"] != "/health").sink("pages", uid="out")
"""


def test_an_agent_and_not_the_service_loads_what_is_uploaded(tmp_path: Path) -> None:
    note = tmp_path / "loaded"

    def asked(http: httpx.Client, text: str) -> httpx.Response:
        program = zipped(clicks=text)
        sha256 = hashlib.sha256(program).hexdigest()
        assert http.put(f"/v1/programs/{sha256}", content=program, headers=ZIP).status_code == 200
        body: dict[str, Any] = {"spec": {"program": sha256, "entry": "clicks.py:p"}}
        for _ in range(5):
            answer = http.post("/v1/jobs/clicks/validate?wait=20", json=body)
            if answer.status_code != 202:
                break
        return answer

    with rest_processes(tmp_path, is_secure=True, has_real_agent=True) as place, place.http() as http:
        place.cutwater("topic", "create", "clicks", "--schema", "page string")
        place.cutwater("acl", "allow", "job:clicks", "describe,read", "topic:clicks")
        told = asked(http, PROGRAM.format(note=str(note))).json()
        assert (told["pipeline"], told["sources"][0]["schema"]) == ("clicks", "page string")
        assert "source clicks" in told["plan"]
        loaded = {int(line) for line in note.read_text().splitlines()}
        members = local_cluster.load(place.directory).processes()
        assert loaded.isdisjoint({place.service_pid, os.getpid(), *(member.pid for member in members)})

        problem = check_problem(asked(http, "from nowhere import nothing\n"), 400, "invalid_argument")
        assert "nowhere" in problem["detail"]
        answer = asked(http, PROGRAM.format(note=str(note)).replace('"clicks", log', '"other", log'))
        assert "other" in check_problem(answer, 400, "invalid_argument")["detail"]
        assert http.get("/v1/jobs").json()["items"] == []
