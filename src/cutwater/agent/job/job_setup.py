"""What the agent tells a process of a job: the first line on its standard input, as JSON. No variables of the
environment count besides.

**The process of a job** runs one attempt of one assignment::

    PYTHON -P -m cutwater.agent.job.job_process EVENTS

1. ``PYTHON`` is the interpreter of the environment that the job's list of requirements has, or that of the agent.
2. ``EVENTS`` is the number of an inherited file descriptor to which the process writes lines: ``FromJob``.
3. Standard input has ``JobSetup`` first, then lines: ``ToJob``. When it ends, the process kills its whole session at
   once and is gone: so it dies with the agent.
4. Standard output and error get what the program and Spark print, unless ``log_file`` is not empty.
5. It must be the leader of a session of its own (``start_new_session``). All that it starts stays in that session, and
   the agent kills what is left of it when the process is gone.

The last line is ``JobEnds``. If there is none, the process was killed, or crashed. The exit code says nothing else.

**The process of an errand** answers one question::

    PYTHON -P -m cutwater.agent.job.errand_process EVENTS

Everything is as above, with ``ErrandSetup`` as the only line on its standard input and ``ErrandEnds`` as the only one
that it writes. The agent gives an errand up by closing standard input, or by killing the session. What it prints is for
the agent's own log.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct, field

from cutwater.core.jobs.errands import ErrandKind
from cutwater.jobs.messages import Told


class ClusterSetup(Struct, frozen=True, omit_defaults=True):
    """The cluster, with the credentials of the job's principal. All are paths of files that the process can read, and,
    with a master other than ``local``, Spark's workers too, at the same place.

    ``token_file``: the agent replaces the file, atomically, when it has a newer token. Empty without access control.
    """

    servers: str
    """As ``cutwater.connect`` takes it."""
    token_file: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""


class ProgramSetup(Struct, frozen=True, omit_defaults=True):
    """A program, as ``ProgramCache`` unpacked it, and what the specification says about it."""

    directory: str
    """``UnpackedProgram.directory``."""
    archive: str
    """``UnpackedProgram.archive``: the zip, for Spark's workers on other machines."""
    entry: str
    arguments: dict[str, str] = field(default_factory=dict)


class LimitsSetup(Struct, frozen=True, omit_defaults=True):
    """The limits under which the agent has put the process, so that Spark keeps to them; 0 for none. They are those of
    all processes of the job together."""

    memory_bytes: int = 0
    cpus: float = 0.0


class JobSetup(Struct, frozen=True, omit_defaults=True):
    """One attempt of one assignment of a job."""

    job: int
    name: str
    """The name of the job. The pipeline of the program must have it."""
    epoch: int
    attempt: int
    version: int
    cluster: ClusterSetup
    program: ProgramSetup
    parallelism: int
    checkpoint: str
    """Where the checkpoint of this assignment is to be: the place of the root, and ``CheckpointPointer.path`` of
    ``StartJob`` behind it. The process finds the checkpoint that it goes on from next to this one, in the line, and
    makes the directories. It may be a path of this machine, or a URL of a file system that Hadoop knows."""
    savepoint_root: str
    """The place of the root for savepoints. ``SaveJob.path`` and ``StopJob.path`` are below it."""
    scratch: str
    """An empty directory for this attempt, which the agent removes afterwards: the working directory of the process,
    its temporary files and those of Spark."""
    owner: str = ""
    predecessor: str = ""
    """The full path of ``StartPoint.checkpoint``, if there is one; in the same root."""
    savepoint: str = ""
    """The full path of the savepoint that ``StartPoint.savepoint`` names, if it names one. It counts if no checkpoint
    of the line has begun."""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    conf: dict[str, str] = field(default_factory=dict)
    master: str = ""
    """The master of Spark; empty or ``local`` for this machine."""
    limits: LimitsSetup = LimitsSetup()
    log_file: str = ""
    """A file to which standard output and error are appended; empty: they stay what they are."""


class ErrandSetup(Struct, frozen=True, omit_defaults=True):
    """A question for which an agent needs a process: one that imports a program, or that reads a savepoint."""

    kind: ErrandKind
    """All but ``log``."""
    name: str
    """The name of the job."""
    scratch: str
    """As for a job."""
    body: Raw = Raw(b"{}")
    """The question, see ``errand_bodies``."""
    cluster: ClusterSetup | None = None
    """For ``validate`` only, which reads the catalog of topics."""
    program: ProgramSetup | None = None
    """For ``validate`` only."""
    parallelism: int = 1
    savepoint: str = ""
    """The full path of the savepoint that the errand names, if it names one."""
    savepoint_id: str = ""
    """Its id, for answers and errors."""
    other_savepoint: str = ""
    """The full path of the second savepoint of ``savepoint-diff``."""
    conf: dict[str, str] = field(default_factory=dict)
    master: str = ""
    limits: LimitsSetup = LimitsSetup()
    seconds: float = 0.0
    """How long it may take; 0 for no limit of its own."""


class ErrandEnds(Struct, frozen=True, tag=True, omit_defaults=True):
    """What came of an errand: JSON as ``errand_bodies`` says, or an error."""

    body: Raw = Raw(b"")
    error: Told | None = None


read_job_setup = msgspec.json.Decoder(JobSetup).decode
read_errand_setup = msgspec.json.Decoder(ErrandSetup).decode
read_errand_ends = msgspec.json.Decoder(ErrandEnds).decode
