"""Begins the checkpoint of an assignment of a job from that of the assignment before.

Each assignment has a directory of its own, because a driver of an earlier one may still run, or be paused and resumed,
and writes into its own. The run under the present epoch is opened first: from then on no earlier driver publishes, so
the last decided batch is final. Then the files up to this batch are copied, and nothing else is read:

1. A note that the copy has begun, ``succession.json``. A directory with such a note is made anew after a crash.
2. Offsets and commits of the last batches. Of a batch that is decided and not recorded as done, there is an offset and
   no commit: Spark runs it again, and the log answers that it is decided. A batch that is only planned is not copied,
   and is planned anew.
3. The state at the beginning of the next batch: of each state store one snapshot, the changes after it, and the files
   that the snapshot names. Spark completes these before it records the batch as done, and never changes them.
4. The id of the query, which is the key of the run, and Cutwater's note.
5. The note again, which now says that the copy is done.

On this machine, files of state are hard links: Spark replaces files and never changes them, and what one directory
removes stays in the other.
"""

from __future__ import annotations

import io
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from cutwater.client.client import Client
from cutwater.client.publish.runs import Run, RunStart
from cutwater.errors import InvalidArgument, NotFound, Refused, Unavailable
from cutwater.spark.savepoint.checkpoints import NOTE, Checkpoint, damaged

MARK: Final = "succession.json"
LOCK: Final = "cutwater.lock"
THREADS: Final = 8
LOOKS_MAX: Final = 5
LOOK_SECONDS: Final = 0.2
"""How often, and how long between, it looks for files of state that the earlier driver has just replaced by others."""
PREDECESSORS_MAX: Final = 1_000
_VERSION: Final = re.compile(r"(?P<number>\d+)(?:_(?P<id>[^.]+))?\.(?P<kind>zip|changelog)")


class Succession(Struct, frozen=True):
    """The contents of ``succession.json``: from where a checkpoint was begun, for which assignment, and after which
    batch. ``predecessor`` is a path, or only a name if it is in the same directory as this checkpoint: other machines
    may have that elsewhere."""

    predecessor: str
    job_epoch: int
    batch: int = -1
    is_done: bool = False


def begin_from(client: Client, name: str, checkpoint: Checkpoint, predecessor: str, job_epoch: int) -> None:
    """Begin a checkpoint from that of an earlier assignment. If that is done already, do nothing."""
    if job_epoch < 1:
        raise InvalidArgument(
            f"the checkpoint {checkpoint.path} succeeds {predecessor} without an assignment: only assignments of jobs "
            "succeed each other, so give job_epoch"
        )
    mark, predecessor = mark_of(checkpoint), _named_from(checkpoint, predecessor)
    if mark is not None and (mark.job_epoch, mark.predecessor) != (job_epoch, predecessor):
        raise Refused(
            f"the checkpoint {checkpoint.path} was begun by assignment {mark.job_epoch} from {mark.predecessor}, and "
            f"not by assignment {job_epoch} from {predecessor}: each assignment has a directory of its own"
        )
    if mark is not None and mark.is_done:
        return
    if mark is None and (checkpoint.key is not None or checkpoint.planned()):
        raise Refused(
            f"the checkpoint {checkpoint.path} is in use, and was not begun from {predecessor}: each assignment has a "
            "directory of its own"
        )
    _copy(client, name, checkpoint, Succession(predecessor, job_epoch))


def fence(client: Client, name: str, checkpoint: Checkpoint, start: RunStart, job_epoch: int) -> None:
    """Open the run of a checkpoint, so that earlier assignments end before this one reads anything. The run of a
    checkpoint without a key is opened by the first micro-batch."""
    key = checkpoint.key
    if key is None:
        return
    run = client.open_run(name, key, start=start, job_epoch=job_epoch)
    mark = mark_of(checkpoint)
    if mark is not None and run.last_batch > max(checkpoint.planned(), default=-1):
        # An earlier driver has published its first batch after the copy was made, and before the run was opened.
        _write(checkpoint, structs.replace(mark, is_done=False))
        raise Unavailable(
            f"batch {run.last_batch} was decided while {checkpoint.path} was begun from {mark.predecessor}: start "
            "again, and the copy is made anew"
        )


def mark_of(checkpoint: Checkpoint) -> Succession | None:
    path = f"{checkpoint.path}/{MARK}"
    try:
        return msgspec.json.decode(checkpoint.files.read(path), type=Succession)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise damaged(path, f"it is not what Cutwater writes there ({error})") from None


