"""Makes a token for an administrator with direct access to the store, without asking any server.

A process that can write to the store counts as a metadata node (ADR 0036), so this gives no right that it has not
already. It becomes the leader for a moment, appends the decisions, and is done. The leader before it is fenced: it
notices that, loads what is stored and leads again. The decisions say that they come from ``_recovery``, so the audit
shows them.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct, structs

from cutwater.core.access import access_requests as q
from cutwater.core.access.access_handling import decide_access
from cutwater.core.access.principals import LOCAL_ADMIN, check_principal
from cutwater.core.access.rights import THE_CLUSTER, Right
from cutwater.core.order.decisions import Decision
from cutwater.core.order.origin import Dated, RequestOrigin
from cutwater.core.order.state import OrderState
from cutwater.errors import Fenced, InvalidArgument, NotFound, Unavailable
from cutwater.metadata.stores.open_store import open_store
from cutwater.metadata.stores.sqlite_store import SqliteStore
from cutwater.metadata.stores.store_errors import StoreLocked
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.runtime import system
from cutwater.types import ClusterId, CutTime

RECOVERY = "_recovery"
"""The principal of decisions that are made here."""
TRIES_MAX = 5
REQUEST_ID_BYTES = 8


class RecoveredAdmin(Struct, frozen=True):
    """``is_running``: a metadata node has the store open, and takes the change in by itself."""

    principal: str
    token_id: str
    mode: str
    is_running: bool


async def recover_admin(
    url: str, cluster: ClusterId, principal: str, token_id: str, token_sha256: str
) -> RecoveredAdmin:
    """Make this principal an administrator, with this token. Durable on return."""
    check_principal(principal)
    store, is_running = await _opened(url, cluster)
    requests = (
        q.AllowRequest(principal, (str(Right.CLUSTER_ADMIN),), THE_CLUSTER),
        q.CreateTokenRequest(token_id, token_sha256, principal),
    )
    try:
        for attempt in range(TRIES_MAX):
            try:
                mode = await _decide(store, requests)
                return RecoveredAdmin(principal, token_id, mode, is_running)
            except Fenced:
                # The leader wrote meanwhile, or another node took over.
                if attempt == TRIES_MAX - 1:
                    raise
    finally:
        await store.close()
    raise AssertionError("unreachable")


async def _opened(url: str, cluster: ClusterId) -> tuple[MetadataStore, bool]:
    scheme, _, rest = url.partition(":")
    if scheme == "memory":
        raise InvalidArgument("a store in memory belongs to its process: name sqlite:PATH or etcd://…")
    if scheme == "sqlite" and rest and not Path(rest).is_file():
        raise NotFound(f"there is no database {rest}: name the file of --store of the metadata node")
    try:
        return await open_store(url, cluster=cluster), scheme == "etcd"
    except StoreLocked:
        return await SqliteStore.open(Path(rest), cluster, is_guest=True), True


async def _decide(store: MetadataStore, requests: tuple[q.AccessRequest, ...]) -> str:
    seen = await store.leader()
    if seen.epoch == 0:
        raise Unavailable("this store has never had a leader: start the metadata node once, and then make an admin")
    # Under the number and address of the leader before: if it runs, it finds itself named and leads again at once.
    epoch = await store.acquire(seen.node, seen.address, seen.epoch)
    loaded = await store.load()
    if loaded.leader.epoch != epoch:
        raise Fenced("another metadata node has taken over meanwhile: run the command again")
    state = OrderState(loaded.snapshot, loaded.decisions)
    after = state.index
    now = CutTime(max(state.cut_time, system.wall_time_ns() // 1_000))
    origin = RequestOrigin(RECOVERY, system.token_hex(REQUEST_ID_BYTES))
    decided: list[Decision] = []
    for request in requests:
        # The checks are those of any request; the origin with which they pass is replaced by the true one.
        made, _ = decide_access(request, state.access, now, RequestOrigin(LOCAL_ADMIN))
        for decision in made:
            assert isinstance(decision, Dated)
            stamped = structs.replace(decision, by=origin, at=now)
            state.apply(stamped)
            decided.append(stamped)
    await store.append(epoch, after, tuple(decided))
    return str(state.access.mode)
