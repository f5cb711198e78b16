"""Random lives of a storage node's volumes and of its staged parts, on disks that fail, and wrong code that they find.

Each seed is one test, so the name of a failed one is the command that replays it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from random import Random
from unittest import mock

import pytest
from storage_journey import ERRORS, REOPENS_MAX, Violation, check

from cutwater.core.publish.staged import StagedPart
from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError, Damaged
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import staged_frame
from cutwater.format.errors import DamagedFile, DiskFull, StorageBroken, VolumeUnusable
from cutwater.storage import node_identity
from cutwater.storage.part_files import Held, PartWriter, StagingFiles
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storage.volume import NodeVolumes
from cutwater.testing.disk_faults import DiskFaultRule, ProcessDied
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, Batch, BatchNumber, ClusterId, EventTime, LogStreamId, RunId, StorageNodeId, TopicId

CLUSTER, NODE = ClusterId(1), StorageNodeId(7)
VOLUMES = (Path("/v/a"), Path("/v/b"))
STAGED = Path("/v/a/staged")
STEPS = 30
FAILURES = (VolumeUnusable, StorageBroken, DiskFull, Damaged)
"""How storage reports that a disk fails. A damaged file may be one that could not be read."""


class Life(ABC):
    """What both lives have in common: a process that fails, dies and starts again, on a disk that is well at times."""

    CALLS: tuple[str, ...]

    def __init__(self, seed: int, probability: float) -> None:
        self.rng = Random(f"{type(self).__name__}/{seed}")
        self.files = FaultFiles(self.rng)
        self.files.recording = False
        for volume in VOLUMES:
            self.files.make_dir(volume)
        self.rules = [DiskFaultRule(fault, self.rng.uniform(0.0, 2.0) * probability) for fault in ERRORS]
        self.happened: list[str] = []

    def run(self) -> None:
        try:
            self.start()
            for _ in range(STEPS):
                self.step()
            self.cut_power()
        except BaseException as error:
            error.add_note("what happened: " + ", ".join(self.happened[-25:]))
            raise

    def step(self) -> None:
        call = self.rng.choice(self.CALLS)
        self.happened.append(call)
        if self.rng.random() < 0.1:
            self.files.die_at = self.files.calls + self.rng.randint(1, 20)
        with self.failing():
            try:
                getattr(self, call)()
                return
            except FAILURES as error:
                self.happened.append(type(error).__name__)
            except ProcessDied:
                self.happened.append("died")
        self.kill()

    @contextmanager
    def failing(self):
        for rule in self.rules:
            self.files.faults.add(rule)
        try:
            yield
        finally:
            self.files.die_at = None
            self.files.faults.clear()

    def start(self) -> None:
        """Start on a disk that fails, and in the end on one that is well."""
        for number in range(REOPENS_MAX):
            with nullcontext() if number == REOPENS_MAX - 1 else self.failing():
                try:
                    self.open()
                    break
                except FAILURES as error:
                    check(number < REOPENS_MAX - 1, f"it cannot start on a disk that is well: {error}")
            self.files.kill()
        self.files.faults.clear()
        self.check()

    def kill(self) -> None:
        self.files.kill()
        self.start()

    def cut_power(self) -> None:
        self.files.crash(self.rng, keep=self.rng.choice((0.0, 0.5, 0.9)))
        self.start()

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def check(self) -> None: ...


class VolumesLife(Life):
    CALLS = (
        "create",
        "create",
        "create",
        "remove",
        "set_aside",
        "next_start",
        "adopt",
        "add",
        "take_away",
        "cut_power",
    )

    def __init__(self, seed: int, probability: float = 0.01) -> None:
        super().__init__(seed, probability)
        self.key = ""
        self.incarnation = 0
        self.cluster_key: str | None = None
        self.made: dict[int, int] = {}
        """The replicas that exist, and the GLSN that each of them was made with."""
        self.unsure: dict[int, int] = {}
        """Those that may exist or not, since a call for them failed."""
        self.keys = 0

    def make_key(self) -> str:
        self.keys += 1
        return f"key {self.keys}"

    def open(self) -> None:
        self.node = NodeVolumes(
            VOLUMES[:1],
            CLUSTER,
            NODE,
            files=self.files,
            make_key=self.make_key,
            room=lambda volumes: {volume: self.rng.randrange(100) for volume in volumes},
        )

    def check(self) -> None:
        identity = self.node.identity
        check(self.key in ("", identity.node_key), "the node has another key")
        self.key = identity.node_key
        check(identity.incarnation >= self.incarnation, f"start {identity.incarnation} after {self.incarnation}")
        check(self.cluster_key in (None, identity.cluster_key), "the cluster is forgotten")
        self.cluster_key = identity.cluster_key
        found = set(map(int, self.node.replicas))
        check(set(self.made) <= found, f"replicas {sorted(set(self.made) - found)} are lost")
        check(found <= set(self.made) | set(self.unsure), f"replicas {sorted(found - set(self.made))} came back")
        self.made = {stream: (self.unsure | self.made)[stream] for stream in found}
        self.unsure = {}
        for stream, path in self.node.replicas.items():
            try:
                storage = SegmentStorage(path, ReplicaIdentity(CLUSTER, NODE, stream), files=self.files)
            except DamagedFile as error:
                raise Violation(f"replica {stream} is damaged") from error
            check(storage.hard_state == HardState(base_glsn=GLSN(self.made[stream])), f"wrong state of {stream}")
            check(storage.verify() == [], f"{stream}: {storage.verify()}")

    def create(self) -> None:
        stream = self.rng.choice([stream for stream in range(1, 99) if stream not in self.made])
        glsn = self.rng.randrange(1000)
        self.unsure[stream] = glsn
        with self.node.creating(LogStreamId(stream)) as path:
            storage = SegmentStorage(path, ReplicaIdentity(CLUSTER, NODE, LogStreamId(stream)), files=self.files)
            storage.save_hard_state(HardState(base_glsn=GLSN(glsn)))
            storage.close()
        self.made[stream] = self.unsure.pop(stream)

    def some(self) -> int | None:
        return self.rng.choice(sorted(self.made)) if len(self.made) > 2 else None

    def remove(self) -> None:
        if stream := self.some():
            self.unsure[stream] = self.made.pop(stream)
            self.node.remove(LogStreamId(stream))
            del self.unsure[stream]

    def set_aside(self) -> None:
        if stream := self.some():
            self.unsure[stream] = self.made.pop(stream)
            aside = self.node.set_aside(LogStreamId(stream))
            del self.unsure[stream]
            check(self.files.exists(aside / "manifest"), "nothing was kept")

    def next_start(self) -> None:
        incarnation = self.node.next_incarnation()
        check(incarnation > self.incarnation, f"start {incarnation} after {self.incarnation}")
        self.incarnation = incarnation

    def adopt(self) -> None:
        if self.cluster_key is None:
            self.node.adopt("cluster", {})
            self.cluster_key = "cluster"

    def add(self) -> None:
        self.node.add(VOLUMES[1])

    def take_away(self) -> None:
        try:
            self.node.take_away(VOLUMES[1])
        except FAILURES:
            raise
        except CutwaterError:
            # It is in use, or it is not a volume of the node.
            self.happened.append("refused")


class PartsLife(Life):
    CALLS = ("stage", "stage", "stage", "drop", "read", "kill", "cut_power")

    def __init__(self, seed: int, probability: float = 0.01) -> None:
        super().__init__(seed, probability)
        self.area = StagingFiles(lambda: nullcontext(STAGED), self.files)
        self.held: dict[Held, bytes] = {}
        """Parts that were acknowledged and not removed, and their frames."""
        self.unsure: dict[StagedPart, bytes] = {}
        """Parts that may be there: their last call failed."""
        self.serial = 0

    def open(self) -> None:
        try:
            # As the volumes do when the node starts.
            self.files.sync_dir(STAGED.parent)
        except OSError as error:
            raise StorageBroken("the node cannot start") from error
        self.found, self.broken = self.area.open([STAGED])
        if self.broken and any(rule.fault == "read error" for rule in self.files.faults.rules):
            raise StorageBroken("some could not be read")

    def check(self) -> None:
        check(not self.broken, f"cannot be used: {self.broken}")
        found = {held: self.area.read(held, 0, 1 << 20) for held in self.found}
        for held, data in self.held.items():
            check(found.get(held) == data, f"{held.part} is lost or wrong")
        for held, data in found.items():
            check(self.area.verify(held) == [], f"{held.part} is damaged")
            check(self.held.get(held, self.unsure.get(held.part)) == data, f"{held.part} came back or is wrong")
        self.held, self.unsure = found, {}
        check(all(path.suffix == ".part" for path in self.files.paths()), "an unfinished file is left")

    def frames(self, first: int) -> bytes:
        body = b"%d" % self.rng.randrange(10**9) * self.rng.choice((1, 30, 200))
        time = EventTime(1)
        return b"".join(staged_frame(Batch(1, body, crc32c(body), time, time), first))

    def stage(self) -> None:
        self.serial += 1
        part = StagedPart(RunId(1), BatchNumber(self.serial % 4), 1, TopicId(1), f"{self.serial:032x}")
        self.unsure[part] = b""
        writer = self.area.begin(part)
        for _ in range(self.rng.randint(1, 4)):
            frames = self.frames(writer.size.rows + 1)
            try:
                writer.append(frames)
            except DiskFull:
                # Nothing of it counts, and the part can be finished without it.
                self.happened.append("full")
                continue
            self.unsure[part] += frames
        held = writer.finish(self.serial)
        self.held[held] = self.unsure.pop(part)

    def some(self) -> Held | None:
        return self.rng.choice(list(self.held)) if self.held else None

    def drop(self) -> None:
        if held := self.some():
            self.unsure[held.part] = self.held.pop(held)
            if not self.area.drop([held]):
                del self.unsure[held.part]

    def read(self) -> None:
        if held := self.some():
            check(self.area.read(held, 0, 1 << 20) == self.held[held], f"wrong frames of {held.part}")


LIVES: dict[str, Callable[[int], Life]] = {"volumes": VolumesLife, "parts": PartsLife}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", LIVES)
def test_what_was_reported_is_there_after_any_failure(kind: str, seed: int) -> None:
    LIVES[kind](seed).run()


# The tester is tested.

Patch = tuple[object, str, object]


def make_a_replica_without_syncing_its_name() -> list[Patch]:
    right = NodeVolumes.creating

    @contextmanager
    def creating(self, stream):
        with mock.patch.object(self.files, "sync_dir", return_value=None), right(self, stream) as path:
            yield path

    return [(NodeVolumes, "creating", creating)]


def use_the_number_of_a_start_before_it_is_saved() -> list[Patch]:
    def replace(files, path, data):
        file = files.create(path)
        file.pwritev([data], 0)

    return [(node_identity, "replace", replace)]


def acknowledge_a_part_before_the_sync() -> list[Patch]:
    right = PartWriter.finish

    def finish(self, staged_us):
        with mock.patch.object(self._file, "sync_all", return_value=None):
            return right(self, staged_us)

    return [(PartWriter, "finish", finish)]


def leave_the_rest_of_a_failed_append() -> list[Patch]:
    right = PartWriter.finish

    def finish(self, staged_us):
        with mock.patch.object(self._file, "truncate", return_value=None):
            return right(self, staged_us)

    return [(PartWriter, "finish", finish)]


def use_names_that_a_dead_process_left() -> list[Patch]:
    right_lock, right_open = NodeVolumes._lock, StagingFiles.open

    def without_syncs(call):
        def wrong(self, *args):
            files = self.files if isinstance(self, NodeVolumes) else self._files
            with mock.patch.object(files, "sync_dir", return_value=None):
                return call(self, *args)

        return wrong

    return [(NodeVolumes, "_lock", without_syncs(right_lock)), (StagingFiles, "open", without_syncs(right_open))]


BUGS: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "make a replica without syncing its name": ("volumes", make_a_replica_without_syncing_its_name),
    "use the number of a start before it is saved": ("volumes", use_the_number_of_a_start_before_it_is_saved),
    "use names that a dead process left": ("volumes", use_names_that_a_dead_process_left),
    "use parts that a dead process left": ("parts", use_names_that_a_dead_process_left),
    "acknowledge a part before the sync": ("parts", acknowledge_a_part_before_the_sync),
    "leave the rest of a failed append": ("parts", leave_the_rest_of_a_failed_append),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    kind, patches = BUGS[bug]
    with ExitStack() as planted:
        for owner, attribute, wrong in patches():
            planted.enter_context(mock.patch.object(owner, attribute, wrong))
        for seed in range(200):
            try:
                LIVES[kind](seed).run()
            except Violation:
                return
    pytest.fail(f"not found: {bug}")
