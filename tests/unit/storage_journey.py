"""The life of one replica on a disk that fails, and what must hold of it: what was reported as durable is there, what
is there was written, and nothing wrong is served.

A seed gives one life. ``Violation`` is raised for what contradicts the contract of storage; any other exception that
comes out is one that storage must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from storage_kit import DIRECTORY, IDENTITY, commit_of

from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError, Damaged
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import NO_TIME
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule, ProcessDied
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import GLSN, LLSN, Batch, CommitContext, Entry, Epoch, EventTime

OPTIONS = SegmentOptions(segment_bytes=900, index_interval_bytes=256, commits_per_file=3, room_ahead_bytes=600)
STEPS = 40
REOPENS_MAX = 4
"""How often opening is tried on a disk that fails, before the disk is well again."""

ERRORS = (DiskFault.READ_ERROR, DiskFault.WRITE_ERROR, DiskFault.FULL, DiskFault.SYNC_ERROR)
SLOW = (DiskFault.SLOW_SYNC, DiskFault.HUNG_SYNC)
WEIGHTS = {
    "write": 30,
    "sync": 14,
    "sync_entries": 8,
    "commit": 18,
    "save_state": 4,
    "save_dedup": 2,
    "truncate": 4,
    "trim": 5,
    "restart": 1,
    "read": 8,
    "reopen": 2,
    "kill": 4,
    "cut_power": 6,
}


class Violation(AssertionError):
    """What contradicts the contract of storage."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Model:
    """What may be found if the process stops before it has done anything of the present step."""

    def __init__(self, journey: Journey) -> None:
        self.entries, self.contexts = list(journey.entries), list(journey.contexts)
        self.durable, self.contexts_durable, self.first = journey.durable, journey.contexts_durable, journey.first
        self.states, self.dedups = list(journey.states), list(journey.dedups)

    def mix(self, journey: Journey) -> None:
        """Let the journey expect anything between this and what the step has done to it."""
        kept = [entry for entry in self.entries if entry.first_llsn < journey.first]
        journey.entries = max(self.entries, [*kept, *journey.entries], key=len)
        journey.contexts = max(self.contexts, journey.contexts, key=len)
        journey.durable = min(self.durable, len(kept) + journey.durable)
        journey.contexts_durable = min(self.contexts_durable, journey.contexts_durable)
        journey.first = self.first
        journey.states, journey.dedups = self.states + journey.states, self.dedups + journey.dedups


