"""Time-outs and limits of a leader."""

from __future__ import annotations

from msgspec import Struct

from cutwater.types import MILLISECOND, SECOND

NODES_PER_SETTLING_WAKE, SETTLING_WAKES_MAX = 10, 20
LARGE_BATCH_PARTS = 512
"""A request to publish more parts than this almost fills a write by itself."""
REPAIRS_PER_TURN_MAX = 512
"""Number of streams that are sealed, and whose repair is planned, in one turn. The others wait for the next turn, so
cuts of other streams go on meanwhile."""
FINISHED_STREAMS_EVERY_WAKES = 16
"""Number of wakes between checks of streams whose repair can wait, such as the many permanently sealed ones."""


def settling_wakes(nodes: int) -> int:
    """Return the number of wakes after which a cut that a node has not applied counts as lost on the way. To tell a
    node again costs as much as it has replicas, so in a large cluster a leader that is slow must not take all nodes for
    behind."""
    return max(1, min(nodes // NODES_PER_SETTLING_WAKE, SETTLING_WAKES_MAX))


class OrderOptions(Struct, frozen=True):
    node_dead_after_us: int = 2 * SECOND
    reopen_patience_us: int = 500 * MILLISECOND
    """How long a sealed stream waits for replicas that are alive and may still catch up."""
    retry_us_min: int = 1 * SECOND
    retry_us_max: int = 30 * SECOND
    """Shortest and longest back-off for failed links, admitted learners, and groups that cannot be published."""
    tick_us_min: int = 1 * SECOND
    tick_us_max: int = 30 * SECOND
    min_replication: int = 1
    member_list_min: int = 32
    """A node that is a member of at least this many open streams gets a list of them to keep, so that messages need not
    name those without commits. For fewer, their names cost no more."""
    requests_max: int = 1_024
    requests_per_turn_max: int = 16
    """The limit is low, so that this many requests, each with the largest schema, fit into one write of any store."""
    compact_every_decisions: int = 1_024
    publish_again_us: int = 1 * SECOND
    """How long the leader waits for the outcome of a group before it tells the storage node again."""
    publish_wait_us: int = 2 * SECOND
    """How long a request to publish a batch waits for the batch before it has to be repeated. This must be less than a
    client waits for one node. Otherwise the client would take the leader for dead and never learn the reason."""
    first_reports_wait_us: int = 2 * SECOND
    """How long a request waits, after a start or a takeover, until a replica of every open stream has reported. Less
    than a client waits for one node."""
    staged_expire_after_us: int = 3_600 * SECOND
    """Age at which staged rows that were not decided on expire."""
    agent_lease_us: int = 10 * SECOND
    """After this silence of an agent, its jobs go to others."""
    replace_node_after_us: int = 60 * SECOND
    """How long a dead node keeps its place as a replica of its streams, if another node can take it."""
    replace_stream_after_us: int = 10 * SECOND
    """How long a stream that cannot be opened counts as one of its topic, before another one is created."""
