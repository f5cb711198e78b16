"""The data of the etcd model: revisions of keys, transactions and compaction, with the refusals of the real server.

It knows the requests in ``metadata/etcd/etcd.proto`` and no others. Requests are executed one after the other, as the
members of a real cluster agree to. ``tests/integration/stores`` compares it with a real etcd, answer by answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping

import grpc
from msgspec import Struct

from cutwater.metadata.etcd import etcd_pb2 as pb

REQUEST_BYTES_MAX = 1_572_864
"""Size of the largest write that etcd accepts by default (1.5 MiB)."""
OPERATIONS_MAX = 128
"""Most comparisons or operations in one transaction, by default."""
ENVELOPE_BYTES = 16
"""What etcd adds to a request before it compares the size; the real number varies by a few bytes."""

Changed = Callable[[int, Mapping[bytes, bytes | None]], None]
"""Called with the revision and the changed keys; None stands for a deletion."""


class EtcdRefusal(Exception):
    """A request that etcd refuses, with the status and the text of the real server."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


class KeyVersion(Struct, frozen=True):
    """What a transaction made of a key. ``value`` is None if it deleted the key."""

    revision: int
    created: int
    number: int
    value: bytes | None


class EtcdData:
    """All keys. ``changed`` hears of every write; ``quota_bytes`` limits what is kept, until ``disarm``."""

    def __init__(self, quota_bytes: int | None = None) -> None:
        self.revision = 1
        self.compacted = 0
        self.quota_bytes = quota_bytes
        self.is_out_of_space = False
        self.changed: list[Changed] = []
        self._versions: dict[bytes, list[KeyVersion]] = {}
        self._sorted: list[bytes] = []

    # Requests.

    def range(self, request: pb.Range) -> pb.RangeAnswer:
        _check_key(request.key)
        self._check_revision(request.revision)
        return self._range(request, self.revision)

    def txn(self, request: pb.Txn) -> pb.TxnAnswer:
        self._check_txn(request)
        if self.quota_bytes is not None and not self._has_room(request):
            raise EtcdRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")
        succeeded = all(map(self._holds, request.compare))
        operations = request.success if succeeded else request.failure
        for operation in operations:
            if operation.WhichOneof("request") == "range":
                self._check_revision(operation.range.revision)
        revision, changes = self.revision + 1, dict[bytes, bytes | None]()
        answers = []
        for operation in operations:
            answer = pb.OperationAnswer()
            match operation.WhichOneof("request"):
                case "range":
                    answer.range.CopyFrom(self._range(operation.range, revision))
                case "put":
                    self._write(operation.put.key, operation.put.value, revision)
                    changes[operation.put.key] = operation.put.value
                case "delete_range":
                    for key in self._keys(operation.delete_range.key, operation.delete_range.range_end):
                        if self.version(key) is not None:
                            self._write(key, None, revision)
                            changes[key] = None
            answers.append(answer)
        if changes:
            self.revision = revision
            for tell in self.changed:
                tell(revision, changes)
        return pb.TxnAnswer(header=self._header(), succeeded=succeeded, responses=answers)

    def compact(self, request: pb.Compaction) -> pb.CompactionAnswer:
        if request.revision <= self.compacted:
            raise _compacted()
        if request.revision > self.revision:
            raise _future()
        self.compacted = request.revision
        for key, versions in list(self._versions.items()):
            first = max(0, bisect_right(versions, request.revision, key=_revision) - 1)
            if versions[first].value is None and versions[first].revision <= request.revision:
                first += 1
            del versions[:first]
            if not versions:
                del self._versions[key]
                del self._sorted[bisect_left(self._sorted, key)]
        return pb.CompactionAnswer(header=self._header())

    # Reading.

    def version(self, key: bytes, revision: int | None = None) -> KeyVersion | None:
        """Return the key as of a revision, or now; None if it is absent then."""
        versions = self._versions.get(key, [])
        at = len(versions) if revision is None else bisect_right(versions, revision, key=_revision)
        return versions[at - 1] if at and versions[at - 1].value is not None else None

    def value(self, key: bytes) -> bytes | None:
        version = self.version(key)
        return version.value if version else None

    def size(self) -> int:
        """Return roughly how many bytes are kept, with old versions."""
        return sum(
            len(key) + len(version.value or b"") for key, versions in self._versions.items() for version in versions
        )

    def disarm(self) -> None:
        """Take writes again, as after ``etcdctl alarm disarm``."""
        self.is_out_of_space = False

    def changes_of(self, key: bytes, start_revision: int) -> list[pb.Event]:
        return [
            pb.Event(kv=_pair(key, version))
            for version in self._versions.get(key, [])
            if version.revision >= start_revision
        ]

    def _range(self, request: pb.Range, newest: int) -> pb.RangeAnswer:
        revision = request.revision if request.revision > 0 else newest
        found = [
            (key, version)
            for key in self._keys(request.key, request.range_end)
            if (version := self.version(key, revision)) is not None
        ]
        if request.sort_order == pb.Range.DESCENDING:
            found.reverse()
        more = 0 < request.limit < len(found)
        if more:
            del found[request.limit :]
        kvs = [_pair(key, version, is_bare=request.keys_only) for key, version in found]
        return pb.RangeAnswer(header=self._header(), kvs=kvs, more=more)

    def _keys(self, start: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [start] if start in self._versions else []
        last = len(self._sorted) if end == b"\0" else bisect_left(self._sorted, end)
        return self._sorted[bisect_left(self._sorted, start) : last]

    def _header(self) -> pb.Header:
        return pb.Header(revision=self.revision)

    # Writing.

    def _write(self, key: bytes, value: bytes | None, revision: int) -> None:
        before = self.version(key)
        created, number = (before.created, before.number + 1) if before else (revision, 1)
        version = KeyVersion(revision, 0, 0, None) if value is None else KeyVersion(revision, created, number, value)
        if key not in self._versions:
            self._versions[key] = []
            insort(self._sorted, key)
        self._versions[key].append(version)

    def _holds(self, compare: pb.Compare) -> bool:
        version = self.version(compare.key)
        mine: int | bytes | None
        match compare.target:
            case pb.Compare.VERSION:
                mine, other = (version.number if version else 0), compare.version
            case pb.Compare.CREATE:
                mine, other = (version.created if version else 0), compare.create_revision
            case pb.Compare.MOD:
                mine, other = (version.revision if version else 0), compare.mod_revision
            case _:
                if version is None:
                    # An absent key has no value, so no comparison of its value holds.
                    return False
                return _compares(version.value or b"", compare.result, compare.value)
        return _compares(mine, compare.result, other)

    # Refusals.

    def _check_txn(self, request: pb.Txn) -> None:
        if max(len(request.compare), len(request.success), len(request.failure)) > OPERATIONS_MAX:
            raise EtcdRefusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
        for compare in request.compare:
            _check_key(compare.key)
        for branch in (request.success, request.failure):
            for operation in branch:
                _check_key(getattr(operation, operation.WhichOneof("request") or "range").key)
        for branch in (request.success, request.failure):
            _check_distinct(branch)
        if not _only_reads(request) and request.ByteSize() + ENVELOPE_BYTES > REQUEST_BYTES_MAX:
            raise EtcdRefusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise _future()
        if 0 < revision < self.compacted:
            raise _compacted()

    def _has_room(self, request: pb.Txn) -> bool:
        """Out of space, etcd refuses every transaction, also one that only reads."""
        assert self.quota_bytes is not None
        puts = [len(o.put.key) + len(o.put.value) for o in request.success if o.WhichOneof("request") == "put"]
        if puts and self.size() + sum(puts) > self.quota_bytes:
            self.is_out_of_space = True
        return not self.is_out_of_space


def _compacted() -> EtcdRefusal:
    return EtcdRefusal(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")


def _future() -> EtcdRefusal:
    return EtcdRefusal(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")


def _check_key(key: bytes) -> None:
    if not key:
        raise EtcdRefusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: key is not provided")


def _check_distinct(operations: Iterable[pb.Operation]) -> None:
    """A transaction may change a key once."""
    puts, deletions = set[bytes](), list[pb.DeleteRange]()
    for operation in operations:
        match operation.WhichOneof("request"):
            case "put" if operation.put.key in puts:
                raise _duplicate()
            case "put":
                puts.add(operation.put.key)
            case "delete_range":
                deletions.append(operation.delete_range)
    if any(_covers(deletion, key) for deletion in deletions for key in puts):
        raise _duplicate()


def _duplicate() -> EtcdRefusal:
    return EtcdRefusal(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")


def _covers(deletion: pb.DeleteRange, key: bytes) -> bool:
    if not deletion.range_end:
        return key == deletion.key
    return key >= deletion.key and (deletion.range_end == b"\0" or key < deletion.range_end)


def _only_reads(request: pb.Txn) -> bool:
    return all(operation.WhichOneof("request") == "range" for operation in (*request.success, *request.failure))


def _compares(mine: int | bytes, result: pb.Compare.Result, other: int | bytes) -> bool:
    match result:
        case pb.Compare.EQUAL:
            return mine == other
        case pb.Compare.NOT_EQUAL:
            return mine != other
        case pb.Compare.GREATER:
            return mine > other  # type: ignore[operator]
    return mine < other  # type: ignore[operator]


def _revision(version: KeyVersion) -> int:
    return version.revision


def _pair(key: bytes, version: KeyVersion, *, is_bare: bool = False) -> pb.KeyValue:
    return pb.KeyValue(
        key=key,
        create_revision=version.created,
        mod_revision=version.revision,
        version=version.number,
        value=b"" if is_bare else version.value or b"",
    )
