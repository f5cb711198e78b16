"""Programs of jobs, and lists of the packages that they need: stored in the log, under their SHA-256."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from cutwater.core.jobs.job_requests import FetchProgramPlaceRequest
from cutwater.core.jobs.job_spec import check_sha256
from cutwater.core.requests import CatalogRequest, MakeJobTopicRequest, OpenRunRequest, PublishRequest
from cutwater.programs.archive_rules import ARCHIVE_BYTES_MAX
from cutwater.programs.program_store import is_program_stored, store_program, store_streamed
from cutwater.programs.requirements import LIST_BYTES_MAX, read_requirements
from cutwater.protocol.metadata_api import CHECK_PROGRAM
from cutwater.protocol.storage_api import FINISH_PART, STAGE
from cutwater.service.routes import BodyKind, RestCall, RestRoute, get, post, put

UPLOAD_SECONDS = 1_200.0
STORE_SECONDS = 30.0
STORES: dict[str, Any] = {
    "requests": (CatalogRequest, FetchProgramPlaceRequest, MakeJobTopicRequest, OpenRunRequest, PublishRequest),
    "methods": (CHECK_PROGRAM.name, STAGE.name, FINISH_PART.name),
    "tag": "programs",
}
OF_PROGRAM = {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}


class UploadedProgram(Struct, frozen=True):
    """A program that jobs may name. ``was_stored``: it was there before."""

    sha256: str
    bytes: int
    was_stored: bool


class ProgramStatus(Struct, frozen=True):
    sha256: str
    is_stored: bool


class RequirementsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A list of packages with exact versions and hashes, as ``pip-compile --generate-hashes`` writes it."""

    text: Annotated[str, Meta(min_length=1, max_length=LIST_BYTES_MAX)]


class StoredRequirements(Struct, frozen=True):
    sha256: str
    packages: tuple[str, ...]


async def put_program(call: RestCall[None, Any]) -> UploadedProgram:
    log = await call.ask.log()
    found = await store_streamed(log, call.path["sha256"], call.body, timeout=UPLOAD_SECONDS)
    return UploadedProgram(call.path["sha256"], found.bytes, found.was_stored)


async def program(call: RestCall[None, None]) -> ProgramStatus:
    sha256 = call.path["sha256"]
    check_sha256("program", sha256)
    return ProgramStatus(sha256, await is_program_stored(await call.ask.log(), sha256))


async def post_requirements(call: RestCall[None, RequirementsBody]) -> StoredRequirements:
    listed = read_requirements(call.body.text)
    await store_program(await call.ask.log(), listed.text.encode(), timeout=STORE_SECONDS - 2)
    return StoredRequirements(listed.sha256, listed.packages)


ROUTES: tuple[RestRoute, ...] = (
    put(
        "/v1/programs/{sha256}",
        "put_program",
        "Store a program: a zip with this SHA-256",
        put_program,
        answer=UploadedProgram,
        body=bytes,
        body_kind=BodyKind.ZIP,
        body_bytes_max=ARCHIVE_BYTES_MAX,
        seconds=UPLOAD_SECONDS,
        path_types=OF_PROGRAM,
        **STORES,
    ),
    get(
        "/v1/programs/{sha256}",
        "program",
        "Whether a program is stored",
        program,
        answer=ProgramStatus,
        requests=(FetchProgramPlaceRequest, CatalogRequest),
        methods=(CHECK_PROGRAM.name,),
        tag="programs",
        path_types=OF_PROGRAM,
    ),
    post(
        "/v1/requirements",
        "post_requirements",
        "Store a list of packages that a program needs",
        post_requirements,
        answer=StoredRequirements,
        body=RequirementsBody,
        body_bytes_max=2 * LIST_BYTES_MAX,
        seconds=STORE_SECONDS,
        **STORES,
    ),
)
