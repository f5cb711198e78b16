"""How a storage node starts on its volumes: exact errors that say what is wrong and what to do."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from itertools import count
from pathlib import Path
from random import Random

import pytest

from cutwater.core.replica.recovery import HardState
from cutwater.errors import AlreadyExists, CutwaterError, Damaged, InvalidArgument, Refused, WrongIdentity
from cutwater.format.checksum import crc32c
from cutwater.format.errors import (
    DamagedFile,
    DiskFull,
    NewerFormat,
    NodeExists,
    VolumeConflict,
    VolumeLocked,
    VolumeUnusable,
)
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.storage.volume import NodeVolumes, node_path, replica_path
from cutwater.storagenode.replica.replica_stores import VolumeStores
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, ClusterId, LogStreamId, StorageNodeId

CLUSTER, NODE = ClusterId(1), StorageNodeId(7)


@pytest.fixture
def volumes(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    return paths


def start(volumes: list[Path], cluster=CLUSTER, node=NODE, **options) -> NodeVolumes:
    return NodeVolumes(volumes, cluster, node, **options)


def create(node: NodeVolumes, stream: int, volume: Path | None = None) -> Path:
    if volume is not None:
        node._room = lambda volumes: {one: (one == volume) << 40 for one in volumes}
    with node.creating(LogStreamId(stream)) as path:
        SegmentStorage(path, ReplicaIdentity(CLUSTER, NODE, LogStreamId(stream))).close()
    return node.replicas[LogStreamId(stream)]


def test_the_layout(volumes: list[Path]) -> None:
    node = start(volumes)
    assert create(node, 3, volumes[1]) == volumes[1] / "cid=1" / "snid=7" / "lsid=3"
    assert replica_path(volumes[1], CLUSTER, NODE, LogStreamId(3)).is_dir()
    node.release()
    (volumes[0] / "lost+found").mkdir()
    (node_path(volumes[0], CLUSTER, NODE) / "lsid=x").mkdir()
    again = start(volumes)
    assert again.replicas == {3: volumes[1] / "cid=1" / "snid=7" / "lsid=3"}
    again.release()


def test_no_volume() -> None:
    with pytest.raises(VolumeUnusable, match="at least one volume: give one with --volumes DIR"):
        start([])


def test_a_missing_volume(volumes: list[Path], tmp_path: Path) -> None:
    with pytest.raises(VolumeUnusable, match=r"volume .*/c does not exist: create it, or mount it, before") as error:
        start([*volumes, tmp_path / "c"])
    assert isinstance(error.value, InvalidArgument)
    assert not list(volumes[0].iterdir()), "nothing was begun"
    (tmp_path / "c").write_text("")
    with pytest.raises(VolumeUnusable, match="is not a directory"):
        start([tmp_path / "c"])


def test_a_volume_that_cannot_be_written(tmp_path: Path) -> None:
    class ReadOnlyFiles(FaultFiles):
        def create(self, path: Path):
            raise PermissionError(13, "Permission denied")

    files = ReadOnlyFiles()
    files.make_dir(tmp_path)
    with pytest.raises(VolumeUnusable, match=r"cannot be written \(Permission denied\): give the user"):
        start([tmp_path], files=files)
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(VolumeUnusable, match="cannot be written"):
            start([tmp_path])
        tmp_path.chmod(0o700)


def test_one_volume_given_twice(volumes: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(volumes[0])
    with pytest.raises(VolumeUnusable, match="was given twice"):
        start([volumes[0], tmp_path / "link"])


def test_one_log_stream_under_two_volumes(volumes: list[Path]) -> None:
    node = start(volumes)
    path = create(node, 3, volumes[0])
    node.release()
    shutil.copytree(path, replica_path(volumes[1], CLUSTER, NODE, LogStreamId(3)))
    with pytest.raises(
        VolumeConflict, match=r"log stream 3 lies under two volumes, .* one of them is an old copy"
    ) as error:
        start(volumes)
    assert isinstance(error.value, Refused)


def test_error_if_exists(volumes: list[Path]) -> None:
    start([volumes[0]], error_if_exists=True).release()
    with pytest.raises(NodeExists, match="exists, and --error-if-exists was said: start without it") as error:
        start(volumes, error_if_exists=True)
    assert isinstance(error.value, AlreadyExists)
    start(volumes, node=StorageNodeId(8), error_if_exists=True).release()


def test_a_lock_held_by_this_process(volumes: list[Path]) -> None:
    node = start(volumes)
    with pytest.raises(VolumeLocked, match=rf"in use by a running storage node \(pid {os.getpid()}\): stop that one"):
        start([volumes[1]])
    (node_path(volumes[1], CLUSTER, NODE) / "lock").write_text("not a number")
    with pytest.raises(VolumeLocked, match="in use by a running storage node: stop that one first"):
        start([volumes[1]])
    node.release()
    node.release()
    start([volumes[1]]).release()


HOLD = """
import sys
from pathlib import Path
from cutwater.storage.volume import NodeVolumes
node = NodeVolumes([Path(sys.argv[1])], 1, 7)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_held_by_another_process_dies_with_it(volumes: list[Path]) -> None:
    command = [sys.executable, "-c", HOLD, str(volumes[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(VolumeLocked, match=rf"\(pid {process.pid}\)"):
            start(volumes)
        process.kill()
    node = start(volumes)
    assert node.volumes == tuple(volumes)
    node.release()


def test_keys_are_made_once_and_shared_by_all_volumes(volumes: list[Path]) -> None:
    keys = (f"key{i}" for i in count())
    node = start([volumes[0]], make_key=lambda: next(keys))
    assert node.identity.node_key == "key0"
    assert node.identity.cluster_key is None
    node.adopt("cluster", {})
    node.adopt("cluster", {})
    node.release()
    node = start(volumes, make_key=lambda: next(keys))
    assert (node.identity.node_key, node.identity.cluster_key) == ("key0", "cluster")
    node.release()
    only_new = start([volumes[1]])
    assert only_new.identity.node_key == "key0"
    only_new.release()


def test_another_cluster_with_the_same_number(volumes: list[Path]) -> None:
    node = start(volumes)
    node.adopt("ours", {})
    with pytest.raises(WrongIdentity, match="holds data of another cluster that also has the id 1: check --metadata"):
        node.adopt("theirs", {})
    node.release()


def test_volumes_of_two_nodes(volumes: list[Path]) -> None:
    for volume in volumes:
        start([volume]).release()
    with pytest.raises(WrongIdentity, match="have different node keys, so they are not of the same storage node"):
        start(volumes)


def test_volumes_of_two_clusters(volumes: list[Path]) -> None:
    for volume, key in zip(volumes, ("ours", "theirs"), strict=True):
        node = start([volume], make_key=lambda: "same")
        node.adopt(key, {})
        node.release()
    with pytest.raises(WrongIdentity, match="belongs to another cluster"):
        start(volumes)


def test_a_renamed_directory(volumes: list[Path]) -> None:
    start(volumes).release()
    for volume in volumes:
        (volume / "cid=1" / "snid=7").rename(volume / "cid=1" / "snid=8")
    with pytest.raises(WrongIdentity, match="says storage node 7 of cluster 1, not 8 of 1: the directory was renamed"):
        start(volumes, node=StorageNodeId(8))


def test_data_without_keys_is_nobodys(volumes: list[Path]) -> None:
    node = start([volumes[0]])
    create(node, 3)
    node.release()
    for name in ("node", "node.copy"):
        (node_path(volumes[0], CLUSTER, NODE) / name).unlink()
    with pytest.raises(DamagedFile, match="is missing, next to lsid=3"):
        start([volumes[0]])


def test_a_damaged_or_newer_node_file(volumes: list[Path]) -> None:
    start([volumes[0]]).release()
    path = node_path(volumes[0], CLUSTER, NODE) / "node"
    right = path.read_bytes()
    path.with_name("node.copy").unlink()
    for offset in range(len(right)):
        wrong = bytearray(right)
        wrong[offset] ^= 4
        path.write_bytes(wrong)
        with pytest.raises(Damaged):
            start([volumes[0]])
    begin = right[:8] + struct.pack("<HH", 2, 0)
    path.write_bytes(begin + struct.pack("<I", crc32c(begin)) + right[16:])
    with pytest.raises(NewerFormat, match="has format version 2"):
        start([volumes[0]])
    path.write_bytes(right)
    start([volumes[0]]).release()


@pytest.mark.parametrize("name", ["node", "node.copy"])
@pytest.mark.parametrize("harm", ["flipped", "torn", "missing"])
def test_one_of_the_two_copies_is_enough(volumes: list[Path], name: str, harm: str) -> None:
    node = start([volumes[0]])
    create(node, 3)
    key, number = node.identity.node_key, node.next_incarnation()
    node.release()
    path = node_path(volumes[0], CLUSTER, NODE) / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:20] if harm == "torn" else content[:30] + bytes([content[30] ^ 1]) + content[31:])
    node = start([volumes[0]])
    assert (node.identity.node_key, list(node.replicas)) == (key, [3])
    assert node.next_incarnation() == number + 1
    node.release()
    assert path.exists(), "there are two again"
    assert path.read_bytes() == path.with_name("node").read_bytes()


def test_every_start_has_its_own_number(volumes: list[Path]) -> None:
    numbers = []
    for use in (volumes, [volumes[0]], [volumes[1]], volumes, volumes[::-1]):
        node = start(use)
        numbers.append(node.next_incarnation())
        node.release()
    assert numbers[0] < numbers[1]
    assert numbers[0] < numbers[2]
    assert max(numbers[1:3]) < numbers[3] < numbers[4]


def test_new_replicas_are_spread_and_old_ones_stay(volumes: list[Path]) -> None:
    node = start(volumes)
    places = [create(node, stream) for stream in range(1, 7)]
    assert sum(volumes[0] in place.parents for place in places) == 3
    node.release()


def test_a_replica_counts_from_when_it_is_complete(volumes: list[Path]) -> None:
    node = start([volumes[0]])

    def begin_and_fail() -> None:
        with node.creating(LogStreamId(3)) as path:
            SegmentStorage(path, ReplicaIdentity(CLUSTER, NODE, LogStreamId(3))).close()
            raise KeyError

    with pytest.raises(KeyError):
        begin_and_fail()
    node.release()
    node = start([volumes[0]])
    assert node.replicas == {}, "what was begun and not finished is no replica"
    path = create(node, 3)
    assert node.replicas == {3: path}
    assert [name.name for name in path.parent.iterdir() if name.name.startswith("lsid")] == ["lsid=3"]
    with pytest.raises(VolumeConflict, match="log stream 3 already lies at"), node.creating(LogStreamId(3)):
        pass
    node.release()


def test_a_replica_that_cannot_be_opened_is_kept_when_it_is_replaced(volumes: list[Path]) -> None:
    node = start([volumes[0]])
    path = create(node, 3)
    node.next_incarnation()
    (path / "manifest").write_bytes(b"garbage")
    aside = node.set_aside(LogStreamId(3))
    assert (aside / "manifest").read_bytes() == b"garbage"
    assert create(node, 3) == path
    # Nothing that was kept gives way to what is kept later.
    again = node.set_aside(LogStreamId(3))
    assert again.name == f"{aside.name}-2"
    assert (aside / "manifest").read_bytes() == b"garbage"
    assert create(node, 3) == path
    node.release()
    node = start([volumes[0]])
    assert node.replicas == {3: path}
    node.release()


@pytest.mark.parametrize("failing", range(12))
def test_a_replica_whose_creation_failed_is_created_by_the_next_attempt(failing: int) -> None:
    """Whichever sync of a directory fails. Without the second attempt, nothing or all of it is there after a start."""
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    node = start([volume], files=files)
    stores, syncs = VolumeStores(node), count()
    files.fail_sync = lambda path: files.is_dir(path) and next(syncs) == failing
    try:
        stores.create(LogStreamId(3), GLSN(5))
    except CutwaterError:
        stores.create(LogStreamId(3), GLSN(5))
    files.fail_sync = lambda path: False
    assert start_again(files, volume) == [LogStreamId(3)]


@pytest.mark.parametrize("is_readable", [False, True])
@pytest.mark.parametrize("name", ["entries", "manifest", "state"])
def test_a_replica_that_was_damaged_while_it_was_created_is_created_anew(name: str, is_readable: bool) -> None:
    """Otherwise each attempt would find the damage again, and its storage node could never say what it has."""
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    node = start([volume], files=files)
    stores = VolumeStores(node)
    files.fail_sync = lambda path: LogStreamId(3) in node.replicas and files.is_dir(path)
    with pytest.raises(VolumeUnusable):
        stores.create(LogStreamId(3), GLSN(5))
    for path in files.paths():
        if path.parent == node.replicas[LogStreamId(3)] and path.name.endswith(name):
            files.flip(path, 0) if is_readable else files.spoil(path, 0)
    with pytest.raises(VolumeUnusable):
        stores.create(LogStreamId(3), GLSN(5))
    files.fail_sync = lambda path: False
    storage = stores.create(LogStreamId(3), GLSN(5))
    assert storage.find().hard_state == HardState(base_glsn=GLSN(5))
    assert not storage.verify()
    assert start_again(files, volume) == [LogStreamId(3)]


def test_what_a_failed_creation_left_behind_is_not_used() -> None:
    """It was found by storm seed 2000270 of the simulator: each attempt found the damage of the first one."""
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    node = start([volume], files=files)
    stores = VolumeStores(node)
    files.fail_sync = lambda path: path.name.startswith("state")
    with pytest.raises(CutwaterError):
        stores.create(LogStreamId(3), GLSN(5))
    files.fail_sync = lambda path: False
    left = [path for path in files.paths() if path.suffix == ".entries"]
    assert [path.parent.name for path in left] == ["lsid=3.new"]
    for sector in range(4):
        files.flip(left[0], sector * 512 + 3)
    storage = stores.create(LogStreamId(3), GLSN(5))
    assert storage.find().hard_state == HardState(base_glsn=GLSN(5))
    assert not storage.verify()


def test_a_replica_that_is_in_use_is_not_created_again() -> None:
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    stores = VolumeStores(start([volume], files=files))
    stores.create(LogStreamId(3), GLSN(5))
    with pytest.raises(VolumeConflict, match="log stream 3 already lies at"):
        stores.create(LogStreamId(3), GLSN(5))


def test_a_replica_is_not_opened_before_its_name_is_durable() -> None:
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    node = start([volume], files=files)
    stores = VolumeStores(node)
    files.fail_sync = lambda path: LogStreamId(3) in node.replicas and files.is_dir(path)
    with pytest.raises(VolumeUnusable):
        stores.create(LogStreamId(3), GLSN(5))
    assert stores.streams() == [3]
    with pytest.raises(VolumeUnusable):
        stores.open(LogStreamId(3))
    files.fail_sync = lambda path: False
    stores.open(LogStreamId(3))
    assert start_again(files, volume) == [LogStreamId(3)]


def test_a_replica_can_be_set_aside_although_a_sync_failed() -> None:
    files, volume = FaultFiles(), Path("/a")
    files.make_dir(volume)
    node = start([volume], files=files)
    stores = VolumeStores(node)
    stores.create(LogStreamId(3), GLSN(5)).close()
    files.fail_sync = lambda path: True
    with pytest.raises(VolumeUnusable):
        stores.set_aside(LogStreamId(3))
    files.fail_sync = lambda path: False
    assert stores.streams() == []
    stores.create(LogStreamId(3), GLSN(5))
    assert start_again(files, volume) == [LogStreamId(3)]


def start_again(files: FaultFiles, volume: Path) -> list[LogStreamId]:
    files.crash(Random(1), keep=0.0)
    return list(start([volume], files=files).replicas)


def test_what_is_removed_stays_removed(volumes: list[Path]) -> None:
    node = start([volumes[0]])
    first, second = create(node, 3), create(node, 4)
    node.remove(LogStreamId(3))
    assert not first.exists()
    assert node.replicas == {4: second}
    node.release()
    # A removal that did not get far is finished at the next start.
    second.rename(second.with_name("lsid=4.removed"))
    node = start([volumes[0]])
    assert node.replicas == {}
    assert sorted(path.name for path in first.parent.iterdir()) == ["lock", "node", "node.copy"]
    node.release()


def test_a_file_where_a_directory_should_be(volumes: list[Path]) -> None:
    (volumes[0] / "cid=1").write_text("")
    with pytest.raises(VolumeUnusable, match=r"cannot be written \((File exists|Not a directory)\)"):
        start([volumes[0]])


def test_no_room(tmp_path: Path) -> None:
    files = FaultFiles()
    files.make_dir(tmp_path)
    start([tmp_path], files=files).release()
    files.room_bytes = 0
    with pytest.raises(DiskFull, match="no room is left"):
        start([tmp_path], files=files)


def test_what_a_dead_process_left_is_durable_once_a_start_has_found_it() -> None:
    files = FaultFiles()
    files.make_dir(Path("/v"))
    node = start([Path("/v")], files=files)
    key = node.identity.node_key
    path = replica_path(Path("/v"), CLUSTER, NODE, LogStreamId(3))
    making = path.with_name("lsid=3.new")
    SegmentStorage(making, ReplicaIdentity(CLUSTER, NODE, LogStreamId(3)), files=files).close()
    # The process dies after this, and before the sync that follows it.
    files.rename(making, path)
    files.kill()
    replicas = start([Path("/v")], files=files).replicas
    assert list(replicas) == [3]
    files.crash(Random(1), keep=0.0)
    again = start([Path("/v")], files=files)
    assert (again.replicas, again.identity.node_key) == (replicas, key)


def test_a_directory_that_cannot_be_listed_is_told_as_an_error_of_the_volume() -> None:
    files = FaultFiles()
    files.make_dir(Path("/v"))
    files.faults.add(DiskFaultRule(DiskFault.READ_ERROR, 1.0))
    with pytest.raises(VolumeUnusable, match=r"volume /v cannot be read \(Input/output error\)"):
        start([Path("/v")], files=files)


def test_nothing_stays_locked_after_a_failed_start(volumes: list[Path]) -> None:
    node = start(volumes)
    path = create(node, 3, volumes[0])
    node.release()
    copy = replica_path(volumes[1], CLUSTER, NODE, LogStreamId(3))
    shutil.copytree(path, copy)
    with pytest.raises(VolumeConflict):
        start(volumes)
    shutil.rmtree(copy)
    start(volumes).release()


def test_a_volume_is_added_and_remembered_until_a_start_names_it(volumes: list[Path]) -> None:
    first, second = volumes
    node = start([first])
    node.next_incarnation()
    assert node.add(second) == []
    assert node.add(second) == [], "once more is fine"
    path = create(node, 3, second)
    node.release()
    again = start([first])
    assert again.volumes == (first, second)
    assert again.replicas == {3: path}
    again.release()
    named = start([second, first])
    assert named.volumes == (second, first)
    assert named.identity.added == ()
    named.release()
    alone = start([first])
    assert alone.volumes == (first,), "from then on --volumes alone says which there are"
    alone.release()


def test_an_added_volume_that_is_not_there_at_the_next_start(volumes: list[Path]) -> None:
    first, second = volumes
    node = start([first])
    node.add(second)
    node.release()
    aside = second.rename(second.with_name("aside"))
    with pytest.raises(VolumeUnusable, match=r"got while it ran, does not exist: mount it; if it is lost for good, .*"):
        start([first])
    second.mkdir()
    with pytest.raises(VolumeUnusable, match=r"holds nothing of this node now: is it mounted\? if it is lost for good"):
        start([first])
    node = start([first], forget=[second])
    assert node.volumes == (first,)
    node.release()
    start([first]).release()
    assert aside.is_dir()


def test_what_may_not_be_added(volumes: list[Path], tmp_path: Path) -> None:
    first, second = volumes
    node = start([first])
    node.adopt("ours", {})
    path = create(node, 3)
    with pytest.raises(InvalidArgument, match="on the machine of the storage node, from / on"):
        node.add(Path("data"))
    with pytest.raises(VolumeUnusable, match="c does not exist: create it, or mount it, first"):
        node.add(tmp_path / "c")
    (tmp_path / "file").touch()
    with pytest.raises(VolumeUnusable, match="is not a directory"):
        node.add(tmp_path / "file")
    other = start([second])
    with pytest.raises(VolumeLocked, match="in use by a running storage node"):
        node.add(second)
    other.release()
    with pytest.raises(WrongIdentity, match="has another node key than storage node 7"):
        node.add(second)
    shutil.rmtree(second / "cid=1")
    theirs = start([second], make_key=lambda: node.identity.node_key)
    theirs.adopt("theirs", {})
    theirs.release()
    with pytest.raises(WrongIdentity, match="belongs to another cluster"):
        node.add(second)
    shutil.rmtree(second / "cid=1")
    shutil.copytree(path, replica_path(second, CLUSTER, NODE, LogStreamId(3)))
    with pytest.raises(DamagedFile, match="it is missing, next to lsid=3"):
        node.add(second)
    shutil.copy(path.parent / "node", node_path(second, CLUSTER, NODE) / "node")
    with pytest.raises(VolumeConflict, match="log stream 3 lies under two volumes"):
        node.add(second)
    assert node.volumes == (first,)
    node.release()
    start([first]).release()


def test_replicas_that_come_with_a_volume(volumes: list[Path]) -> None:
    first, second = volumes
    node = start(volumes)
    path = create(node, 3, second)
    node.next_incarnation()
    node.release()
    node = start([first])
    node.next_incarnation()
    assert node.add(second) == [3]
    assert node.replicas == {3: path}
    node.release()
    later = start([second])
    later.next_incarnation()
    later.next_incarnation()
    later.release()
    node = start([first], forget=[second])
    with pytest.raises(Refused, match="was used by a later start of storage node 7"):
        node.add(second)
    node.release()


def test_only_an_empty_volume_goes(volumes: list[Path], tmp_path: Path) -> None:
    first, second = volumes
    node = start(volumes)
    with pytest.raises(VolumeUnusable, match="is not a volume of storage node 7: choose one of"):
        node.take_away(tmp_path)
    create(node, 3, second)
    create(node, 4, second)
    node.set_aside(LogStreamId(4))
    with pytest.raises(Refused, match=r"holds replicas of log streams 3 and lsid=4.damaged-0 \(nothing that the node"):
        node.take_away(second)
    node.remove(LogStreamId(3))
    shutil.rmtree(node_path(second, CLUSTER, NODE) / "lsid=4.damaged-0")
    create(node, 5, second)
    with pytest.raises(Refused, match="replicas of log streams 5"):
        node.take_away(second)
    node.remove(LogStreamId(5))
    node.take_away(second)
    assert list(second.iterdir()) == []
    assert node.volumes == (first,)
    with pytest.raises(Refused, match="is the only volume of storage node 7: add another one first"):
        node.take_away(first)
    node.release()
    again = start([first])
    assert again.volumes == (first,)
    again.release()


def test_nothing_is_taken_away_under_a_replica_that_is_being_made(volumes: list[Path]) -> None:
    node = start(volumes, room=lambda volumes: dict(zip(volumes, (1, 2), strict=True)))
    with node.creating(LogStreamId(5)) as path:
        with pytest.raises(Refused, match="replicas of log streams 5"):
            node.take_away(volumes[1])
        SegmentStorage(path, ReplicaIdentity(CLUSTER, NODE, LogStreamId(5))).close()
    node.release()


def test_parts_are_staged_where_most_room_is_and_keep_their_volume(volumes: list[Path]) -> None:
    first, second = volumes
    node = start(volumes, room=lambda volumes: dict(zip(volumes, (1, 2), strict=True)))
    with node.staging() as directory:
        assert directory == node.staged[1] == node_path(second, CLUSTER, NODE) / "staged"
        directory.mkdir()
        (directory / "some.part").touch()
    with pytest.raises(Refused, match="1 parts are staged there"):
        node.take_away(second)
    (directory / "some.part").unlink()
    node.take_away(second)
    assert (node.volumes, list(second.iterdir())) == ((first,), [])
    node.release()


def test_new_replicas_go_where_most_room_is(volumes: list[Path]) -> None:
    first, second = volumes
    node = start(volumes, room=lambda paths: {first: 100, second: 450})
    places = [create(node, stream) for stream in range(1, 7)]
    assert [second in place.parents for place in places] == [True, True, True, True, False, True]
    node.release()
