"""What one process of a job gets: a directory, a user, its program and packages, a token and limits.

All of it is there before the process starts, and goes when none of its processes is left. Nothing here blocks the event
loop: files are handled in threads, and every step has a deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from cutwater.agent.agent_options import AgentStartOptions
from cutwater.agent.job.job_setup import ClusterSetup, LimitsSetup, ProgramSetup
from cutwater.agent.job_tokens import JobToken
from cutwater.agent.processes.job_process import ProcessPlace
from cutwater.agent.processes.job_users import PASSABLE, JobUsers, OwnPlace, SystemUser, find_users, give_place
from cutwater.agent.processes.limits import Confinement, JobLimits, confinement
from cutwater.agent.roots import RootPlace, Roots
from cutwater.client.async_client import AsyncClient
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.programs.content_cache import remove_tree
from cutwater.programs.environments import INSTALL_SECONDS_MAX, Environment, Environments
from cutwater.programs.program_cache import ProgramCache, UnpackedProgram
from cutwater.programs.program_store import FETCH_SECONDS, fetch_program
from cutwater.runtime.local_files import make_directory
from cutwater.types import JobEpoch, JobNumber

MAKE_SECONDS = 120.0
ALWAYS_KEPT = frozenset(
    """
    PATH HOME LANG LC_ALL LC_CTYPE TZ LD_LIBRARY_PATH PYTHONPATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    XDG_CACHE_HOME
    JDK_JAVA_OPTIONS JAVA_HOME SPARK_HOME SPARK_CONF_DIR SPARK_LOCAL_IP HADOOP_HOME HADOOP_CONF_DIR YARN_CONF_DIR
    http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY
    """.split()
)
"""Variables of the agent's environment that its jobs get, too. None of them is a secret of the agent."""


class PlaceWanted(Struct, frozen=True):
    """What a process needs. ``key`` names it among all processes of the agent. ``spec``: the program to fetch, and the
    limits to keep; None for a process that imports no program. ``token_for``: the assignment whose token it gets, with
    the session of the agent; None for none. ``errand``: the token is for this errand."""

    key: str
    spec: JobSpec | None = None
    token_for: tuple[int, JobNumber, JobEpoch] | None = None
    errand: str = ""
    own: tuple[OwnPlace, ...] = ()
    """Directories of this machine that are to belong to the user of the process."""


class Workplace:
    """See the module. Close it when no process is left."""

    def __init__(self, key: str, directory: Path) -> None:
        self.key, self.directory = key, directory
        self.scratch = directory / "scratch"
        self.user: SystemUser | None = None
        self.limits = JobLimits()
        self.cluster = ClusterSetup("")
        self.place = ProcessPlace(str(self.scratch))
        self.renewing: asyncio.Task[None] | None = None
        self.program: UnpackedProgram | None = None
        self.environment: Environment | None = None

    @property
    def python(self) -> str:
        """The interpreter; empty for that of the agent."""
        return str(self.environment.python) if self.environment is not None else ""

    def program_setup(self, spec: JobSpec) -> ProgramSetup:
        assert self.program is not None
        program = self.program
        return ProgramSetup(str(program.directory), str(program.archive), spec.entry, spec.arguments)

    @property
    def limits_setup(self) -> LimitsSetup:
        return LimitsSetup(self.limits.memory_bytes, self.limits.cpus)


