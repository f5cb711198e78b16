"""Agents: processes that run jobs, one per machine. What each says of itself, and what is decided about it."""

from __future__ import annotations

import enum

from msgspec import Struct, field

from cutwater.core.jobs.checkpoint_stores import check_checkpoint_store
from cutwater.core.jobs.job_spec import SLOTS_MAX, TEXT_CHARS_MAX, check_labels, check_plain_name
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument
from cutwater.types import CutTime, Revision

ROOTS_MAX = 64
MASTERS_MAX = 64
SESSION_MAX = 2**63 - 1


class JobIsolation(enum.StrEnum):
    """Whose jobs an agent runs at a time. Jobs of one system user can read each other's files and memory."""

    ONE_OWNER = "one-owner"
    """All its jobs have the same owner."""
    SHARED_USER = "shared-user"
    """Jobs of all owners, as one system user: the operator wants it so."""
    USER_PER_JOB = "user-per-job"
    """Jobs of all owners, each as a system user of its own."""


class AgentRoot(Struct, frozen=True, omit_defaults=True):
    """A place for checkpoints or savepoints that the operator of an agent has named. ``is_shared``: the same name means
    the same files at every agent. ``place`` is for operators to read."""

    name: str
    is_shared: bool = False
    place: str = ""


class AgentDescription(Struct, frozen=True, omit_defaults=True):
    """What an agent says of itself when it registers. ``masters`` are the masters of Spark that its jobs may name, the
    default first."""

    name: str
    slots: int
    labels: dict[str, str] = field(default_factory=dict)
    checkpoint_roots: tuple[AgentRoot, ...] = ()
    savepoint_roots: tuple[AgentRoot, ...] = ()
    masters: tuple[str, ...] = ("local",)
    isolation: JobIsolation = JobIsolation.ONE_OWNER
    host: str = ""
    version: str = ""
    limits: str = ""
    """What holds jobs to their limits of memory and processors, in words."""

    def checkpoint_root(self, name: str) -> AgentRoot | None:
        return next((root for root in self.checkpoint_roots if root.name == name), None)

    def savepoint_root(self, name: str) -> AgentRoot | None:
        return next((root for root in self.savepoint_roots if root.name == name), None)


class AgentRecord(Struct, frozen=True, omit_defaults=True):
    """An agent, as decided. ``session`` is a random number of one process: only the newest session speaks for the
    agent. ``is_alive`` is false from the decision that its lease has ended until it registers again."""

    description: AgentDescription
    session: int
    principal: str = ""
    """The principal that registered it, if access control was on."""
    is_alive: bool = True
    is_draining: bool = False
    since: CutTime = CutTime(0)
    """When it registered, or when its lease ended."""
    revision: Revision = Revision(0)
    """The revision of the jobs at which its orders changed."""

    @property
    def name(self) -> str:
        return self.description.name


def check_agent(agent: AgentDescription, session: int) -> None:
    """Raise if what an agent says of itself is not valid."""
    check_agent_name(agent.name)
    if not 1 <= session <= SESSION_MAX:
        raise InvalidArgument(f"the session of an agent is a random number from 1 to {SESSION_MAX}, not {session}")
    if not 1 <= agent.slots <= SLOTS_MAX:
        raise InvalidArgument(f"an agent has 1 to {SLOTS_MAX} slots, not {agent.slots}")
    check_labels(agent.labels)
    for kind, roots in (("checkpoint", agent.checkpoint_roots), ("savepoint", agent.savepoint_roots)):
        names = [root.name for root in roots]
        if len(names) > ROOTS_MAX or len(set(names)) < len(names):
            raise InvalidArgument(f"an agent has up to {ROOTS_MAX} {kind} roots, and each name once, not {names[:80]}")
        for root in roots:
            check_name(f"{kind} root", root.name)
            _check_text(f"the place of {kind} root {root.name!r}", root.place)
            if kind == "checkpoint":
                check_checkpoint_store(root.place, f"checkpoint root {root.name!r} of agent {agent.name!r}:")
    if not 1 <= len(agent.masters) <= MASTERS_MAX:
        raise InvalidArgument(f"an agent offers 1 to {MASTERS_MAX} masters, not {len(agent.masters)}")
    for master in agent.masters:
        check_name("master", master)
    _check_text("the host of an agent", agent.host)
    _check_text("the version of an agent", agent.version)
    _check_text("what an agent says of limits", agent.limits)


def check_agent_name(name: str) -> None:
    check_plain_name("job agent", name)


def _check_text(what: str, text: str) -> None:
    if len(text) > TEXT_CHARS_MAX or not (text.isprintable() or not text):
        raise InvalidArgument(f"{what} has up to {TEXT_CHARS_MAX} printable characters, not {text[:80]!r}")
