"""A simulated cluster of shipped servers, its workload and its faults, as one description. A seed draws a subset."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec import Struct, ValidationError, convert, structs

from cutwater.testing.disk_faults import DiskFault, DiskFaultRule


class ShippedOptions(Struct, frozen=True):
    """Times are in seconds, sizes in bytes. ``..._every`` is the mean time between two faults; 0 means never."""

    storage_nodes: int = 3
    metadata_nodes: int = 2
    streams: int = 2
    replication: int = 3
    segment_bytes: int = 16 * 1024
    may_wait_for_disk: bool = False
    is_hasty: bool = False
    """Whether the leader waits for much shorter times than shipped, so that more happens: it calls nodes dead, replaces
    them, expires staged rows and makes snapshots."""
    tells_changes: bool = False
    """Whether reports and cuts tell only what has changed even on storage nodes with few replicas (ADR 0049)."""
    seconds: float = 4.0
    """How long faults and load last."""
    look_every: float = 0.02
    """How often the watchdog looks at the running servers."""

    embedded: bool = False
    """Whether it is an embedded log instead of a cluster: all clients are processes of one machine, and one of them has
    the log open."""
    rivals_every: float = 0.0
    """With an embedded log: how often a process wants to open it alone, or to get in without the secret."""

    # Clients.
    appenders: int = 2
    producers: int = 1
    subscribers: int = 1
    typed_topic: bool = False
    """Whether there is a second topic, with a schema."""
    sinks: int = 0
    """Queries that publish batches of staged rows. Each has a name; the third takes over that of the first."""
    conditional_appends: bool = False
    """Whether some appends name the position that they must get."""
    append_pause: float = 0.05
    padding_bytes_max: int = 100
    timeout: float = 3.0
    careful: bool = False
    """Whether there are clients that judge each call by itself, see ``careful_clients``."""
    prompt_seconds: float = 0.0
    """Without faults: how long after its acknowledgement a record may come to a subscriber; 0 means any time."""
    kill_client_every: float = 0.0
    reads_every: float = 0.2
    cursors_every: float = 0.0
    scans_every: float = 0.0
    """Ranges that are planned and read in parts, as Spark does."""
    declare_every: float = 0.0
    """Declarations of watermarks and idleness, and questions for watermarks."""
    trim_every: float = 0.0
    change_topics_every: float = 0.0
    change_replication_every: float = 0.0
    """The number of copies of a topic is changed. Drawn only with other operators."""
    operate_every: float = 0.0
    """Seals, finished log streams, moved replicas, added and removed storage nodes."""
    seal_every: float = 0.0
    """A log stream is sealed and opened again soon."""
    sealed_seconds_min: float = 0.0
    """How long it stays sealed at least."""
    disk_loss: str = ""
    """What happens once to a node whose records others hold too: its disk is gone ("empty"), or is as it was some time
    before ("old"), or lacks a replica ("replica") or the small state of one ("state")."""

    reopen_producer_every: float = 0.0
    """Another client takes over the name of a producer, which goes on unaware."""
    forge_every: float = 0.0
    """A client sends what only servers may send."""
    event_time_ahead: float = 0.0
    """How far event times may be ahead of the clocks of storage nodes, which differ; 0 means any time."""

    # Processes.
    kill_every: float = 0.0
    power_every: float = 0.0
    power_all_every: float = 0.0
    pause_every: float = 0.0
    restart_every: float = 0.0
    """A clean stop and start of one machine."""
    roll_every: float = 0.0
    """Clean stops and starts of all machines, one after the other."""
    down_seconds_max: float = 1.0
    clock_jump_every: float = 0.0
    drift: float = 0.0

    # Network.
    delay_max: float = 0.001
    tears: float = 0.1
    partition_every: float = 0.0
    one_way: bool = False
    reset_every: float = 0.0
    half_open_every: float = 0.0
    throttle_every: float = 0.0
    lag_every: float = 0.0
    """What one host sends to another takes long for a while, and what others send does not."""
    lost_connects: float = 0.0

    # Disks and store.
    sync_seconds_max: float = 0.001
    sync_failure: float = 0.0
    write_failure: float = 0.0
    disk_full: float = 0.0
    hung_syncs: float = 0.0
    kill_in_write_every: float = 0.0
    flip_every: float = 0.0
    """How often a bit of an entry on the disk of one storage node changes."""
    rot_every: float = 0.0
    """How often bits on the disk of one storage node change, or a block becomes unreadable, see ``rot``."""
    wrong_reads: float = 0.0
    """Share of the reads of that disk that each kind of wrong read strikes."""
    stray_writes: float = 0.0
    """Share of the writes to that disk that go to another place of the file."""
    scrub_every: float = 0.0
    """How often storage nodes read and check everything; 0 means that it takes too long to matter."""
    store: str = "memory"
    """Where decisions are kept: "memory", "etcd" for the shipped store on a model of etcd, or "sqlite" for the shipped
    store on the disk of the metadata node, of which there is only one then."""
    etcd_faults: float = 0.0
    """Share of requests to etcd that each kind of fault strikes."""
    etcd_every: float = 0.0
    """How often a member of etcd dies or is cut off, or another one leads."""
    store_delay_max: float = 0.001
    store_lost_answers: float = 0.0
    store_failures: float = 0.0
    roll_back_store: bool = False
    """At the end an old copy of the store in memory is put back for a while."""

    # Access control.
    access: str = ""
    """Whether access control is on: "enforced" from the beginning, "permissive" at first and enforced during the run,
    or "off" at first; empty if it is never used."""
    access_users: int = 3
    access_changes_every: float = 0.3
    """How often an administrator gives or takes rights, changes groups, or makes or revokes tokens."""
    access_lease: float = 10.0
    """How long servers without contact to the leader may act by the rules that they know."""
    access_appenders: int = 0
    """Further users, which only append and keep their connections."""
    access_expiry: bool = False
    """Whether some tokens expire. Without jumps of clocks only, since nobody could say when otherwise."""
    access_flood: str = ""
    """A limit of quotas: clients of one principal append as fast as they may under it, where access control is on from
    the beginning. Without drift only, since a lease of a slow clock lasts longer than that of the leader."""
    cut_off_every: float = 0.0
    """How often a storage node loses its contact to all metadata nodes, while clients reach both."""

    # Jobs.
    jobs: int = 0
    """How many names of jobs users use; 0 means that there are no jobs and no agents."""
    agents: int = 2
    job_users: int = 2
    job_calls_every: float = 0.3
    agent_lease: float = 10.0
    """After this silence of an agent, its jobs go to others."""
    agent_faults_every: float = 0.0
    """Agents are killed, paused, or asked to end, or their machines lose their power."""
    agent_silences_every: float = 0.0
    """Machines of agents sleep, or are cut off from servers."""
    job_faults_every: float = 0.0
    """Processes of jobs are killed or paused."""

    def disk_rules(self) -> list[DiskFaultRule]:
        """Return the faults of each disk."""
        rules = [
            DiskFaultRule(DiskFault.SLOW_SYNC, 1.0, seconds=(0.0, self.sync_seconds_max)),
            DiskFaultRule(DiskFault.HUNG_SYNC, self.hung_syncs, seconds=(1.0, 10.0)),
            DiskFaultRule(DiskFault.SYNC_ERROR, self.sync_failure),
            DiskFaultRule(DiskFault.WRITE_ERROR, self.write_failure),
            DiskFaultRule(DiskFault.FULL, self.disk_full),
        ]
        return [rule for rule in rules if rule.probability]

    @property
    def rots(self) -> bool:
        return bool(self.flip_every or self.rot_every or self.wrong_reads or self.stray_writes)

    @property
    def loses(self) -> bool:
        """Whether a disk may lose what it has synced, so that a server is right to raise an alarm."""
        return bool(self.disk_loss or self.rot_every or self.wrong_reads or self.stray_writes)

    @property
    def min_replication(self) -> int:
        """How many nodes have a record before it is acknowledged; a disk rots only where another one has a copy."""
        return 2 if self.rots and self.replication > 1 else 1

    def faults(self) -> dict[str, object]:
        """Return the options that differ from a cluster without faults, for display."""
        quiet = ShippedOptions()
        return {
            name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) != getattr(quiet, name)
        }


def changed(options: ShippedOptions, changes: Sequence[str]) -> ShippedOptions:
    """Return the options with some of them changed, each given as ``name=value``. Raises ``ValueError``."""
    values = structs.asdict(options)
    for change in changes:
        name, _, value = change.partition("=")
        if name not in values:
            raise ValueError(f"there is no option {name!r}; there are {', '.join(values)}")
        values[name] = value
    try:
        return convert(values, ShippedOptions, strict=False)
    except ValidationError as error:
        raise ValueError(f"{', '.join(changes)}: {error}") from None


SHARE = 0.3
CHOICES: dict[str, tuple[object, ...]] = {
    "typed_topic": (True,),
    "may_wait_for_disk": (True,),
    "kill_client_every": (1.0, 3.0),
    "cursors_every": (0.2,),
    "trim_every": (0.3, 1.0),
    "change_topics_every": (0.5, 1.5),
    "operate_every": (0.4, 1.0),
    "disk_loss": ("old", "replica", "empty"),
    "kill_every": (0.7, 2.0),
    "power_every": (0.7, 2.0),
    "power_all_every": (3.0,),
    "pause_every": (1.0, 2.0),
    "restart_every": (1.5,),
    "roll_every": (1.0, 2.0),
    "down_seconds_max": (0.1, 3.0),
    "clock_jump_every": (1.0,),
    "drift": (0.01, 0.2),
    "delay_max": (0.005, 0.03),
    "tears": (0.5, 1.0),
    "partition_every": (1.0, 2.0),
    "one_way": (True,),
    "reset_every": (0.3, 1.0),
    "half_open_every": (0.5, 2.0),
    "throttle_every": (1.0,),
    "lost_connects": (0.05, 0.3),
    "sync_seconds_max": (0.01, 0.1),
    "sync_failure": (0.001, 0.01),
    "write_failure": (0.0005, 0.005),
    "disk_full": (0.0005, 0.005),
    "hung_syncs": (0.0005, 0.003),
    "kill_in_write_every": (0.5, 2.0),
    "rot_every": (0.1, 0.5),
    "wrong_reads": (0.002, 0.02),
    "stray_writes": (0.001, 0.01),
    "scrub_every": (0.3, 1.0),
    "store": ("etcd", "sqlite"),
    "etcd_faults": (0.002, 0.02),
    "etcd_every": (0.5, 2.0),
    "store_delay_max": (0.01, 0.05),
    "store_lost_answers": (0.01, 0.1),
    "store_failures": (0.01, 0.1),
    "conditional_appends": (True,),
    "careful": (True,),
    "declare_every": (0.2, 0.5),
    "scans_every": (0.2, 0.5),
    "sinks": (1, 1, 3),
    "lag_every": (0.3, 1.0),
    "reopen_producer_every": (0.5, 1.5),
    "forge_every": (0.1, 0.5),
    "seal_every": (0.2, 1.0),
    "event_time_ahead": (0.02, 1.0),
    "is_hasty": (True, False),
    "flip_every": (0.1, 0.5),
    "change_replication_every": (0.3, 1.0),
    "sealed_seconds_min": (0.6, 1.2),
}


ACCESS_SHARE, STORM_ACCESS_SHARE = 0.2, 0.4
"""Share of the clusters that have access control."""
JOBS_SHARE, STORM_JOBS_SHARE = 0.1, 0.3
"""Share of the clusters without access control that have jobs."""
STORM_RARER = 3.0
STORM_MILD = (
    "delay_max",
    "sync_seconds_max",
    "store_delay_max",
    "store_failures",
    "store_lost_answers",
    "write_failure",
)


def random_options(seed: int) -> ShippedOptions:
    """Return a small cluster and a subset of the faults and workloads, both chosen by the seed."""
    random = Random(f"shipped/{seed}")
    options = ShippedOptions(
        storage_nodes=random.choice((2, 3, 3, 4)),
        metadata_nodes=random.choice((1, 2, 3)),
        streams=random.randint(1, 3),
        replication=random.choice((1, 2, 2, 3)),
        segment_bytes=random.choice((4, 16, 256)) * 1024,
        seconds=random.choice((1.0, 2.0, 4.0)),
        appenders=random.randint(1, 3),
        producers=random.randint(0, 2),
        subscribers=random.randint(1, 2),
        append_pause=random.choice((0.02, 0.05, 0.1)),
        padding_bytes_max=random.choice((0, 100, 3_000)),
        timeout=random.choice((0.5, 3.0, 10.0)),
    )
    changes = {name: random.choice(values) for name, values in CHOICES.items() if random.random() < SHARE}
    options = _with_access(structs.replace(options, tells_changes=_tells_changes(seed), **changes), seed, ACCESS_SHARE)
    return _with_jobs(_consistent(options), seed, JOBS_SHARE)


def _with_access(options: ShippedOptions, seed: int, share: float) -> ShippedOptions:
    """Turn access control on in a share of the clusters. The choices are apart from the others, which stay as they are
    in clusters without it."""
    random = Random(f"access/{seed}")
    if random.random() >= share:
        return options
    return structs.replace(
        options,
        access=random.choice(("enforced", "enforced", "permissive", "off")),
        access_users=random.randint(1, 3),
        access_changes_every=random.choice((0.1, 0.3, 1.0)),
        access_lease=random.choice((1.5, 3.0, 10.0)),
        cut_off_every=random.choice((0.0, 0.5, 1.5)),
        access_appenders=random.choice((0, 1)),
        access_expiry=random.choice((False, True)),
        access_flood=random.choice(("", "", "requests_per_s", "bytes_in_per_s")),
    )


def _with_jobs(options: ShippedOptions, seed: int, share: float) -> ShippedOptions:
    """Let a share of the clusters have jobs. The choices are apart from the others, which stay as they are in clusters
    without jobs."""
    random = Random(f"jobs/{seed}")
    if random.random() >= share or options.access:
        return options
    return structs.replace(
        options,
        jobs=random.randint(1, 4),
        agents=random.randint(1, 4),
        job_users=random.randint(1, 3),
        job_calls_every=random.choice((0.1, 0.3, 1.0)),
        agent_lease=random.choice((1.5, 2.0, 4.0)),
        agent_faults_every=random.choice((0.0, 0.5, 1.5)),
        job_faults_every=random.choice((0.0, 0.5, 2.0)),
        seconds=max(options.seconds, random.choice((4.0, 8.0))),
        agent_silences_every=random.choice((0.0, 0.5, 1.5)),
    )


def _tells_changes(seed: int) -> bool:
    """Most clusters do, since that has more states; the others are as small clusters are outside of a simulation."""
    return seed % 4 != 0


def _consistent(options: ShippedOptions) -> ShippedOptions:
    # A disk rots only where another one has a copy.
    replication = max(2, options.replication) if options.rots else options.replication
    return structs.replace(
        options,
        replication=min(replication, options.storage_nodes),
        # Beside a disk that rots, the nodes with the intact copies are given time to come back before others replace
        # them: a disk that rots and the loss of all other copies are more than the log survives.
        is_hasty=options.is_hasty and not options.rots,
        change_replication_every=options.change_replication_every
        if options.change_topics_every or options.operate_every
        else 0.0,
        access_expiry=options.access_expiry and not options.clock_jump_every,
        access_flood=options.access_flood if options.access == "enforced" and not options.drift else "",
        metadata_nodes=1 if options.store == "sqlite" else options.metadata_nodes,
        # Where clocks go wrong, the event times of clients may stay ahead of that of a storage node for good.
        event_time_ahead=0.0
        if options.drift or options.clock_jump_every or options.sinks
        else options.event_time_ahead,
    )


def storm_options(seed: int) -> ShippedOptions:
    """Return a cluster with all faults at once, each of them rarer than in a cluster with few, so that appends get
    through."""
    random = Random(f"shipped storm/{seed}")
    changes: dict[str, object] = {}
    for name, values in CHOICES.items():
        value = random.choice(values)
        changes[name] = value * STORM_RARER if name.endswith("_every") and isinstance(value, float) else value
    changes |= {name: values[0] for name, values in CHOICES.items() if name in STORM_MILD}
    options = ShippedOptions(storage_nodes=4, metadata_nodes=3, streams=3, producers=2, subscribers=2, seconds=6.0)
    options = structs.replace(options, tells_changes=_tells_changes(seed), **changes)
    return _with_jobs(_consistent(_with_access(options, seed, STORM_ACCESS_SHARE)), seed, STORM_JOBS_SHARE)


def quiet_options(seed: int) -> ShippedOptions:
    """Return a cluster without faults."""
    return ShippedOptions()


def rollback_options(seed: int) -> ShippedOptions:
    """Return a cluster whose store is replaced by an old copy for a while."""
    return ShippedOptions(roll_back_store=True, seconds=2.0, delay_max=0.005, reads_every=0.02, is_hasty=seed % 2 == 1)


EMBEDDED_CHOICES = tuple(
    """
    typed_topic kill_client_every cursors_every trim_every change_topics_every kill_every power_every pause_every
    restart_every down_seconds_max clock_jump_every drift delay_max tears reset_every half_open_every lost_connects
    sync_seconds_max sync_failure write_failure disk_full hung_syncs kill_in_write_every conditional_appends
    declare_every scans_every
    """.split()
)
"""Faults and workloads that an embedded log may have."""


def embedded_options(seed: int) -> ShippedOptions:
    """Return an embedded log, with a subset of the faults and workloads that it may have."""
    random = Random(f"embedded/{seed}")
    options = ShippedOptions(
        embedded=True,
        storage_nodes=1,
        metadata_nodes=1,
        replication=1,
        store="sqlite",
        streams=random.randint(1, 3),
        seconds=random.choice((1.0, 2.0, 4.0)),
        appenders=random.randint(1, 2),
        producers=random.randint(0, 2),
        subscribers=1,
        append_pause=random.choice((0.05, 0.1)),
        padding_bytes_max=random.choice((0, 100, 3_000)),
        timeout=random.choice((0.5, 3.0, 10.0)),
        rivals_every=random.choice((0.0, 0.3, 1.0)),
    )
    changes = {name: random.choice(CHOICES[name]) for name in EMBEDDED_CHOICES if random.random() < SHARE}
    return structs.replace(options, **changes)


def jobs_options(seed: int) -> ShippedOptions:
    """Return a cluster with jobs and agents, and a subset of the faults."""
    options = structs.replace(random_options(seed), access="", access_flood="", access_expiry=False, cut_off_every=0.0)
    return _with_jobs(options, seed, 1.0)


PROFILES = {
    "random": random_options,
    "storm": storm_options,
    "quiet": quiet_options,
    "rollback": rollback_options,
    "embedded": embedded_options,
    "jobs": jobs_options,
}
