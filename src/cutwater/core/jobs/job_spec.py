"""What a job is asked to run: the specification of one version, and the checks of what users give."""

from __future__ import annotations

import enum
import math

import msgspec
from msgspec import Struct, field

from cutwater.core.access.principals import JOB_PREFIX
from cutwater.core.names import check_name
from cutwater.errors import InvalidArgument

SPEC_BYTES_MAX = 64 * 1024
"""Size of a specification as a message."""
PARALLELISM_MAX = 32_768
SLOTS_MAX = 1_024
"""Number of slots that one job may take, and that one agent may have."""
LABELS_MAX = 64
TEXT_CHARS_MAX = 4_096
DEFAULT_ROOT = "default"
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_LATER = _LETTERS | frozenset("._-")
_HEX = frozenset("0123456789abcdef")


class DesiredState(enum.StrEnum):
    """What the users of a job want. Agents and leaders work towards it."""

    RUNNING = "running"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    DELETED = "deleted"


class JobSpec(Struct, frozen=True, omit_defaults=True):
    """One version of a job. It contains no secrets: every principal that may describe the job sees it.

    ``program`` is the SHA-256 of the stored program, and ``entry`` the file or module in it with the pipeline, as
    ``fraud.py:p``. ``requirements`` is the SHA-256 of the list of pinned wheels, or empty. ``arguments`` are for the
    pipeline, ``conf`` for Spark. An agent must have all ``labels``, offer both roots by these names and, if ``master``
    is not empty, that master.
    """

    program: str
    entry: str
    arguments: dict[str, str] = field(default_factory=dict)
    conf: dict[str, str] = field(default_factory=dict)
    parallelism: int = 1
    slots: int = 1
    """Number of slots of an agent that the job takes."""
    labels: dict[str, str] = field(default_factory=dict)
    master: str = ""
    checkpoint_root: str = DEFAULT_ROOT
    savepoint_root: str = DEFAULT_ROOT
    restart: str = ""
    """The restart strategy as users write it (``exponential:max=60s``). Empty: the agent's default."""
    requirements: str = ""
    memory_bytes: int = 0
    """The most memory that the processes of the job may use; 0 for the limit of its slots at the agent."""
    cpus: float = 0.0
    """The most processors that the processes of the job may use; 0 for the limit of its slots at the agent."""


def principal_of_job(name: str) -> str:
    """Return the principal as which a job runs."""
    return f"{JOB_PREFIX}{name}"


def split_entry(entry: str) -> tuple[str, str]:
    """Split ``fraud.py:p`` into the file or module, and its variable or function ``p``."""
    path, colon, name = entry.rpartition(":")
    return (path, name) if colon and name.isidentifier() else (entry, "")


def check_job_name(name: str) -> None:
    """Check the name of a job. It is also the name of its pipeline's runs, and part of paths and URLs."""
    check_plain_name("job", name)


def check_plain_name(kind: str, name: str) -> None:
    check_name(kind, name)
    if name[0] not in _LETTERS or not _LATER.issuperset(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a {kind}: it has letters from A to Z, digits, '.', '_' and '-', and "
            "begins with a letter or a digit"
        )


def check_spec(spec: JobSpec) -> None:
    """Raise if a specification is not valid."""
    check_sha256("program", spec.program)
    if spec.requirements:
        check_sha256("requirements", spec.requirements)
    _check_text("entry", spec.entry)
    if not spec.entry:
        raise InvalidArgument("the entry of a job is empty: name the file in the program that has the pipeline")
    _check_text("restart", spec.restart)
    _check_text("master", spec.master)
    check_labels(spec.labels)
    check_name("checkpoint root", spec.checkpoint_root)
    check_name("savepoint root", spec.savepoint_root)
    if not 1 <= spec.parallelism <= PARALLELISM_MAX:
        raise InvalidArgument(f"parallelism is 1 to {PARALLELISM_MAX}, not {spec.parallelism}")
    if not 1 <= spec.slots <= SLOTS_MAX:
        raise InvalidArgument(f"a job takes 1 to {SLOTS_MAX} slots, not {spec.slots}")
    if spec.memory_bytes < 0 or not (math.isfinite(spec.cpus) and spec.cpus >= 0):
        raise InvalidArgument(
            f"limits are 0 (those of the slots) or more, not {spec.memory_bytes} bytes and {spec.cpus} processors"
        )
    size = len(msgspec.msgpack.encode(spec))
    if size > SPEC_BYTES_MAX:
        raise InvalidArgument(
            f"the specification has {size} bytes, and {SPEC_BYTES_MAX} is the most: put data into the program"
        )


def is_sha256(text: str) -> bool:
    return len(text) == 64 and _HEX.issuperset(text)


def check_sha256(what: str, text: str) -> None:
    if not is_sha256(text):
        raise InvalidArgument(f"{text[:80]!r} is no SHA-256 of {what}: it has 64 hexadecimal digits (0-9, a-f)")


def check_labels(labels: dict[str, str]) -> None:
    if len(labels) > LABELS_MAX:
        raise InvalidArgument(f"{len(labels)} labels are too many: {LABELS_MAX} is the most")
    for label, value in labels.items():
        check_name("label", label)
        if value:
            check_name("label's value", value)


def _check_text(what: str, text: str) -> None:
    if len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise InvalidArgument(f"{what} has up to {TEXT_CHARS_MAX} printable characters, not {text[:80]!r}")
