"""All faults that a simulation can inject, as one description. A seed turns on a random subset."""

from __future__ import annotations

from random import Random

from msgspec import Struct, structs

from cutwater.types import MILLISECOND, SECOND


class Options(Struct, frozen=True):
    """One simulated cluster and its faults. Probabilities are per occasion; times are in microseconds."""

    storage_nodes: int = 3
    metadata_nodes: int = 1
    streams: int = 2
    replication: int = 3
    appenders: int = 2
    producers: int = 1
    subscribers: int = 1
    sinks: int = 0
    duration_us: int = 2 * SECOND
    append_pause_us: int = 15 * MILLISECOND

    # The network.
    message_loss: float = 0.0
    message_duplication: float = 0.0
    message_reordering: float = 0.0
    message_delay_us_max: int = 300
    partition_every_us: int = 0
    asymmetric_partitions: bool = False
    flapping_partitions: bool = False

    # Processes.
    crash_storage_every_us: int = 0
    crash_metadata_every_us: int = 0
    crash_all_storage_every_us: int = 0
    crash_between_effects: float = 0.0
    process_deaths: float = 0.0
    """Share of killed storage nodes that die as processes only, so that the system keeps what they wrote."""
    pause_every_us: int = 0

    # Disks.
    segment_files: bool = False
    """Whether storage nodes keep their replicas in real segment files, on a file layer with these faults."""
    torn_writes: bool = False
    fsync_us_max: int = 800
    fsync_failure: float = 0.0
    deadly_disk_errors: float = 0.0
    """Share of disk failures that end the process that encounters them."""
    bit_flip_every_us: int = 0
    disk_full_every_us: int = 0
    lost_state_every_us: int = 0
    """How often a node loses the small state file of a replica, while another member has everything."""

    # The order layer's store, and clocks.
    store_us_max: int = 800
    store_lost_reply: float = 0.0
    roll_back_store: bool = False
    """Whether the store loses its last decisions at the end, while all metadata nodes are down: they must notice."""
    clock_jump_every_us: int = 0

    # The content of batches.
    event_time_ahead_us: int = 0
    """How far event times may be ahead of a storage node's clock; 0 means no limit. Clients are up to 50 ms ahead."""

    # Operations under load.
    seal_every_us: int = 0
    finalize_every_us: int = 0
    replace_every_us: int = 0
    trim_every_us: int = 0
    add_stream_every_us: int = 0
    nodes_come_and_go_every_us: int = 0
    topics_come_and_go_every_us: int = 0
    reopen_producer_every_us: int = 0
    crash_sink_every_us: int = 0

    # A client that acts as a server.
    forge_every_us: int = 0

    def faults(self) -> dict[str, object]:
        """Return the options that differ from a cluster without faults, for display."""
        quiet = Options()
        return {
            name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) != getattr(quiet, name)
        }


def random_options(seed: int) -> Options:
    """Return a cluster and a subset of the faults, both chosen by the seed."""
    rng = Random(f"options/{seed}")
    replication = rng.choice((1, 2, 3, 3, 3))
    options = Options(
        storage_nodes=rng.randint(3, 5),
        metadata_nodes=rng.choice((1, 2, 3, 3)),
        streams=rng.randint(2, 4),
        replication=replication,
        appenders=rng.randint(1, 3),
        producers=rng.randint(0, 2),
        subscribers=rng.randint(1, 2),
        append_pause_us=rng.choice((8, 15, 30)) * MILLISECOND,
    )
    changes: dict[str, object] = {}
    for name, values in _CHOICES.items():
        if rng.random() < _SHARE:
            changes[name] = rng.choice(values)
    if replication == 1:
        # A single copy on a bad disk is lost by definition.
        changes.pop("bit_flip_every_us", None)
        changes.pop("lost_state_every_us", None)
    return structs.replace(options, **changes, **_apart(seed), sinks=Random(f"sinks/{seed}").choice((0, 0, 1, 2)))


def _apart(seed: int) -> dict[str, object]:
    """Return options that are chosen apart, so that they change no other choice of a seed."""
    return {
        "segment_files": _has_segment_files(seed),
        "event_time_ahead_us": Random(f"ahead/{seed}").choice((0, 0, 10, 25)) * MILLISECOND,
        "forge_every_us": Random(f"forger/{seed}").choice((0, 0, 0, 100_000)),
    }


def _has_segment_files(seed: int) -> bool:
    return Random(f"segment files/{seed}").random() < SEGMENT_FILES_SHARE


SEGMENT_FILES_SHARE = 0.25
_SHARE = 0.35
_CHOICES: dict[str, tuple[object, ...]] = {
    "message_loss": (0.002, 0.01, 0.03),
    "message_duplication": (0.01, 0.05, 0.2),
    "message_reordering": (0.01, 0.05),
    "message_delay_us_max": (2_000, 10_000),
    "partition_every_us": (400_000, 800_000),
    "asymmetric_partitions": (True,),
    "flapping_partitions": (True,),
    "crash_storage_every_us": (300_000, 700_000),
    "crash_metadata_every_us": (400_000, 900_000),
    "crash_all_storage_every_us": (800_000,),
    "crash_between_effects": (0.0005, 0.002),
    "pause_every_us": (500_000,),
    "torn_writes": (True,),
    "fsync_us_max": (3_000, 10_000),
    "fsync_failure": (0.002, 0.01),
    "bit_flip_every_us": (300_000,),
    "disk_full_every_us": (700_000,),
    "store_us_max": (5_000, 20_000),
    "store_lost_reply": (0.01, 0.05),
    "clock_jump_every_us": (300_000,),
    "seal_every_us": (300_000, 600_000),
    "finalize_every_us": (800_000,),
    "replace_every_us": (500_000,),
    "trim_every_us": (300_000,),
    "add_stream_every_us": (500_000,),
    "nodes_come_and_go_every_us": (700_000,),
    "reopen_producer_every_us": (400_000,),
    "process_deaths": (0.5, 1.0),
    "deadly_disk_errors": (0.3, 1.0),
    "topics_come_and_go_every_us": (250_000, 600_000),
    "crash_sink_every_us": (150_000, 400_000),
    "lost_state_every_us": (300_000, 700_000),
}


def quiet_options(seed: int) -> Options:
    """Return a cluster without faults."""
    return Options()


def storm_options(seed: int) -> Options:
    """Return a cluster with all faults at once, and often."""
    rng = Random(f"storm/{seed}")
    changes = {name: rng.choice(values) for name, values in _CHOICES.items()}
    options = Options(storage_nodes=5, metadata_nodes=3, streams=3, producers=2, sinks=2)
    return structs.replace(options, **changes, **_apart(seed))


def rollback_options(seed: int) -> Options:
    """Return a cluster whose store is put back to an older state. There are few faults before that, so that every
    replica has its commits."""
    rng = Random(f"rollback/{seed}")
    return Options(
        metadata_nodes=rng.choice((1, 3)),
        streams=rng.randint(1, 3),
        replication=rng.choice((1, 2, 3)),
        duration_us=rng.choice((300, 600, 1_200)) * MILLISECOND,
        append_pause_us=rng.choice((5, 15)) * MILLISECOND,
        message_delay_us_max=rng.choice((300, 5_000)),
        seal_every_us=rng.choice((0, 300_000)),
        crash_storage_every_us=rng.choice((0, 0, 400_000)),
        roll_back_store=True,
        segment_files=_has_segment_files(seed),
    )


PROFILES = {
    "random": random_options,
    "quiet": quiet_options,
    "storm": storm_options,
    "rollback": rollback_options,
}
