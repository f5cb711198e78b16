"""What the command line shows of jobs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.testing
from job_kit import FAILURE, J1, SPEC
from msgspec import UNSET, structs
from rich.console import Console

from cutwater.cli.io.job_output import tell_job, versions_table
from cutwater.cli.main import app
from cutwater.client.cluster.metadata_client import no_such_topic
from cutwater.core.jobs.job_records import JobPhase, JobRecord, JobVersion
from cutwater.core.jobs.job_requests import JobDescription
from cutwater.core.requests import Catalog, TopicInfo
from cutwater.types import GLSN, CutTime, Revision, TopicId

GOOD = JobVersion(1, SPEC, has_come_up=True)
JOB = JobRecord(J1, "fraud", "", (GOOD,), 1, has_come_up=True, failure=FAILURE, failed_version=5)


def description(*versions: int, job: JobRecord = JOB) -> list[str]:
    return list(tell_job(JobDescription(job, JobPhase.RUNNING, versions)))


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ((1,), "1, has decided its first batch"),
        ((1, 2, 3, 4, 5), "1 (others: 2 to 5), has decided its first batch"),
        ((1, 3, 5, 6), "1 (others: 3, 5 to 6), has decided its first batch"),
    ],
)
def test_a_description_names_the_present_version_and_the_others(versions: tuple[int, ...], told: str) -> None:
    assert f"  version:     {told}" in description(*versions)


def test_a_description_names_the_version_that_failed() -> None:
    assert "  last error:  version 5 failed: pipeline_failed: boom" in description(1, 5)
    assert not any("last error" in line for line in description(1, job=structs.replace(JOB, failure=None)))


def test_a_list_of_versions_tells_which_came_up() -> None:
    versions = (GOOD, JobVersion(2, SPEC), JobVersion(3, SPEC), structs.replace(GOOD, number=4))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(versions_table(versions, 3))
    states = [
        re.search(r"present, not up yet|never came up|came up|present", line) for line in capture.get().splitlines()
    ]
    assert [state[0] for state in states if state] == ["came up", "never came up", "present, not up yet", "came up"]


def test_variables_of_job_commands_have_the_names_of_their_options() -> None:
    told: Any = typer.testing.CliRunner().invoke(app, ["job", "submit", "--help"])
    assert re.search(r"CUTWATER_JOB_SUBMIT_IDEMPOTENCY_KEY +--idempotency-key", told.output)
    assert "CUTWATER_JOB_SUBMIT_KEY" not in told.output


def test_the_topics_that_exist_are_named_without_internal_ones() -> None:
    topics = tuple(
        TopicInfo(TopicId(n), name, GLSN(0), internal=True if name.startswith("_") else UNSET)
        for n, name in enumerate(("_job_logs", "clicks"))
    )
    catalog = Catalog(Revision(1), GLSN(0), CutTime(0), topics, ())
    assert no_such_topic("click", catalog).message == "there is no topic 'click'; topics: clicks"
