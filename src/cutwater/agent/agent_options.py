"""The options with which an operator starts an agent, and what the agent says of itself because of them."""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from cutwater import __version__
from cutwater.agent.job.job_setup import ClusterSetup
from cutwater.agent.processes.limits import SlotLimits
from cutwater.agent.roots import RootPlace, Roots
from cutwater.client.cluster.credentials import Access, token_access
from cutwater.core.jobs.agents import AgentDescription, JobIsolation, check_agent
from cutwater.errors import InvalidArgument
from cutwater.jobs.places import state_directory
from cutwater.programs.environments import PackageSource

LOCAL = "local"


class AgentStartOptions(Struct, frozen=True):
    """See the module. ``token`` is the agent's own, or the file that has it; ``context`` is TLS as it uses it. ``tls``
    are the files of the authority that it trusts, and of its own certificate and key: empty texts if there are none."""

    name: str
    servers: str
    token: str | Path = ""
    context: ssl.SSLContext | None = None
    tls: tuple[str, str, str] = ("", "", "")
    slots: int = 1
    labels: dict[str, str] = {}
    checkpoint_roots: tuple[RootPlace, ...] = ()
    savepoint_roots: tuple[RootPlace, ...] = ()
    masters: tuple[str, ...] = (LOCAL,)
    work_dir: Path | None = None
    is_shared_user: bool = False
    job_users: tuple[str, ...] = ()
    limits: SlotLimits = SlotLimits()
    nice: int = 0
    packages: PackageSource = PackageSource()
    job_environment: tuple[str, ...] = ()
    """Names of variables that jobs get from the environment of the agent, besides those that all get."""
    drain_seconds: float = 60.0
    host: str = ""
    job_process: str = "cutwater.agent.job.job_process"
    """The module that runs in the process of a job, and the one that answers an errand."""
    errand_process: str = "cutwater.agent.job.errand_process"

    def __repr__(self) -> str:
        """Leave out the token: this text gets into messages and logs."""
        return f"AgentStartOptions(name={self.name!r}, servers={self.servers!r})"

    @property
    def access(self) -> Access:
        return token_access(self.context, self.token, insecure=False)

    @property
    def directory(self) -> Path:
        """Where everything of the agent lies."""
        given = self.work_dir or state_directory().with_name("agents") / self.name
        return given.absolute()

    @property
    def isolation(self) -> JobIsolation:
        if self.job_users:
            return JobIsolation.USER_PER_JOB
        return JobIsolation.SHARED_USER if self.is_shared_user else JobIsolation.ONE_OWNER

    def checkpoints(self) -> Roots:
        return Roots("checkpoint", self.checkpoint_roots, self.directory / "checkpoints")

    def savepoints(self) -> Roots:
        return Roots("savepoint", self.savepoint_roots, self.directory / "savepoints")

    def cluster_of(self, token_file: str) -> ClusterSetup:
        """Return how a job reaches the cluster. Its token takes the place of the agent's credentials; while access
        control is off there is none, and a certificate may yet be needed to connect."""
        ca, certificate, key = self.tls
        if token_file:
            certificate = key = ""
        return ClusterSetup(self.servers, token_file, ca, certificate, key)

    def description(self, limits: str) -> AgentDescription:
        """Return what the agent says of itself. ``limits`` says what holds jobs to their limits."""
        if self.is_shared_user and self.job_users:
            raise InvalidArgument("--shared-user and --job-users contradict each other: leave one out")
        told = AgentDescription(
            self.name,
            self.slots,
            self.labels,
            self.checkpoints().described,
            self.savepoints().described,
            self.masters or (LOCAL,),
            self.isolation,
            self.host,
            __version__,
            limits,
        )
        check_agent(told, 1)
        return told


class AgentServing(Struct, frozen=True):
    """What an agent says when it has registered."""

    agent: str
    slots: int
    lease_ms: int
    pid: int
    checkpoint_roots: tuple[str, ...]
    limits: str