def has_begun(checkpoint: Checkpoint) -> bool:
    """Report whether anything was written into a checkpoint that an assignment could go on from, or not."""
    return mark_of(checkpoint) is not None or checkpoint.note() is not None or checkpoint.key is not None


def require_nothing_decided(client: Client, name: str, path: str, since: int) -> None:
    """Refuse to begin anew at a path, if an assignment since this one has decided batches: then it has a checkpoint."""
    for run in client.find_runs(name):
        if run.job_epoch >= since and run.last_batch >= 0:
            raise NotFound(
                f"there is no checkpoint in {path}, and run {run.run} of {name!r} has decided batch "
                f"{run.last_batch}: is the checkpoint root there on this machine, and the same as on the others? If "
                "the checkpoint is lost, start the job from a savepoint"
            )


def _named_from(checkpoint: Checkpoint, predecessor: str) -> str:
    line, _, name = predecessor.rstrip("/").rpartition("/")
    return name if line == checkpoint.path.rpartition("/")[0] else predecessor


def predecessor_in(checkpoint: Checkpoint, mark: Succession) -> str:
    """Return the path of the checkpoint from which one was begun."""
    if "/" in mark.predecessor:
        return mark.predecessor
    return f"{checkpoint.path.rpartition('/')[0]}/{mark.predecessor}"


def _write(checkpoint: Checkpoint, mark: Succession) -> None:
    checkpoint.files.write(f"{checkpoint.path}/{MARK}", msgspec.json.encode(mark) + b"\n")


def _copy(client: Client, name: str, checkpoint: Checkpoint, mark: Succession) -> None:
    source = _source(Checkpoint(predecessor_in(checkpoint, mark), checkpoint.files))
    run = _fenced(client, name, source.key, mark.job_epoch)
    if source.key is None and source.note() is None:
        require_nothing_decided(client, name, source.path, 1)
    if run is not None:
        mark = structs.replace(mark, batch=run.last_batch)
    source = _with_batch(source, mark.batch)
    _write(checkpoint, mark)
    for entry in checkpoint.files.list(checkpoint.path):
        if entry not in (MARK, LOCK):
            checkpoint.files.delete(f"{checkpoint.path}/{entry}")
    if mark.batch >= 0:
        _Copy(source, checkpoint).batch(mark.batch)
    for entry in ("metadata", NOTE):
        if source.files.exists(f"{source.path}/{entry}"):
            checkpoint.files.write(f"{checkpoint.path}/{entry}", source.files.read(f"{source.path}/{entry}"))
    checkpoint.follow_move()
    _write(checkpoint, structs.replace(mark, is_done=True))


def _source(source: Checkpoint) -> Checkpoint:
    """Return the checkpoint to copy. If one was not completely begun itself, it is the one before."""
    first = source
    for _ in range(PREDECESSORS_MAX):
        mark = mark_of(source)
        if mark is None or mark.is_done:
            return source
        source = Checkpoint(predecessor_in(source, mark), source.files)
    raise damaged(f"{first.path}/{MARK}", "it names a predecessor that names another one, and so on without end")


def _with_batch(source: Checkpoint, batch: int) -> Checkpoint:
    """Return the checkpoint that has the last decided batch. An assignment may have died after it had copied, and
    before it had opened the run, so that the one before it went on."""
    for _ in range(PREDECESSORS_MAX):
        mark = mark_of(source)
        if mark is None or batch <= mark.batch or batch in source.planned():
            break
        source = Checkpoint(predecessor_in(source, mark), source.files)
    return source


def _fenced(client: Client, name: str, key: str | None, job_epoch: int) -> Run | None:
    """Open the run with a key, if the log knows it. If it does not, nothing of it is decided, and ``fence`` opens it as
    soon as it is known where it begins."""
    if key is None or all(run.key != key for run in client.find_runs(name)):
        return None
    return client.open_run(name, key, job_epoch=job_epoch)


