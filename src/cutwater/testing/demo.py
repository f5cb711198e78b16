"""``make demo``: a simulated cluster orders records, loses a storage node in the middle, and loses nothing else."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise

from cutwater.core import decisions as d
from cutwater.testing.simulator.cluster import Cluster
from cutwater.testing.simulator.options import Options
from cutwater.testing.simulator.record import Outcome
from cutwater.testing.simulator.world import Violation
from cutwater.types import MILLISECOND, SECOND

KILL_AT_US = 600 * MILLISECOND
RESTART_AT_US = 1_400 * MILLISECOND
SHOWN_CUTS = 6


class DemoCluster(Cluster):
    """Three storage nodes, one metadata repository, three log streams with three replicas each; node 2 is killed."""

    def _start_clients(self) -> None:
        super()._start_clients()
        self.started = self.world.now
        victim = self.storage_nodes[1]
        self.world.after(KILL_AT_US, victim.kill)
        self.world.after(RESTART_AT_US, victim.start)


def main() -> int:
    options = Options(
        storage_nodes=3, streams=3, replication=3, appenders=4, producers=2, subscribers=2, duration_us=2 * SECOND
    )
    cluster = DemoCluster(2026, options)
    print("A simulated cluster: 3 storage nodes, 1 metadata repository, 3 log streams with 3 replicas each.")
    print("4 clients and 2 exactly-once producers append; 2 subscribers follow the whole log.\n")
    try:
        cluster.run()
    except Violation as violation:
        print(f"A guarantee does not hold: {violation}")
        return 1
    _print_first_cuts(cluster)
    _print_outage(cluster)
    _print_summary(cluster)
    return 0


def _print_first_cuts(cluster: DemoCluster) -> None:
    print(f"One order over all log streams: the first {SHOWN_CUTS} cuts with records")
    cuts = [cut for cut in cluster.store.decisions if isinstance(cut, d.Cut) and cut.commits]
    for cut in cuts[:SHOWN_CUTS]:
        parts = [
            f"stream {c.stream}: LLSN {_span(c.context.first_llsn, c.context.last_llsn)}"
            f" -> GLSN {_span(c.context.first_glsn, c.context.last_glsn)}"
            for c in cut.commits
        ]
        print(f"  high watermark {cut.high_watermark:>3}   " + ";  ".join(parts))
    print()


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _print_outage(cluster: DemoCluster) -> None:
    killed = cluster.started + KILL_AT_US
    acks = sorted(op.completed for op in cluster.record.appends if op.outcome is Outcome.OK)
    pause = max(
        (after - before for before, after in pairwise(acks) if after > killed),
        default=0,
    )
    seals = Counter(decision.reason for decision in cluster.store.decisions if isinstance(decision, d.Seal))
    print(
        f"Storage node 2 is killed after {KILL_AT_US / SECOND:.1f} s and comes back at {RESTART_AT_US / SECOND:.1f} s:"
    )
    print(f"  longest time without an acknowledgement: {pause / MILLISECOND:.0f} ms (simulated time)")
    print("  log streams are sealed and opened again, each time because:")
    for reason, count in seals.items():
        print(f"    {count} x {reason}")
    print("  (a replica goes sealing when it cannot reach the next one in its chain; the killed node first copies")
    print("  what it missed, and joins again through a short seal)\n")


def _print_summary(cluster: DemoCluster) -> None:
    outcomes = Counter(op.outcome.value for op in cluster.record.appends)
    records = sum(op.batch.count for op in cluster.record.appends if op.outcome is Outcome.OK)
    delivered = [sum(run.batch.count for run in seen.runs) for seen in cluster.record.subscribers.values()]
    print("At the end:")
    print(f"  {outcomes['ok']} appends acknowledged: {records} records; the two subscribers saw {delivered} in order")
    print(
        f"  {outcomes['fail']} failed for certain: never in the log; {outcomes['unknown']} unknown: in it at most once"
    )
    print(f"  the log ends at GLSN {cluster.store.high_watermark}: besides records, some positions are ticks, by which")
    print("  time goes on while nothing is appended, or mark that a producer has opened")
    print("  every replica holds the same bytes")
    print("  checked: all guarantees that the simulator knows hold for this run")
    print("\nNext: make simulate SEED=7 (faults of all kinds), make simulate SEEDS=2000, docs/simulator.md")


if __name__ == "__main__":
    sys.exit(main())