class Workshop:
    """Makes workplaces on this machine."""

    def __init__(self, options: AgentStartOptions) -> None:
        self.options = options
        self.users = JobUsers(find_users(options.job_users))
        self.confinement: Confinement = confinement()
        self.checkpoints, self.savepoints = options.checkpoints(), options.savepoints()
        directory, are_used = options.directory, self.users.are_used
        make_directory(directory)
        self._jobs = directory / "jobs"
        make_directory(self._jobs)
        self._programs = ProgramCache(directory / "programs", is_for_all_users=are_used)
        self._environments = Environments(directory / "environments", options.packages, is_for_all_users=are_used)
        for roots in (self.checkpoints, self.savepoints):
            roots.make()
        if are_used:
            self._open_ways()
        for left in self._jobs.iterdir():
            remove_tree(left)

    def _open_ways(self) -> None:
        """Let users of jobs reach their directories."""
        places = [root.local for roots in (self.checkpoints, self.savepoints) for root in roots.places.values()]
        for place in (self.options.directory, self._jobs, *(place for place in places if place is not None)):
            with suppress(OSError):
                place.chmod(PASSABLE)

    async def prepare(self, wanted: PlaceWanted, client: AsyncClient, agent: str) -> Workplace:
        """Make what a process needs. If this fails, nothing stays."""
        made = Workplace(wanted.key, self._jobs / wanted.key)
        try:
            await self._prepare(made, wanted, client, agent)
        except BaseException:
            await self.close(made)
            raise
        return made

    async def _prepare(self, made: Workplace, wanted: PlaceWanted, client: AsyncClient, agent: str) -> None:
        spec = wanted.spec
        slots = spec.slots if spec is not None else 1
        asked = (spec.memory_bytes, spec.cpus) if spec is not None else (0, 0.0)
        made.limits = self.options.limits.of(slots, *asked)
        made.user = self.users.take(wanted.key)
        await asyncio.to_thread(_make_directories, made, wanted.own)
        token = ""
        if wanted.token_for is not None:
            session, job, epoch = wanted.token_for
            maker = JobToken(
                client.repository,
                agent,
                session,
                (job, epoch),
                made.directory / "token",
                made.user,
                errand=wanted.errand,
            )
            token = await maker.make()
            if token:
                made.renewing = asyncio.create_task(maker.renew_for_ever())
        made.cluster = self.options.cluster_of(token)
        if spec is not None:

            async def fetch(sha256: str) -> bytes:
                return await fetch_program(client, sha256)

            async with asyncio.timeout(FETCH_SECONDS + MAKE_SECONDS):
                made.program = await self._programs.use(spec.program, fetch, seconds=MAKE_SECONDS)
            if spec.requirements:
                async with asyncio.timeout(FETCH_SECONDS + INSTALL_SECONDS_MAX):
                    made.environment = await self._environments.use(spec.requirements, fetch)
        made.place = self._place(made)

    def _place(self, made: Workplace) -> ProcessPlace:
        try:
            group, processors = self.confinement.open(made.key, made.limits)
        except OSError as error:
            raise InvalidArgument(f"the limits of the job cannot be set: {error}") from error
        user = made.user
        place = ProcessPlace(str(made.scratch), group, processors, self.options.nice)
        if user is None:
            return place
        return ProcessPlace(place.directory, group, processors, self.options.nice, user.uid, user.gid, user.groups)

    async def close(self, made: Workplace) -> None:
        """Give back what a process had, of which nothing is left."""
        if made.renewing is not None:
            made.renewing.cancel()
        for used in (made.program, made.environment):
            if used is not None:
                used.release()
        self.confinement.close(made.key)
        await asyncio.to_thread(remove_tree, made.directory)
        self.users.release(made.key)

    def environment_of(self, made: Workplace) -> Mapping[str, str]:
        """Return the variables of a process: few, and none with a secret of the agent."""
        kept = ALWAYS_KEPT | set(self.options.job_environment)
        found = {name: value for name, value in os.environ.items() if name in kept}
        if made.user is not None:
            found |= {"HOME": str(made.scratch), "USER": made.user.name, "LOGNAME": made.user.name}
        return found

    def place_of(self, roots: Roots, name: str, below: str) -> tuple[RootPlace, tuple[OwnPlace, ...]]:
        """Return a root, and a directory below it if that is one of this machine: that of a job, or a savepoint."""
        root = roots.of(name)
        return root, () if root.local is None else (OwnPlace(root.local, below),)


def _make_directories(made: Workplace, own: tuple[OwnPlace, ...]) -> None:
    """The directory itself stays the agent's, since the agent writes tokens there: what belongs to a job may be
    replaced by the job at any moment."""
    try:
        make_directory(made.directory)
        made.scratch.mkdir(mode=0o700, exist_ok=True)
        if made.user is not None:
            made.directory.chmod(PASSABLE)
            os.chown(made.scratch, made.user.uid, made.user.gid, follow_symlinks=False)
            for place in own:
                give_place(place, made.user)
    except OSError as error:
        raise CutwaterError(f"the directories of the job cannot be made: {error}") from error