class _Copy:
    """Copies what belongs to one batch from one checkpoint to another."""

    def __init__(self, source: Checkpoint, target: Checkpoint) -> None:
        self._source, self._target, self._files = source, target, source.files

    def batch(self, last: int) -> None:
        planned = self._source.planned()
        if last not in planned:
            raise Refused(
                f"the checkpoint {self._source.path} is an old copy: micro-batch {last} of it is in the log, and the "
                f"last one that is planned there is {planned[-1] if planned else 'none'}. Go on with the checkpoint "
                "that was used last, or start from a savepoint with a new one"
            )
        is_done = last in self._source.committed()
        done = last if is_done else last - 1
        for batch in range(max(0, done - 1), last + 1):
            if batch in planned:
                # Reading it checks that it is whole.
                self._source.offset(batch)
                self._small(f"offsets/{batch}")
        if done >= 0:
            self._small(f"commits/{done}")
            self._state(done + 1)

    def _small(self, name: str) -> None:
        self._target.files.write(f"{self._target.path}/{name}", self._files.read(f"{self._source.path}/{name}"))

    def _state(self, version: int) -> None:
        """Copy the state that the batch with this number begins with. The earlier driver may still replace files by
        others, and remove old ones."""
        target = f"{self._target.path}/state"
        for look in range(LOOKS_MAX):
            if look:
                time.sleep(LOOK_SECONDS)
            try:
                names = list(self._files_of_state("state", version))
                with ThreadPoolExecutor(THREADS) as threads:
                    list(threads.map(self._large, names))
            except FileNotFoundError:
                continue
            self._files.keep(target)
            return
        raise damaged(f"{self._source.path}/state", f"the state after micro-batch {version - 1} is not there")

    def _large(self, name: str) -> None:
        self._files.copy(f"{self._source.path}/{name}", f"{self._target.path}/{name}")

    def _files_of_state(self, directory: str, version: int) -> Iterator[str]:
        """Yield the files that make up the state at a version. Raises ``FileNotFoundError`` if some are missing."""
        entries = self._files.entries(f"{self._source.path}/{directory}")
        for entry, is_directory in entries.items():
            if is_directory and entry in ("_stateSchema", "_metadata"):
                yield from self._described(f"{directory}/{entry}", version)
            elif is_directory:
                yield from self._files_of_state(f"{directory}/{entry}", version)
        for entry in needed(entries, version):
            yield f"{directory}/{entry}"
            if entry.endswith(".zip"):
                # Of the other files that a store has, only those that a snapshot names are complete for certain.
                path = f"{self._source.path}/{directory}/{entry}"
                yield from (f"{directory}/{name}" for name in named_in(self._files.read(path), path))

    def _described(self, directory: str, version: int) -> Iterator[str]:
        """Yield schemas of state, and what Spark records per batch about an operator. Their names begin with the
        number of the batch that wrote them."""
        for entry, is_directory in self._files.entries(f"{self._source.path}/{directory}").items():
            number = re.match(r"\d+", entry)
            if number is not None and not is_directory:
                if int(number[0]) < version:
                    yield f"{directory}/{entry}"
            elif is_directory:
                yield from self._described(f"{directory}/{entry}", version)


def needed(entries: Iterable[str], version: int) -> list[str]:
    """Return the snapshot and the changes after it that make up a version of a store. If names have unique ids, the
    commits say which of them count, so all up to the version are returned."""
    known = [match for match in map(_VERSION.fullmatch, entries) if match]
    if not known:
        return []
    found = [match for match in known if int(match["number"]) <= version]
    if any(match["id"] for match in found):
        return [match[0] for match in found]
    snapshots = {int(match["number"]): match[0] for match in found if match["kind"] == "zip"}
    changes = {int(match["number"]): match[0] for match in found if match["kind"] == "changelog"}
    first = max(snapshots, default=0)
    missing = [number for number in range(first + 1, version + 1) if number not in changes]
    if missing:
        raise FileNotFoundError(f"{missing[0]}.changelog")
    return [*([snapshots[first]] if first else []), *(changes[number] for number in range(first + 1, version + 1))]


def named_in(data: bytes, path: str) -> list[str]:
    """Return the files of which a snapshot of RocksDB consists, besides the archive with this content."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            lines = archive.read("metadata").decode().splitlines()
        told: Any = msgspec.json.decode(lines[1])
        tables = [f"SSTs/{file['dfsSstFileName']}" for file in told.get("sstFiles") or ()]
        return [*tables, *(f"logs/{file['dfsLogFileName']}" for file in told.get("logFiles") or ())]
    except (zipfile.BadZipFile, KeyError, IndexError, ValueError, msgspec.DecodeError) as error:
        raise damaged(path, f"it is no snapshot of state ({error})") from None
