"""Stores decisions in etcd, for a metadata repository of several nodes.

::

    PREFIX/cid=ID/epoch               the leader epoch that may write
    PREFIX/cid=ID/leader              the node that holds this epoch, and its address
    PREFIX/cid=ID/members/ID          the public key of a metadata node
    PREFIX/cid=ID/last                the index of the last decision
    PREFIX/cid=ID/decisions/INDEX     decisions that were appended together, by the index of the first of them
    PREFIX/cid=ID/snapshot            which pieces make up the snapshot that counts
    PREFIX/cid=ID/pieces/NAME/N       pieces of snapshots; all but those of that one NAME are garbage

Every write is one transaction that compares the epoch. A write that arrives after another epoch leads has no effect.
An append also compares the last decision. If a comparison fails, the same transaction reads what is stored. If that
equals what was to be written, an earlier attempt succeeded and only its answer was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

from msgspec import Struct

from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, ResourceExhausted
from cutwater.metadata.etcd import etcd_pb2 as pb
from cutwater.metadata.etcd.address import EtcdAddress
from cutwater.metadata.etcd.client import COMPACT, RANGE, TXN, Compacted, ConnectMembers, EtcdClient, connect_members
from cutwater.metadata.stores.encoding import (
    LeaderRecord,
    MemberRecord,
    SnapshotPointer,
    decode_batch,
    decode_leader,
    decode_record,
    decode_snapshot,
    encode_batch,
    encode_record,
    encode_snapshot,
)
from cutwater.metadata.stores.store_calls import Calls, watch_leader
from cutwater.metadata.stores.store_errors import DamagedStore
from cutwater.metadata.stores.store_interface import (
    NO_LEADER,
    TIMEOUT_MS,
    TRIM_TIMEOUT_MS,
    AppendTold,
    LeaderInfo,
    LoadedState,
)
from cutwater.metadata.stores.store_rules import elsewhere, loaded, not_stored, require_leader, too_late
from cutwater.runtime import system
from cutwater.types import ClusterId, DecisionIndex, LeaderEpoch, MetadataNodeId

UNTRIMMED_DECISIONS_MAX = 16 * 1024
"""Sixteen times as many as a leader collects before it trims. Limits what etcd holds and what a new leader loads."""
ROOM_RETRY_MS = 200
BATCH_BYTES_MAX = 1_400_000
"""Stays below the 1.5 MiB that etcd accepts in one request."""
PIECE_BYTES = 1_048_576
PAGE_KEYS = 64
PAGE_PIECES = 4
WATCH_MS = 2_000
"""Interval at which a watcher reads the leader itself: the member that it watches may be cut off."""
UPKEEP_SECONDS = 10.0

_log = logging.getLogger(__name__)


class Keys:
    """Names of all stored keys. Numbers have a fixed width, so their text sorts in numeric order."""

    def __init__(self, prefix: str, cluster: ClusterId) -> None:
        self.root = f"{prefix}/cid={cluster}/"
        self.epoch = self._key("epoch")
        self.leader = self._key("leader")
        self.last = self._key("last")
        self.snapshot = self._key("snapshot")
        self.decisions = self._key("decisions/")
        self.decisions_end = self._key("decisions0")
        self.members = self._key("members/")
        self.members_end = self._key("members0")
        self.pieces = self._key("pieces/")
        self.pieces_end = self._key("pieces0")

    def batch(self, first: int) -> bytes:
        return self.decisions + number(first)

    def piece(self, directory: str, n: int) -> bytes:
        return self.pieces + f"{directory}/{n:06d}".encode()

    def after_pieces(self, directory: str) -> bytes:
        """Return the first key after all pieces of the directory: ``0`` follows ``/``."""
        return self.pieces + f"{directory}0".encode()

    def _key(self, name: str) -> bytes:
        return f"{self.root}{name}".encode()


class EtcdHead(Struct, frozen=True):
    """The leader and the last decision, as of one revision of etcd."""

    leader: LeaderInfo
    last: DecisionIndex
    revision: int


class EtcdStore:
    """Implements ``MetadataStore``. Sends nothing to etcd before the first call. ``connect`` reaches its members."""

    def __init__(self, address: EtcdAddress, cluster: ClusterId, connect: ConnectMembers = connect_members) -> None:
        self._keys = Keys(address.prefix, cluster)
        self._where = f"etcd at {','.join(address.endpoints)}"
        self._client = EtcdClient(connect(address))
        self._calls = Calls(self._where, lambda: self._client.trouble)
        self._trimming = asyncio.Lock()
        self._trimmed_to = DecisionIndex(0)
        """The snapshot contains all decisions up to this one. Other nodes may have trimmed further since."""
        self._revision = 0
        self._upkeep: asyncio.Task[None] | None = None

    # Leadership.

    async def leader(self, *, timeout_ms: int = TIMEOUT_MS) -> LeaderInfo:
        async with self._calls.call("leader", timeout_ms):
            return (await self._head()).leader

    async def acquire(
        self, node: MetadataNodeId, address: str, seen: LeaderEpoch, *, timeout_ms: int = TIMEOUT_MS
    ) -> LeaderEpoch:
        epoch = LeaderEpoch(seen + 1)
        # Without the nonce, this node could mistake an attempt that another process of it made earlier for this one.
        record = encode_record(LeaderRecord(node, address, system.token_bytes(16)), epoch)
        puts = [put(self._keys.epoch, number(epoch)), put(self._keys.leader, record)]
        if seen == NO_LEADER.epoch:
            compare = [is_unchanged(self._keys.epoch, 0), is_unchanged(self._keys.last, 0)]
            puts.append(put(self._keys.last, number(0)))
        else:
            compare = [is_equal(self._keys.epoch, number(seen))]
        async with self._calls.call("acquire", timeout_ms):
            txn = pb.Txn(compare=compare, success=puts, failure=[get(self._keys.leader)])
            answer = await self._client.call(TXN, txn)
            if not answer.succeeded and value(answer, 0) != record:
                raise too_late(self._leader_in(value(answer, 0)), seen)
            self._wrote(answer)
        return epoch

    async def announce(self, node: MetadataNodeId, key: str, *, timeout_ms: int = TIMEOUT_MS) -> None:
        record = put(self._keys.members + number(node), encode_record(MemberRecord(node, key)))
        async with self._calls.call("announce", timeout_ms):
            self._wrote(await self._client.call(TXN, pb.Txn(success=[record])))

    async def members(self, *, timeout_ms: int = TIMEOUT_MS) -> dict[MetadataNodeId, str]:
        keys = self._keys
        async with self._calls.call("members", timeout_ms):
            answer = await self._client.call(RANGE, pb.Range(key=keys.members, range_end=keys.members_end))
        found = [decode_record(pair.value, self._at("members"), MemberRecord) for pair in answer.kvs]
        return {member.node: member.key for member in found}

    def watch_leader(self) -> AsyncIterator[LeaderInfo]:
        async def read() -> tuple[LeaderInfo, int]:
            async with self._calls.call("watch_leader", TIMEOUT_MS):
                head = await self._head()
            return head.leader, head.revision

        async def changed(revision: int) -> None:
            try:
                async with self._calls.call("watch_leader", WATCH_MS):
                    await self._client.changed(self._keys.leader, revision)
            except DeadlineExceeded:
                pass

        return watch_leader(self._calls, read, changed)

    async def _head(self) -> EtcdHead:
        """Read the leader and the last decision at once. Does not use a transaction: when its quota is used up, etcd
        also refuses transactions that only read."""
        keys = self._keys
        answer = await self._client.call(RANGE, pb.Range(key=keys.epoch, range_end=keys.leader + b"\0"))
        found = {pair.key: pair.value for pair in answer.kvs}
        leader = self._leader_in(found.get(keys.leader))
        if self._number_in(found.get(keys.epoch), "epoch") != leader.epoch:
            raise DamagedStore(self._at("epoch"), f"the leader is of epoch {leader.epoch}")
        last = DecisionIndex(self._number_in(found.get(keys.last), "last"))
        return EtcdHead(leader, last, answer.header.revision)

    def _leader_in(self, data: bytes | None) -> LeaderInfo:
        return decode_leader(data, self._at("leader")) if data else NO_LEADER

    # Decisions.

    async def append(
        self,
        epoch: LeaderEpoch,
        after: DecisionIndex,
        decisions: tuple[Decision, ...],
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        async with self._calls.call("append", timeout_ms):
            if decisions:
                await self._append(epoch, after, decisions)
            else:
                head = await self._head()
                require_leader(head.leader, epoch)
                if head.last != after:
                    raise elsewhere(head.last, after)

    def begin_append(
        self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...], told: AppendTold
    ) -> bool:
        return False

    async def _append(self, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[Decision, ...]) -> None:
        end = DecisionIndex(after + len(decisions))
        key = self._keys.batch(after + 1)
        data = encode_batch(epoch, DecisionIndex(after + 1), decisions)
        if len(data) > BATCH_BYTES_MAX:
            raise InvalidArgument(
                f"{len(decisions)} decisions take {len(data)} bytes, and etcd takes {BATCH_BYTES_MAX} at once: "
                "store fewer together; if it is one cut, the cluster has too many log streams"
            )
        if end - self._trimmed_to > UNTRIMMED_DECISIONS_MAX:
            await self._find_room(end)
        txn = pb.Txn(
            compare=[is_equal(self._keys.epoch, number(epoch)), is_equal(self._keys.last, number(after))],
            success=[put(key, data), put(self._keys.last, number(end))],
            failure=[get(self._keys.leader), get(self._keys.last), get(key)],
        )
        answer = await self._client.call(TXN, txn)
        if not answer.succeeded:
            require_leader(self._leader_in(value(answer, 0)), epoch)
            last = DecisionIndex(self._number_in(value(answer, 1), "last"))
            if last != end or value(answer, 2) != data:
                raise elsewhere(last, after)
        self._wrote(answer)

    async def _find_room(self, end: DecisionIndex) -> None:
        answer = await self._client.call(RANGE, pb.Range(key=self._keys.snapshot))
        if answer.kvs:
            self._trimmed_to = decode_record(answer.kvs[0].value, self._at("snapshot"), SnapshotPointer).index
        if end - self._trimmed_to > UNTRIMMED_DECISIONS_MAX:
            raise ResourceExhausted(
                f"decision {end} would be more than {UNTRIMMED_DECISIONS_MAX} after the snapshot of decision "
                f"{self._trimmed_to}: nothing is stored until the decisions are trimmed",
                retry_ms=ROOM_RETRY_MS,
            )

    async def load(self, *, timeout_ms: int = TIMEOUT_MS) -> LoadedState:
        async with self._calls.call("load", timeout_ms):
            while True:
                try:
                    return await self._load()
                except Compacted:
                    # Reading took so long that etcd has compacted the revision at which it began.
                    continue

    async def _load(self) -> LoadedState:
        """Load everything as of the revision of the first read."""
        keys, head = self._keys, await self._head()
        snapshot = await self._read_snapshot(head.revision)
        batches = []
        async for pair in self._scan(keys.decisions, keys.decisions_end, head.revision, PAGE_KEYS):
            where = f"{self._where}: {pair.key.decode(errors='replace')}"
            batch = decode_batch(pair.value, where)
            if keys.batch(batch.first) != pair.key:
                raise DamagedStore(where, f"it is decision {batch.first}")
            batches.append(batch)
        result = loaded(head.leader, snapshot, batches, self._at("decisions"))
        if snapshot.index + len(result.decisions) != head.last:
            raise DamagedStore(self._at("decisions"), f"they do not end with decision {head.last}, which is the last")
        self._trimmed_to = snapshot.index
        return result

    async def _read_snapshot(self, revision: int) -> Snapshot:
        answer = await self._client.call(RANGE, pb.Range(key=self._keys.snapshot, revision=revision))
        if not answer.kvs:
            return Snapshot()
        pointer = decode_record(answer.kvs[0].value, self._at("snapshot"), SnapshotPointer)
        start = self._keys.piece(pointer.directory, 0)
        pieces = [
            pair.value
            async for pair in self._scan(start, self._keys.after_pieces(pointer.directory), revision, PAGE_PIECES)
        ]
        whole = b"".join(pieces)
        if len(pieces) != pointer.pieces or len(whole) != pointer.size:
            raise DamagedStore(
                self._at(f"pieces/{pointer.directory}"),
                f"{len(pieces)} pieces with {len(whole)} bytes instead of {pointer.pieces} with {pointer.size}",
            )
        return decode_snapshot(whole, self._at(f"pieces/{pointer.directory}"))

    async def _scan(self, start: bytes, end: bytes, revision: int, limit: int) -> AsyncIterator[pb.KeyValue]:
        while True:
            request = pb.Range(key=start, range_end=end, limit=limit, revision=revision, sort_order=pb.Range.ASCENDING)
            answer = await self._client.call(RANGE, request)
            for pair in answer.kvs:
                yield pair
            if not answer.more:
                return
            start = answer.kvs[-1].key + b"\0"

    # Trimming.

    async def trim(self, epoch: LeaderEpoch, snapshot: Snapshot, *, timeout_ms: int = TRIM_TIMEOUT_MS) -> None:
        async with self._calls.call("trim", timeout_ms), self._trimming:
            while not await self._trim(epoch, snapshot):
                pass

    async def _trim(self, epoch: LeaderEpoch, snapshot: Snapshot) -> bool:
        """Write the pieces. Then, in one transaction, switch over to them and remove what is no longer needed."""
        keys, head = self._keys, await self._head()
        require_leader(head.leader, epoch)
        if snapshot.index > head.last:
            raise not_stored(snapshot, head.last)
        before = (await self._client.call(RANGE, pb.Range(key=keys.snapshot))).kvs
        if self._is_trimmed(before, snapshot):
            return True
        first_kept = await self._batch_with(snapshot.index)
        directory, pointer = await self._write_pieces(epoch, snapshot)
        switch = pb.Txn(
            compare=[
                is_equal(keys.epoch, number(epoch)),
                is_unchanged(keys.snapshot, before[0].mod_revision if before else 0),
            ],
            success=[
                put(keys.snapshot, pointer),
                delete(keys.decisions, first_kept),
                delete(keys.pieces, keys.piece(directory, 0)),
                delete(keys.after_pieces(directory), keys.pieces_end),
            ],
            failure=[get(keys.leader), get(keys.snapshot)],
        )
        answer = await self._client.call(TXN, switch)
        if answer.succeeded:
            self._trimmed_to = snapshot.index
            self._wrote(answer)
            return True
        require_leader(self._leader_in(value(answer, 0)), epoch)
        return self._is_trimmed(answer.responses[1].range.kvs, snapshot)

    def _is_trimmed(self, stored: Sequence[pb.KeyValue], snapshot: Snapshot) -> bool:
        if stored:
            self._trimmed_to = decode_record(stored[0].value, self._at("snapshot"), SnapshotPointer).index
        return snapshot.index <= self._trimmed_to

    async def _batch_with(self, index: DecisionIndex) -> bytes:
        """Return the key of the batch that contains this decision."""
        keys = self._keys
        request = pb.Range(key=keys.decisions, range_end=keys.batch(index + 1), limit=1, keys_only=True)
        request.sort_order = pb.Range.DESCENDING
        answer = await self._client.call(RANGE, request)
        if not answer.kvs:
            raise DamagedStore(self._at("decisions"), f"no decision up to {index} is left")
        return answer.kvs[0].key

    async def _write_pieces(self, epoch: LeaderEpoch, snapshot: Snapshot) -> tuple[str, bytes]:
        """Write the snapshot in pieces; return their directory and the encoded pointer. The name of the directory was
        never used before, because writes of an earlier attempt may still arrive."""
        # Compressing a large snapshot takes long enough to delay other work, so a thread does it.
        whole = await asyncio.to_thread(encode_snapshot, epoch, snapshot)
        directory = f"{snapshot.index:020d}-{system.token_hex(8)}"
        starts = range(0, len(whole), PIECE_BYTES)
        for n, start in enumerate(starts):
            txn = pb.Txn(
                compare=[is_equal(self._keys.epoch, number(epoch))],
                success=[put(self._keys.piece(directory, n), whole[start : start + PIECE_BYTES])],
                failure=[get(self._keys.leader)],
            )
            answer = await self._client.call(TXN, txn)
            if not answer.succeeded:
                leader = self._leader_in(value(answer, 0))
                require_leader(leader, epoch)
                raise DamagedStore(self._at("epoch"), f"the leader is of epoch {leader.epoch}")
        pointer = SnapshotPointer(snapshot.index, directory, len(starts), len(whole))
        return directory, encode_record(pointer, epoch, snapshot.index)

    # Closing and upkeep.

    async def close(self, *, timeout_ms: int = TIMEOUT_MS) -> None:
        if not await self._calls.close():
            return
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._client.close()
        except TimeoutError:
            _log.warning("connections to %s were not closed within %d ms", self._where, timeout_ms)

    def _wrote(self, answer: pb.TxnAnswer) -> None:
        self._revision = max(self._revision, answer.header.revision)
        if self._upkeep is None:
            self._upkeep = asyncio.get_running_loop().create_task(self._keep_up(), name="upkeep of etcd")

    async def _keep_up(self) -> None:
        """Compact etcd while this node writes. Otherwise etcd keeps overwritten and deleted revisions until its quota
        is used up. Revisions that were current within the last turn are kept for their readers."""
        before = self._revision
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            written = self._revision
            try:
                async with asyncio.timeout(UPKEEP_SECONDS):
                    await self._client.choose()
                    if written > before:
                        await self._client.call(COMPACT, pb.Compaction(revision=before))
            except Compacted:
                pass
            except (CutwaterError, TimeoutError) as error:
                _log.warning("%s could not be compacted, trying again: %s", self._where, str(error) or "no answer")
            before = written

    def _number_in(self, data: bytes | None, name: str) -> int:
        if data is None:
            return 0
        if not data.isdigit():
            raise DamagedStore(self._at(name), "it is no number")
        return int(data)

    def _at(self, name: str) -> str:
        return f"{self._where}: {self._keys.root}{name}"


# Parts of transactions.


def number(n: int) -> bytes:
    return b"%020d" % n


def put(key: bytes, data: bytes) -> pb.Operation:
    return pb.Operation(put=pb.Put(key=key, value=data))


def get(key: bytes) -> pb.Operation:
    return pb.Operation(range=pb.Range(key=key))


def delete(start: bytes, end: bytes) -> pb.Operation:
    return pb.Operation(delete_range=pb.DeleteRange(key=start, range_end=end))


def is_equal(key: bytes, data: bytes) -> pb.Compare:
    return pb.Compare(target=pb.Compare.VALUE, key=key, value=data)


def is_unchanged(key: bytes, mod_revision: int) -> pb.Compare:
    """Compare the revision of the last change; 0 means that the key is absent."""
    return pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=mod_revision)


def value(answer: pb.TxnAnswer, n: int) -> bytes | None:
    """Return the value found by the ``n``-th read of the branch that was taken."""
    found = answer.responses[n].range.kvs
    return found[0].value if found else None