class Journey:
    def __init__(
        self,
        seed: int,
        faults: tuple[DiskFault, ...] = (),
        probability: float = 0.02,
        weights: dict[str, int] | None = None,
    ) -> None:
        self.weights = weights or WEIGHTS
        self.rng = Random(f"journey/{seed}")
        self.clock = Clock()
        self.files = FaultFiles(self.rng, clock=self.clock)
        self.files.recording = False
        self.rules: list[DiskFaultRule] = []
        self.serial = 0
        self.entries: list[Entry] = []
        """What was written since the log began or was trimmed, and not removed."""
        self.durable = 0
        """How many of them were reported as durable."""
        self.contexts: list[CommitContext] = []
        self.contexts_durable = 0
        self.base = 0
        self.first = 1
        self.states: list[HardState | None] = [None]
        """The saved state first, then what the present call saves."""
        self.dedups: list[DedupCheckpoint | None] = [None]
        self.happened: list[str] = []
        self.unheard: list[tuple[float, int, int]] = []
        """Reports of the present step: when each comes, and how many entries and commits it says are durable."""
        self.open()
        self.save_state()
        self.rules = [DiskFaultRule(fault, self.rng.uniform(0.2, 2.0) * probability) for fault in faults]

    # Running.

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                self.step()
            self.cut_power()
        except BaseException as error:
            error.add_note("what happened: " + ", ".join(self.happened[-25:]))
            raise

    def step(self) -> None:
        call = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
        self.happened.append(call)
        if self.rng.random() < 0.04:
            self.files.die_at = self.files.calls + self.rng.randint(1, 12)
        for rule in self.rules:
            self.files.faults.add(rule)
        before = Model(self)
        try:
            getattr(self, call)()
        except DiskFull:
            self.wait()
            self.happened.append("full")
            if self.rng.random() < 0.5:
                self.go_on_when_full()
            else:
                self.cut_back()
        except StorageBroken:
            self.wait()
            self.happened.append("broken")
            self.cut_back()
        except Damaged as error:
            # Without damage on the disk, only a read that failed is reported like this.
            self.wait()
            self.check_read_failed(error)
            self.die()
        except ProcessDied:
            self.wait()
            self.happened.append("died")
            self.die()
        else:
            self.pass_time(before)
        self.calm()

    def wait(self) -> None:
        """Let the time pass that slow syncs took. All reports come."""
        self.clock.now += self.files.take_charged_seconds()
        self.unheard.clear()

    def pass_time(self, before: Model) -> None:
        """Let that time pass, or stop in the middle of it, before some of the reports come."""
        if not self.files.charged_seconds or self.rng.random() < 0.5:
            self.wait()
            return
        self.clock.now += self.rng.uniform(0.0, self.files.take_charged_seconds())
        heard = [report for report in self.unheard if report[0] <= self.clock.now]
        self.happened.append(f"stopped when {len(heard)} of {len(self.unheard)} reports had come")
        before.mix(self)
        if heard:
            _, self.durable, self.contexts_durable = heard[-1]
        self.unheard.clear()
        if self.rng.random() < 0.7:
            self.cut_power()
        else:
            self.die()

    def calm(self, *, well: bool = True) -> None:
        """Let the disk be well, or only fail."""
        self.files.die_at = None
        self.files.faults.clear()
        if not well:
            for rule in self.rules:
                if rule.fault not in SLOW:
                    self.files.faults.add(rule)

    def report(self) -> None:
        """Report everything that storage says is durable."""
        end, commit = self.storage.durable_end, self.storage.durable_commit
        self.durable = sum(1 for entry in self.entries if entry.last_llsn <= end)
        self.contexts_durable = 0 if commit is None else self.contexts.index(commit) + 1
        self.unheard.append((self.files.now, self.durable, self.contexts_durable))

    def check_read_failed(self, error: Damaged) -> None:
        check(any(rule.fault is DiskFault.READ_ERROR for rule in self.rules), f"no read failed: {error}")

    # Opening.

    def open(self) -> None:
        self.calm(well=False)
        for number in range(REOPENS_MAX):
            try:
                self.storage = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
                return
            except ProcessDied:
                self.files.kill()
            except (StorageBroken, DiskFull):
                self.happened.append("cannot open")
            except Damaged as error:
                self.check_read_failed(error)
            if number == REOPENS_MAX - 2:
                self.files.faults.clear()
        raise Violation("it cannot be opened on a disk that is well")

    def die(self) -> None:
        self.files.kill()
        if self.rng.random() < 0.5:
            self.files.evict()
        self.open()
        self.check_all()

    def cut_power(self) -> None:
        self.files.crash(self.rng, keep=self.rng.choice((0.0, 0.5, 0.9)), torn=self.rng.random() < 0.7)
        self.open()
        self.check_all()

    def cut_back(self) -> None:
        """As after every failure: go on from what was reported."""
        last = self.contexts[self.contexts_durable - 1].last_llsn if self.contexts_durable else self.base
        end = self.entries[self.durable - 1].last_llsn if self.durable else max(self.base, self.first - 1)
        if self.rng.random() < 0.5:
            self.files.evict()
        self.calm(well=False)
        for number in range(REOPENS_MAX):
            try:
                self.storage.cut_back(LLSN(end), LLSN(last))
            except ProcessDied:
                self.die()
                return
            except (StorageBroken, DiskFull):
                pass
            except Damaged as error:
                self.check_read_failed(error)
            else:
                self.check_all()
                check(len(self.entries) == self.durable, "more is left than was reported")
                check(len(self.contexts) == self.contexts_durable, "more commits are left than were reported")
                return
            if number == REOPENS_MAX - 2:
                self.files.faults.clear()
        raise Violation("it cannot be cut back on a disk that is well")

    def go_on_when_full(self) -> None:
        """Nothing was lost, and nothing need be reopened."""
        self.calm()
        self.follow()

    # What must hold.

    def check_all(self) -> None:
        """Hold the files against what was promised. What they have is durable from now on."""
        self.calm()
        try:
            self.follow()
        except Damaged as error:
            raise Violation(f"damaged: {error}") from error
        check(self.storage.verify() == [], f"verify: {self.storage.verify()}")
        self.durable, self.contexts_durable = len(self.entries), len(self.contexts)

    def follow(self) -> None:
        storage = self.storage
        check(storage.hard_state in self.states, f"{storage.hard_state} was never saved last")
        check(storage.dedup in self.dedups, f"{storage.dedup} was never saved last")
        self.states, self.dedups = [storage.hard_state], [storage.dedup]
        check(self.first <= storage.first_llsn, f"entries begin at {storage.first_llsn}, before {self.first}")
        self.first = storage.first_llsn
        found = list(storage.entries(storage.first_llsn, storage.end))
        written = [entry for entry in self.entries if entry.first_llsn >= self.first]
        self.durable = max(self.durable - (len(self.entries) - len(written)), 0)
        check(found == written[: len(found)], f"entries differ: {heads(found)}, not {heads(written)}")
        check(len(found) >= self.durable, f"reported entries are lost: {heads(written[len(found) : self.durable])}")
        self.entries = found
        self.follow_contexts()

    def follow_contexts(self) -> None:
        found = list(self.storage.contexts)
        check(bool(found) or not self.contexts_durable, "all commits are lost")
        if found:
            check(found[0] in self.contexts, f"a commit that was never written: {found[0]}")
            start = self.contexts.index(found[0])
            check(not start or found[0].first_llsn <= self.first, "commits are missing at the beginning")
            check(found == self.contexts[start : start + len(found)], "commits differ")
            check(start + len(found) >= self.contexts_durable, "reported commits are lost")
            check(found[-1].last_llsn <= self.storage.end, "a commit without its entries")
            self.contexts_durable = max(self.contexts_durable - start, 0)
        self.contexts = found

    # Calls.

    def fresh(self, first: int, count: int) -> list[Entry]:
        """Entries that were never written before, though others may have been in their place, of the same size."""
        made = []
        for _ in range(count):
            self.serial += 1
            body = (b"%d:" % self.serial).ljust(self.rng.choice((16, 16, 16, 40, 300)), b".")
            time = EventTime(self.serial)
            made.append(Entry(LLSN(first), Epoch(1), Batch(self.rng.choice((1, 1, 2)), body, crc32c(body), time, time)))
            first = made[-1].last_llsn + 1
        return made

    def write(self) -> None:
        more = self.fresh(self.storage.end + 1, self.rng.randint(1, 4))
        self.entries = [entry for entry in self.entries if entry.last_llsn <= self.storage.end] + more
        self.storage.write(more)
        self.report()

    def sync(self) -> None:
        self.storage.sync()
        self.report()
        check(self.durable == len(self.entries), "not all is durable after a sync")
        check(self.contexts_durable == len(self.contexts), "not all commits are durable after a sync")

    def sync_entries(self) -> None:
        """As a storage node does it: the report goes out first, and the mark is written then."""
        self.storage.sync(contexts=False, marks=False)
        self.report()
        self.storage.mark()

    def commit(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            end = self.contexts[-1].last_llsn if self.contexts else self.base
            group = [entry for entry in self.entries if end < entry.last_llsn <= self.storage.durable_end]
            group = group[: self.rng.randint(1, 3)]
            if not group:
                return
            context = commit_of(group, self.contexts[-1] if self.contexts else None)
            self.contexts.append(context)
            try:
                self.storage.write_contexts([context])
            except DiskFull:
                if self.storage.last_commit != context:
                    self.contexts.pop()
                raise

    def save(self, **changes: int) -> None:
        last = self.states[0] or HardState()
        fields = {name: getattr(last, name) for name in HardState.__struct_fields__}
        state = HardState(**{**fields, **changes})
        self.states.append(state)
        self.storage.save_hard_state(state)
        self.states = [state]

    def save_state(self) -> None:
        self.save(epoch=Epoch((self.states[0] or HardState()).epoch + 1))

    def save_dedup(self) -> None:
        self.serial += 1
        self.dedups.append(DedupCheckpoint(LLSN(self.serial), ()))
        self.storage.save_dedup(self.dedups[-1])
        self.dedups = self.dedups[-1:]

    def truncate(self) -> None:
        committed = self.contexts[-1].last_llsn if self.contexts else self.base
        ends = [entry.last_llsn for entry in self.entries if entry.last_llsn >= committed]
        end = self.rng.choice([max(committed, self.first - 1), *ends])
        self.durable = min(self.durable, sum(1 for entry in self.entries if entry.last_llsn <= end))
        self.storage.truncate(LLSN(end))
        self.entries = [entry for entry in self.entries if entry.last_llsn <= end]

    def trim(self) -> None:
        if self.contexts_durable:
            durable = self.contexts[self.contexts_durable - 1]
            before = GLSN(self.rng.randint(1, durable.high_watermark + 1))
            last = self.states[0] or HardState()
            self.save(trimmed_before=max(before, last.trimmed_before))
            self.storage.drop_before(before, durable.last_llsn)
            self.follow_trim(durable)

    def follow_trim(self, durable: CommitContext) -> None:
        check(self.storage.first_llsn <= durable.last_llsn + 1, "more than what is committed was trimmed")
        self.first = max(self.first, self.storage.first_llsn)
        kept = [entry for entry in self.entries if entry.first_llsn >= self.first]
        self.durable = max(self.durable - (len(self.entries) - len(kept)), 0)
        self.entries = kept

    def restart(self) -> None:
        """Begin anew beyond the end. Without faults: a restart that fails is for recovery to judge."""
        self.calm()
        first = self.storage.end + self.rng.randint(1, 5)
        self.save(base_llsn=LLSN(first - 1), base_glsn=GLSN(first * 50))
        self.storage.restart(LLSN(first), NO_TIME)
        self.base, self.first, self.entries, self.contexts = first - 1, first, [], []
        self.durable = self.contexts_durable = 0

    def read(self) -> None:
        """What is read is what was written, or an error."""
        storage = self.storage
        committed = [
            entry for entry in self.entries if self.contexts and entry.last_llsn <= self.contexts[-1].last_llsn
        ]
        if not committed:
            return
        reads: list[Callable[[], None]] = [self.read_range, self.read_entries, self.read_one, self.read_positions]
        try:
            self.rng.choice(reads)()
        except Damaged as error:
            self.check_read_failed(error)
        check(storage is self.storage, "reading changes nothing")

    def read_range(self) -> None:
        at = self.rng.randrange(len(self.entries))
        committed = self.storage.committed_end
        if self.entries[at].last_llsn > committed:
            return
        found = self.storage.read(self.entries[at].first_llsn, committed, self.rng.choice((1, 700, 10_000)))
        entries = [frame.entry for frame in found.frames]
        check(entries == self.entries[at : at + len(entries)], f"read: {heads(entries)}")
        check(found.commits[0].first_llsn <= found.first_llsn, "commits begin too late")
        check(found.commits[-1].last_llsn >= found.last_llsn, "commits end too early")
        check(all(context in self.contexts for context in found.commits), "a commit that was never made")

    def read_entries(self) -> None:
        at = self.rng.randrange(len(self.entries))
        found = list(self.storage.entries(self.entries[at].first_llsn, self.storage.end))
        check(found == self.entries[at:], f"entries: {heads(found)}, not {heads(self.entries[at:])}")

    def read_one(self) -> None:
        entry = self.rng.choice(self.entries)
        check(self.storage.entry_at(entry.last_llsn) == entry, f"entry at {entry.last_llsn}")

    def read_positions(self) -> None:
        context = self.rng.choice(self.contexts)
        if context.last_llsn >= self.first and context.first_glsn >= (self.states[0] or HardState()).trimmed_before:
            llsn = self.storage.from_glsn(context.last_glsn)
            check(llsn == context.last_llsn, f"GLSN {context.last_glsn} is at {llsn}, not at {context.last_llsn}")

    def reopen(self) -> None:
        """The process ends as it should."""
        try:
            self.storage.close()
        except CutwaterError:
            self.happened.append("cannot close")
        self.files.kill()
        self.open()
        self.check_all()

    def kill(self) -> None:
        self.die()


class DamagedJourney(Journey):
    """A life without failures, on a disk that damages something without a word. Nothing damaged is served or missed."""

    CALLS = ("write", "write", "write", "sync", "sync_entries", "commit", "commit", "save_state", "trim", "reopen")

    def live(self, fault: DiskFault | None = None) -> None:
        """Live until ``fault`` has struck once, and a little longer."""
        left = STEPS
        while left:
            left -= 1
            for rule in self.rules:
                self.files.faults.add(rule)
            # Opening finds damage, and here only the end looks for it.
            call = self.rng.choice(self.CALLS if fault is None and self.rules else self.CALLS[:-1])
            self.happened.append(call)
            try:
                getattr(self, call)()
            except Damaged as error:
                # It was met, and is no secret any more.
                self.check_read_failed(error)
            self.calm()
            if fault is not None and self.files.faults.struck:
                self.happened.append("struck")
                self.rules.clear()
                left, fault = self.rng.randint(0, 10), None
        # What only the last mark of a file covers looks like a torn tail if both are lost, and one write that goes
        # astray can do that. So the marks are written once more.
        for _ in range(2):
            self.write()
            self.storage.sync()
            self.commit()
            self.storage.sync()
        self.report()

    def read_wrong(self) -> None:
        """Reads go wrong, each for itself. The files are all right."""
        for fault in (DiskFault.FLIPPED_READ, DiskFault.STALE_READ, DiskFault.MISDIRECTED_READ, DiskFault.READ_ERROR):
            self.files.faults.add(DiskFaultRule(fault, self.rng.uniform(0.0, 0.3)))
        for _ in range(60):
            self.read()
        self.check_all()

    def check_read_failed(self, error: Damaged) -> None:
        check(bool(self.files.faults.struck), f"nothing is damaged: {error}")

    def find_damage(self) -> None:
        """End, and begin again: each entry and commit is right, or an error, or known to be lost."""
        promised, contexts = self.entries[: self.durable], self.contexts[: self.contexts_durable]
        self.storage.close()
        self.files.kill()
        self.files.evict()
        try:
            storage = SegmentStorage(DIRECTORY, IDENTITY, OPTIONS, self.files)
            found = storage.find()
        except Damaged:
            return
        intact = True
        for entry in promised:
            if entry.first_llsn > storage.end:
                check(found.damaged is not None or bool(found.lost), f"LLSN {entry.first_llsn} is lost without a word")
                continue
            try:
                there = storage.entry_at(entry.first_llsn)
                check(there == entry, f"wrong entry: {heads([there])} instead of {heads([entry])}")
            except Damaged:
                intact = False
        if contexts and found.last_commit != contexts[-1]:
            check(bool(found.lost), f"commits are lost without a word: {found.last_commit}, not {contexts[-1]}")
        for at in range(len(storage.contexts)):
            try:
                check(storage.contexts[at] in contexts, f"wrong commit: {storage.contexts[at]}")
            except Damaged:
                intact = False
        check(storage.hard_state in self.states or bool(found.lost), "the hard state is lost without a word")
        check(intact or storage.verify() != [], "verify finds nothing")


def heads(entries: list[Entry]) -> list[tuple[int, str]]:
    """Just enough to tell them apart."""
    return [(entry.first_llsn, bytes(entry.batch.body[:6]).decode()) for entry in entries]
