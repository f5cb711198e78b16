"""``cutwater job submit|validate|upgrade``: the commands that bring a program to the cluster.

A program is packed, stored in the log by its hash, and named in the specification of the job. It is never imported
here: only the agents that run jobs do that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from cutwater.admin.jobs import JobCalls
from cutwater.cli.commands.job_waiting import NameArgument, StepTimeoutOption, WaitOptions, finish
from cutwater.cli.framework.command import Bundle, under
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.framework.values import parse_pairs, parse_size
from cutwater.cli.io.job_output import runs_line
from cutwater.cli.io.output import show
from cutwater.cli.io.program_names import job_name
from cutwater.core.jobs.errand_bodies import ValidateAnswer
from cutwater.core.jobs.job_requests import JobDescription
from cutwater.core.jobs.job_spec import JobSpec, check_job_name, check_spec, split_entry
from cutwater.core.jobs.operations import Operation
from cutwater.errors import InvalidArgument, NotFound
from cutwater.jobs.restarts import parse
from cutwater.jobs.spark_conf import check_conf, parse_conf

if TYPE_CHECKING:
    from cutwater.client.async_client import AsyncClient

NO_PROGRAM = "0" * 64
"""Stands for the hash of a program that is not stored yet, in checks that come before."""
WHEEL = ".whl"
_place, _start = under("Where it runs"), under("How it starts")


@dataclass(frozen=True)
class SpecOptions(Bundle):
    """What a job is asked to run, besides the program. None means: not said."""

    entry: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:NAME]", help="The file of a directory or the module of a wheel that has the pipeline."
        ),
    ] = None
    parallelism: Annotated[int | None, typer.Option(min=1, help="How many tasks work at once; 1 if not said.")] = None
    arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the pipeline. May be repeated.")
    ] = None
    conf: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of Spark. May be repeated.")
    ] = None
    requirements: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Packages that the program needs, pinned with their hashes.")
    ] = None
    restart: Annotated[
        str | None,
        typer.Option(metavar="STRATEGY", help="When to start it again: none, fixed:…, exponential:… or rate:…."),
    ] = None
    slots: Annotated[int | None, _place(min=1, help="How many slots of an agent it takes; 1 if not said.")] = None
    label: Annotated[
        list[str] | None, _place(metavar="KEY=VALUE", help="A label that its agent must have. May be repeated.")
    ] = None
    master: Annotated[str | None, _place(metavar="NAME", help="A master of Spark that its agent offers.")] = None
    memory: Annotated[str | None, _place(metavar="SIZE", help="The most memory, such as 2g; by default by slots.")] = (
        None
    )
    cpus: Annotated[float | None, _place(metavar="N", min=0.0, help="The most processors; by default by slots.")] = None
    checkpoint_root: Annotated[str | None, _place(metavar="NAME", help="Where its checkpoints lie.")] = None
    savepoint_root: Annotated[str | None, _place(metavar="NAME", help="Where its savepoints lie.")] = None

    def spec(self, before: JobSpec) -> JobSpec:
        """Return the specification of before with the options that were given. Program and requirements, which are
        stored in the log, are not part of it."""
        said: dict[str, Any] = {
            "parallelism": self.parallelism,
            "slots": self.slots,
            "master": self.master,
            "checkpoint_root": self.checkpoint_root,
            "savepoint_root": self.savepoint_root,
            "cpus": self.cpus,
            "memory_bytes": None if self.memory is None else parse_size("--memory", self.memory),
            "restart": None if self.restart is None else _restart(self.restart),
            "arguments": _merged(before.arguments, self.arg, "--arg"),
            "conf": None if self.conf is None else before.conf | parse_conf(self.conf),
            "labels": _merged(before.labels, self.label, "--label"),
        }
        spec = structs.replace(before, **{name: value for name, value in said.items() if value is not None})
        check_spec(spec)
        # Where Spark runs is known to the agent only, which checks the settings once more.
        check_conf(spec.conf, "spark://agent")
        return spec


@dataclass(frozen=True)
class StartOptions(Bundle):
    """What a new job or version begins with."""

    from_savepoint: Annotated[str, _start(metavar="ID", help="Begin with the state of this savepoint.")] = ""
    replay_output: Annotated[
        bool, _start("--replay-output", help="Publish again what is published under its name.")
    ] = False
    allow_non_restored_state: Annotated[
        bool, _start("--allow-non-restored-state", help="Leave out state that the program does not have.")
    ] = False


ProgramArgument = Annotated[
    str, typer.Argument(metavar="PROGRAM[:NAME]", help="A Python file, a directory with --entry, or a wheel.")
]
ProgramAgainArgument = Annotated[
    str,
    typer.Argument(
        metavar="[PROGRAM[:NAME]]", help="The changed program: a Python file, a directory or a wheel; or the old one."
    ),
]


def submit(
    program: ProgramArgument,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name of the pipeline, if the program's text does not show it."),
    ] = None,
    from_job: Annotated[str, _start(metavar="NAME", help="The job whose savepoint --from-savepoint is.")] = "",
    *,
    spec: SpecOptions,
    start: StartOptions,
    options: WaitOptions,
    log: ClusterTarget,
) -> None:
    """Make a job from a program, and start it on an agent.

    The program is stored in the cluster, and runs there only: this command does not import it. The job has the name of
    its pipeline, and runs as the principal job:NAME.
    """
    if bool(from_job) != bool(start.from_savepoint):
        raise InvalidArgument("--from-savepoint and --from-job belong together: the savepoint is one of that job")
    given = GivenProgram.of(program, spec.entry)
    asked = spec.spec(JobSpec(NO_PROGRAM, given.entry))
    name = given.job if name is None else name
    check_job_name(name)

    async def work(client: AsyncClient) -> Any:
        stored = await _stored(client, given, spec.requirements, asked)
        return await JobCalls.of(client, timeout=log.timeout).submit(
            name,
            stored,
            savepoint=start.from_savepoint,
            from_job=from_job,
            replay_output=start.replay_output,
            allow_non_restored_state=start.allow_non_restored_state,
            key=options.idempotency_key,
        )

    answer = log.with_client(work)
    finish(log, answer, _runs, is_awaited=options.wait)


def upgrade(
    name: NameArgument,
    program: ProgramAgainArgument = "",
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Take nothing over from the present version: what is not said is the default."),
    ] = False,
    step_timeout: StepTimeoutOption = 0,
    *,
    spec: SpecOptions,
    start: StartOptions,
    options: WaitOptions,
    log: ClusterTarget,
) -> None:
    """Go on with another program, or other settings, from a savepoint that is taken for it.

    What is not said stays as in the present version; --arg, --conf and --label change single values. If the new version
    fails before it has decided its first batch, the one before goes on by itself.
    """
    given = GivenProgram.of(program, spec.entry) if program else None
    if given is None and anew:
        raise InvalidArgument("--anew takes nothing over, so the program is needed: name it")

    async def work(client: AsyncClient) -> Any:
        jobs = JobCalls.of(client, timeout=log.timeout)
        before = (await jobs.version(name)).spec
        if given is not None:
            base = JobSpec(NO_PROGRAM, given.entry) if anew else structs.replace(before, entry=given.entry)
        else:
            base = before if spec.entry is None else structs.replace(before, entry=spec.entry)
        stored = await _stored(client, given, spec.requirements, spec.spec(base))
        return await jobs.upgrade(
            name,
            stored,
            savepoint=start.from_savepoint,
            replay_output=start.replay_output,
            allow_non_restored_state=start.allow_non_restored_state,
            step_timeout=step_timeout,
            key=options.idempotency_key,
        )

    finish(log, log.with_client(work), _runs, is_awaited=options.wait)


def validate(
    program: ProgramArgument,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name of the pipeline, if the program's text does not show it."),
    ] = None,
    agent: Annotated[
        str, typer.Option(metavar="NAME", help="The agent to ask; by default any that could run it.")
    ] = "",
    *,
    spec: SpecOptions,
    start: StartOptions,
    log: ClusterTarget,
) -> None:
    """Let an agent load a program, and show its plan, its schemas, and what a savepoint would restore in it.

    Nothing is started, and no job is made. --from-savepoint is a savepoint of the job of that name, if there is one.
    """
    if start.replay_output:
        raise InvalidArgument("--replay-output is about output, and nothing runs here: leave it out")
    given = GivenProgram.of(program, spec.entry)
    asked = spec.spec(JobSpec(NO_PROGRAM, given.entry))
    name = given.job if name is None else name
    check_job_name(name)

    async def work(client: AsyncClient) -> ValidateAnswer:
        stored = await _stored(client, given, spec.requirements, asked)
        return await JobCalls.of(client, timeout=log.timeout).validate(
            name,
            stored,
            savepoint=start.from_savepoint,
            allow_non_restored_state=start.allow_non_restored_state,
            agent=agent,
        )

    found = log.with_client(work)
    show(found, "\n".join(_validated(found, start.from_savepoint)))


def _validated(found: ValidateAnswer, savepoint: str) -> Iterator[str]:
    yield found.plan.rstrip()
    for what, infos in (("reads", found.sources), ("writes", found.sinks)):
        for info in infos:
            yield f"{what} {info.topic!r}: {info.schema or 'a key and a value, in bytes'}"
    if savepoint:
        for what, names in (("restores", found.restored), ("leaves behind", found.left_behind), ("new", found.empty)):
            yield f"{what}: {', '.join(names) or 'nothing'}"
    yield from (f"note: {note}" for note in found.notes)


@dataclass(frozen=True)
class GivenProgram:
    """A program as named on the command line: where it is, what in it is the pipeline, and the name of the job."""

    path: Path
    entry: str
    job: str

    @classmethod
    def of(cls, given: str, entry: str | None) -> GivenProgram:
        path, name = (Path(given), "") if Path(given).exists() else _split_path(given)
        if not path.exists():
            raise NotFound(f"there is no program {str(path)!r}: name a Python file, a directory or a wheel")
        if path.is_dir() or path.suffix == WHEEL:
            if entry is None:
                raise InvalidArgument(
                    f"{path} has many files: say which one has the pipeline, with --entry, such as --entry main.py:p"
                )
            if path.is_dir() and split_entry(entry)[0].endswith(".py") and not (path / split_entry(entry)[0]).is_file():
                raise NotFound(f"there is no file {split_entry(entry)[0]!r} in {path}: --entry names one there")
        elif entry is not None:
            raise InvalidArgument(f"--entry is for directories and wheels: write {path}:NAME")
        said = entry if entry is not None else path.name + (f":{name}" if name else "")
        if entry is not None and name:
            raise InvalidArgument(f"the pipeline is named twice, as {name!r} and by --entry: say --entry alone")
        return cls(path, said, job_name(said, _text(path, split_entry(said)[0])))


def _split_path(given: str) -> tuple[Path, str]:
    path, name = split_entry(given)
    return Path(path), name


def _text(path: Path, file: str) -> str | None:
    """Return the text of the file with the pipeline, if it is one that can be read here."""
    place = path / file if path.is_dir() else path
    try:
        return place.read_text(encoding="utf-8") if place.suffix == ".py" else None
    except (OSError, ValueError):
        return None


async def _stored(client: AsyncClient, given: GivenProgram | None, requirements: Path | None, spec: JobSpec) -> JobSpec:
    """Store the program and the list of its packages, and return the specification that names them."""
    # They import Arrow, which help does not need.
    from cutwater.programs.packing import pack_program  # noqa: PLC0415
    from cutwater.programs.program_store import store_program  # noqa: PLC0415
    from cutwater.programs.requirements import read_requirements  # noqa: PLC0415

    if given is not None:
        packed = await asyncio.to_thread(pack_program, given.path)
        spec = structs.replace(spec, program=await store_program(client, packed.data))
    if requirements is not None:
        try:
            listed = read_requirements(requirements.read_bytes(), str(requirements))
        except OSError as error:
            raise InvalidArgument(f"--requirements {requirements} cannot be read: {error.strerror}") from error
        spec = structs.replace(spec, requirements=await store_program(client, listed.text.encode()))
    return spec


def _runs(operation: Operation, job: JobDescription | None) -> str:
    assert job is not None
    return runs_line(operation, job)


def _merged(before: dict[str, str], given: Sequence[str] | None, option: str) -> dict[str, str] | None:
    """Return values with those that were given in the place of earlier ones; None if none was given."""
    return None if given is None else parse_pairs(option, given, before)


def _restart(text: str) -> str:
    parse(text)
    return text
