"""Repairs damage: an intact copy from a peer replaces data that fails its checksum.

Until then the damaged range is not served. Entries without an intact copy stay damaged and are never served. If a copy
cannot be put in place, the replica counts as one that cannot be opened, and is learned anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from cutwater.core.read.commit_index import context_of_llsn
from cutwater.errors import CutwaterError, Damaged
from cutwater.format.entry_codec import EntryFrame, frames_in
from cutwater.format.errors import DamagedEntries, DamagedFile
from cutwater.protocol import storage_api as api
from cutwater.runtime import system
from cutwater.storage.files import look_again
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.results import FrameCheck, StorageFinding
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.peer_connections import Peers
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.types import GLSN, LLSN, CommitContext, LogStreamId

_log = logging.getLogger(__name__)

COPY_MS_MAX = 5_000
REPAIR_SECONDS_MAX = 60.0
PLACES_MAX = 1_024
"""Maximum number of known damaged places of one log stream."""
AGAIN_SECONDS = 1.0
"""How long a place waits after its first failed repair. It waits twice as long after each further one."""
AGAIN_SECONDS_MAX = 16.0
TRY_AGAIN_SECONDS = 5.0


class _Known(Struct):
    """Known damage, since when it is known, and why it is not repaired yet."""

    error: Damaged
    since_us: int
    trouble: str = ""
    pause: float = 0.0
    """How long it waits after the last failed repair."""
    not_before: float = 0.0
    """When the next attempt may begin, by the monotonic clock."""


def damage_of(finding: StorageFinding) -> Damaged:
    """Convert a finding into the error that a reader of the damaged place gets."""
    if finding.first_llsn is None:
        return DamagedFile(Path(finding.where), finding.what)
    return DamagedEntries(finding.where, finding.first_llsn, finding.last_llsn or finding.first_llsn, finding.what)


class Mender:
    """Repairs one place at a time for each log stream. Failed repairs are repeated, and are reported meanwhile."""

    def __init__(self, node: StorageNode, peers: Peers, spawn: Callable[[Awaitable[None]], None]) -> None:
        self._node, self._peers, self._spawn = node, peers, spawn
        self._known: dict[LogStreamId, dict[tuple[LLSN, LLSN], _Known]] = {}
        """Damage by its LLSNs; the place tried last comes last."""
        self._at_work: set[LogStreamId] = set()

    @property
    def damage(self) -> tuple[api.DamageStatus, ...]:
        """Known damage of this node, and why each place is not repaired yet."""
        return tuple(
            api.DamageStatus(stream, _described(known.error), *place, known.since_us, known.trouble)
            for stream, places in sorted(self._known.items())
            for place, known in sorted(places.items())
        )

    async def try_again_for_ever(self) -> None:
        """Repeat failed repairs: a peer with an intact copy may be back."""
        while True:
            await asyncio.sleep(TRY_AGAIN_SECONDS)
            for stream in list(self._known):
                if stream not in self._node.replicas:
                    del self._known[stream]
                else:
                    self._begin(stream)

    def mend(self, stream: LogStreamId, error: Damaged) -> None:
        """Begin to repair this damage, unless a repair is in progress."""
        place = _place_of(error)
        known = self._known.setdefault(stream, {})
        if place not in known:
            if len(known) >= PLACES_MAX:
                # It is reported again when it is read after others have been repaired.
                return
            known[place] = _Known(error, system.wall_time_ns() // 1_000)
        if system.monotonic() >= known[place].not_before:
            self._begin(stream)

    def _begin(self, stream: LogStreamId) -> None:
        if stream not in self._at_work:
            self._at_work.add(stream)
            self._spawn(self._work(stream))

    async def _work(self, stream: LogStreamId) -> None:
        """Try to repair every place once, including places that are found meanwhile."""
        begun = system.monotonic()
        try:
            while (place := self._next(stream, begun)) is not None:
                await self._try(stream, place)
        finally:
            self._at_work.discard(stream)

    def _next(self, stream: LogStreamId, begun: float) -> tuple[LLSN, LLSN] | None:
        places = self._known.get(stream, {})
        return next((place for place, known in places.items() if known.not_before <= begun), None)

    async def _try(self, stream: LogStreamId, place: tuple[LLSN, LLSN]) -> None:
        known = self._known[stream].pop(place)
        # Put it at the end: the other places have their turn first.
        self._known[stream][place] = known
        if not known.trouble:
            _log.error("log stream %s is damaged: %s", stream, known.error.message, extra={"stream": stream})
        try:
            async with asyncio.timeout(REPAIR_SECONDS_MAX):
                await self._mend(self._node.driver(stream), known.error)
        except (CutwaterError, TimeoutError) as failure:
            trouble = str(failure) or "the repair took too long"
            if trouble != known.trouble:
                _log.warning("log stream %s could not be repaired: %s", stream, trouble, extra={"stream": stream})
            known.pause = min(known.pause * 2 or AGAIN_SECONDS, AGAIN_SECONDS_MAX)
            known.trouble, known.not_before = trouble, system.monotonic() + known.pause
            self._node.counters.repairs_failed += 1
        else:
            places = self._known.get(stream, {})
            places.pop(place, None)
            if not places:
                self._known.pop(stream, None)

    async def _mend(self, driver: ReplicaDriver, error: Damaged) -> None:
        files = 0
        with suppress(Damaged):
            # Headers can be rebuilt from what is known here. Where that is not enough, copies of the entries help.
            files = await driver.in_writer(driver.storage.repair_headers)
        if isinstance(error, DamagedEntries):
            copies = await self._mend_entries(driver, error.first_llsn, error.last_llsn)
        else:
            copies = await self._mend_contexts(driver) + await self._mend_below_marks(driver)
            if not files and not copies:
                await self._require_readable(driver)
        if not driver.replica.trusted:
            driver.reopen()
        if files or copies:
            what = "log stream %s was repaired: %d files from local data, %d copies from a peer"
            _log.info(what, driver.stream, files, copies, extra={"stream": driver.stream})

    async def _require_readable(self, driver: ReplicaDriver) -> None:
        """Check that all files are readable, because nothing was left to repair."""
        left = await self._node.in_thread(driver.storage.check_files)
        if left:
            raise damage_of(left[0])

    async def _mend_entries(self, driver: ReplicaDriver, first_llsn: LLSN, llsn: LLSN) -> int:
        """Repair entries from the last one backwards: the first ones may be trimmed, and then no copy of them exists.
        Returns the number of copies that were needed."""
        storage, copies = driver.storage, 0
        while llsn >= max(first_llsn, storage.first_llsn):
            frame, _ = await self._fetch(driver, llsn)
            entry, running = frame.entry, frame.header.running
            try:
                await driver.in_writer(partial(storage.repair, entry, running))
                await self._node.in_thread(partial(storage.entry_at, entry.first_llsn))
            except Damaged as error:
                self._give_up(driver, error)
                raise
            self._node.counters.entries_repaired += 1
            copies += 1
            llsn = LLSN(entry.first_llsn - 1)
        return copies

    async def _mend_contexts(self, driver: ReplicaDriver) -> int:
        """Repair commit contexts. Returns the number of copies that were needed."""
        storage, copies = driver.storage, 0
        search = partial(look_again, partial(first_damaged_commit, storage), Path("commits"))
        while (llsn := await self._node.in_thread(search)) is not None:
            commits = await self._fetch_commits(driver, llsn)
            repaired = [await driver.in_writer(partial(storage.repair_context, commit)) for commit in commits]
            if not any(repaired):
                error = DamagedFile(Path("commits"), f"the commit of LLSN {llsn} cannot be put in its place")
                self._give_up(driver, error)
                raise error
            self._node.counters.contexts_repaired += 1
            copies += 1
        return copies

    async def _mend_below_marks(self, driver: ReplicaDriver) -> int:
        """Repair entries without which a segment gets no new marks. Returns the number of copies that were needed."""
        copies, before = 0, None
        while (error := await driver.in_writer(driver.storage.repair_marks)) is not None:
            place = error.where, error.first_llsn, error.last_llsn
            if place == before:
                # The copy did not help.
                raise error
            before = place
            copies += await self._mend_entries(driver, error.first_llsn, error.last_llsn)
        return copies

    async def _fetch_commits(self, driver: ReplicaDriver, llsn: LLSN) -> tuple[CommitContext, ...]:
        """Fetch an intact copy of the commit that covers this LLSN. Those of trimmed entries are needed too: a search
        among the commits may meet them."""
        if llsn >= driver.storage.first_llsn:
            _, commits = await self._fetch(driver, llsn)
            return commits
        asked = api.CopyArguments(driver.stream, llsn, commits_only=True)
        others = set(driver.replica.hard_state.chain) - {self._node.node}
        lacking = set()
        for peer, connection in self._peers.connected(driver.replica.hard_state.chain):
            try:
                received = await connection.call(api.COPY, asked, timeout_ms=COPY_MS_MAX)
            except CutwaterError as error:
                _log.debug("storage node %s has no copy of %s: %s", peer, asked, error)
                continue
            if received.value.commits:
                return received.value.commits
            lacking.add(peer)
        gone = Damaged(
            f"no other storage node has the commit of LLSN {llsn} of log stream {driver.stream}, which is trimmed"
        )
        if others and others <= lacking:
            # All of them are complete without it, so a new copy of one of them is, too.
            self._give_up(driver, gone)
        raise gone

    def _give_up(self, driver: ReplicaDriver, error: CutwaterError) -> None:
        """Let the replica be learned anew, unless that has happened meanwhile."""
        if self._node.replicas.get(driver.stream) is driver:
            self._node.cannot_open(driver.stream, error)

    async def _fetch(self, driver: ReplicaDriver, llsn: LLSN) -> tuple[EntryFrame, tuple[CommitContext, ...]]:
        """Fetch an intact copy of a committed entry, and its commits, from any peer that has one."""
        asked = api.CopyArguments(driver.stream, llsn)
        for peer, connection in self._peers.connected(driver.replica.hard_state.chain):
            try:
                received = await connection.call(api.COPY, asked, timeout_ms=COPY_MS_MAX)
                frame = next(frames_in(bytes(received.body)))
            except (CutwaterError, StopIteration) as error:
                _log.debug("storage node %s has no copy of %s: %s", peer, asked, error)
                continue
            if await self._belongs(driver, frame, received.value.commits, llsn):
                return frame, received.value.commits
        raise Damaged(f"no other storage node has an intact copy of LLSN {llsn} of log stream {driver.stream} now")

    async def _belongs(
        self, driver: ReplicaDriver, frame: EntryFrame, commits: tuple[CommitContext, ...], llsn: LLSN
    ) -> bool:
        """Whether this is the entry that was committed at this place: it must have the epoch of the commit here or, if
        that cannot be read, of the commit that came with it."""
        header = frame.header
        if not header.first_llsn <= llsn <= header.last_llsn:
            return False
        own = await self._node.in_thread(partial(_commit_of, driver.storage, header.first_llsn))
        said = own or next((c for c in commits if c.first_llsn <= header.first_llsn <= c.last_llsn), None)
        return said is not None and said.epoch == header.epoch and header.last_llsn <= said.last_llsn


def _commit_of(storage: SegmentStorage, llsn: LLSN) -> CommitContext | None:
    with suppress(DamagedFile):
        return look_again(lambda: context_of_llsn(storage.contexts, llsn), Path("commits"))
    return None


def verified(driver: ReplicaDriver, check: FrameCheck | None) -> list[tuple[StorageFinding, GLSN | None]]:
    """Read everything of a replica; return all findings, each with the first position behind it. Data that is trimmed
    but not removed yet does not count."""
    storage = driver.storage
    found = [(finding, _behind(storage, finding)) for finding in storage.verify(check)]
    trimmed_before = driver.replica.hard_state.trimmed_before
    return [(finding, behind) for finding, behind in found if behind is None or behind > trimmed_before]


def _behind(storage: SegmentStorage, finding: StorageFinding) -> GLSN | None:
    last = finding.last_llsn or finding.first_llsn
    commit = _commit_of(storage, last) if last is not None else None
    return None if commit is None or last is None else GLSN(commit.glsn_of(last) + 1)


def _described(error: Damaged) -> str:
    """Describe the file and its damage, without advice: this node does not know which copies exist."""
    if isinstance(error, DamagedEntries):
        return f"{error.where}: {error.what}"
    return f"{error.path} is damaged: {error.what}" if isinstance(error, DamagedFile) else error.message


def _place_of(error: Damaged) -> tuple[LLSN, LLSN]:
    return (error.first_llsn, error.last_llsn) if isinstance(error, DamagedEntries) else (LLSN(0), LLSN(0))


def first_damaged_commit(storage: SegmentStorage) -> LLSN | None:
    """Return an LLSN of the first unreadable commit context, inferred from its neighbours; None if all are readable."""
    contexts = storage.contexts
    end = LLSN((contexts.first_llsn or storage.first_llsn) - 1)
    for i in range(len(contexts)):
        try:
            end = contexts[i].last_llsn
        except DamagedFile:
            try:
                return LLSN(contexts[i + 1].first_llsn - 1)
            except (DamagedFile, IndexError):
                return LLSN(end + 1)
    return None
