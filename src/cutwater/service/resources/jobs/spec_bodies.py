"""Specifications of jobs as callers send them, and their checks. A program is named by its hash, and never imported."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, field, structs

from cutwater.core.jobs.job_spec import (
    DEFAULT_ROOT,
    LABELS_MAX,
    PARALLELISM_MAX,
    SLOTS_MAX,
    TEXT_CHARS_MAX,
    JobSpec,
    check_spec,
)
from cutwater.errors import InvalidArgument
from cutwater.jobs.restarts import parse
from cutwater.jobs.spark_conf import check_conf

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Entry = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS_MAX)]
Parallelism = Annotated[int, Meta(ge=1, le=PARALLELISM_MAX)]
Slots = Annotated[int, Meta(ge=1, le=SLOTS_MAX)]
Labels = Annotated[dict[str, str], Meta(max_length=LABELS_MAX)]
PlainText = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
RootName = Annotated[str, Meta(min_length=1, max_length=255)]
Requirements = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
MemoryBytes = Annotated[int, Meta(ge=0, le=2**62)]
Cpus = Annotated[float, Meta(ge=0, le=1_000_000)]
Step = Annotated[int, Meta(ge=0, le=86_400)]
"""Seconds that an agent tries a step of an operation; 0 leaves it to the agent."""
ANY_MASTER = "spark://agent"
"""Where Spark runs is known to the agent only, which checks the settings once more."""


class SpecBody(Struct, frozen=True, forbid_unknown_fields=True):
    """What a job is to run. ``program`` is the SHA-256 of a stored program, ``entry`` the file or module in it that has
    the pipeline, such as ``fraud.py:p``, and ``requirements`` the SHA-256 of a stored list of packages. ``arguments``
    are for the pipeline, ``conf`` for Spark: no secrets, since everyone who may describe the job sees them. Its agent
    must have all ``labels``, and offer the roots and the master of these names."""

    program: Sha256
    entry: Entry
    arguments: dict[str, str] = field(default_factory=dict)
    conf: dict[str, str] = field(default_factory=dict)
    parallelism: Parallelism = 1
    slots: Slots = 1
    labels: Labels = field(default_factory=dict)
    master: PlainText = ""
    checkpoint_root: RootName = DEFAULT_ROOT
    savepoint_root: RootName = DEFAULT_ROOT
    restart: PlainText = ""
    requirements: Requirements = ""
    memory_bytes: MemoryBytes = 0
    cpus: Cpus = 0.0


class SpecChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What changes in the present version. In ``arguments``, ``conf`` and ``labels``, single values change, and null
    removes one."""

    program: Sha256 | UnsetType = UNSET
    entry: Entry | UnsetType = UNSET
    arguments: dict[str, str | None] | UnsetType = UNSET
    conf: dict[str, str | None] | UnsetType = UNSET
    parallelism: Parallelism | UnsetType = UNSET
    slots: Slots | UnsetType = UNSET
    labels: dict[str, str | None] | UnsetType = UNSET
    master: PlainText | UnsetType = UNSET
    checkpoint_root: RootName | UnsetType = UNSET
    savepoint_root: RootName | UnsetType = UNSET
    restart: PlainText | UnsetType = UNSET
    requirements: Requirements | UnsetType = UNSET
    memory_bytes: MemoryBytes | UnsetType = UNSET
    cpus: Cpus | UnsetType = UNSET


def spec_of(body: SpecBody) -> JobSpec:
    """Return a specification as the cluster stores it, checked as far as that is possible without an agent."""
    return _checked(JobSpec(**structs.asdict(body)))


def changed(before: JobSpec, changes: SpecChanges) -> JobSpec:
    said: dict[str, Any] = {}
    for name, value in structs.asdict(changes).items():
        if value is UNSET:
            continue
        said[name] = _merged(getattr(before, name), value) if isinstance(value, dict) else value
    if not said:
        raise InvalidArgument("nothing changes: say in `change` what is to be different")
    return _checked(structs.replace(before, **said))


def _merged(before: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    found = {name: value for name, value in before.items() if name not in changes}
    return found | {name: value for name, value in changes.items() if value is not None}


def _checked(spec: JobSpec) -> JobSpec:
    check_spec(spec)
    check_conf(spec.conf, ANY_MASTER)
    if spec.restart:
        parse(spec.restart)
    return spec
