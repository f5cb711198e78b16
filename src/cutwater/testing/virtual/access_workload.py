"""Access control in a simulated cluster: it is turned on, an administrator changes rights, and users try what they may
do. All of it goes through the public calls of ``Admin`` and ``AsyncClient``.

The other clients of the cluster are one principal, which may do everything all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cutwater.admin.access_calls import NEVER, AccessCalls
from cutwater.admin.operations import Admin
from cutwater.admin.proven_admin import proven_admin
from cutwater.client.async_client import AsyncClient
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import AccessChanged
from cutwater.core.audit.audit_record import AuditRecord, decode_audit
from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.access import STORAGE_NODE
from cutwater.testing.checkers.access import (
    AccessHistory,
    CallTime,
    Confirmed,
    Decided,
    RuleModel,
    ServerClocks,
    check_access,
    check_audit,
)
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.access_users import AUDIT_TOPIC, CURSORS, TOPICS, AccessUser
from cutwater.testing.virtual.processes import WALL_START_NS
from cutwater.testing.virtual.quota_flood import FLOOD, FLOODERS, PATTERN, QUOTAS, RIGHTS, Flooder, QuotaFlood
from cutwater.testing.virtual.workload import AGAIN_SECONDS, VirtualClient
from cutwater.types import LogStreamId, RunId

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

T = TypeVar("T")

STAFF = "staff"
"""The principal of the administrator and of all clients that are not users."""
GROUPS = ("g1", "g2")
GRANTS = (
    *((("append",), f"topic:{topic}") for topic in TOPICS),
    *((("read",), f"topic:{topic}") for topic in TOPICS),
    (("append", "read"), "topic:a.*"),
    (("read",), "topic:*"),
    (("append",), "topic:*"),
    (("produce-as",), f"producer:p.{TOPICS[0]}"),
    (("produce-as",), "producer:p.*"),
    (("cursor",), f"cursor:{CURSORS[0]}"),
    (("cursor",), "cursor:c.*"),
    (("describe",), "cursor:*"),
    (("publish",), "run:run-*"),
    (("audit-read",), "cluster"),
)
"""What an administrator gives and takes: rights and a pattern."""
SCOPES = (("append,describe topic:a.*",), ("read topic:*", "cursor cursor:*"))
RIGHTS_AT_FIRST = 0.5
SCOPED = 0.2
STALL_SECONDS_MAX = 12.0
"""For so long a storage node or its disk may stand still, where that happens."""
EXPIRING = 0.5
"""Share of tokens that expire, where some do."""
EXPIRY_SECONDS_MAX = 2.0


class AccessWorld:
    """See the module. ``found`` turns access control on, ``check`` judges everything at the end."""

    def __init__(self, world: ShippedSimulation) -> None:
        self._world = world
        self.history = AccessHistory()
        self.begun: dict[int, CallTime] = {}
        """When appends of users began, by payload."""
        self.tokens: dict[str, list[str]] = {}
        """The texts of the tokens of each user, the newest last."""
        self.positions: dict[str, list[int]] = {}
        """Acknowledged positions of each topic."""
        self.users: list[AccessUser] = []
        self.flood = QuotaFlood(world) if world.options.access_flood else None
        self.is_final = False
        """Whether rights do not change any more, and every server has confirmed the last change."""
        self.audit: list[AuditRecord] = []
        self.baits: set[RunId] = set()
        """Runs with rows that another principal has tried to publish: they may have to be dropped."""

    def moment(self) -> CallTime:
        return CallTime(self._world.loop.callbacks, self._world.loop.now)

    # Turning it on.

    async def found(self) -> None:
        """Make topics, an administrator and users, with the key of a metadata node. Returns when access control is on,
        if it is on from the beginning."""
        world = self._world
        for i in range(world.options.access_users):
            self.users.append(AccessUser(world, self, f"user{i}", f"127.0.4.{i + 1}"))
        for i in range(world.options.access_appenders):
            self.users.append(AccessUser(world, self, f"holder{i}", f"127.0.4.{i + 21}", only_appends=True))
        process = world.cluster.new_process("founder", "127.0.3.4")
        await world.loop.spawn(process, self._found())

    async def _found(self) -> None:
        world = self._world
        machine = world.cluster.metadata[0]
        log = await world.cluster.connect(world.options.timeout)
        for topic in TOPICS:
            await _insist(partial(log.create_topic, topic, replication=world.options.replication, exist_ok=True))
        await log.close()
        assert machine.key is not None
        key = machine.key

        async def prove() -> AccessCalls:
            return await proven_admin(world.cluster.addresses, key, None)

        calls = await _insist(prove)
        await _insist(lambda: calls.allow(STAFF, ("cluster-admin",), "cluster"))
        token = (await _insist(lambda: calls.create_token(STAFF))).token
        for user in self.users:
            self.tokens[user.name] = [(await _insist(partial(calls.create_token, user.name))).token]
            for rights, pattern in GRANTS:
                if user.random.random() < RIGHTS_AT_FIRST:
                    await _insist(partial(calls.allow, user.name, rights, pattern))
        random = self.users[0].random
        for name in GROUPS:
            members = [user.name for user in self.users if random.random() < RIGHTS_AT_FIRST]
            await _insist(partial(calls.create_group, name, members))
            rights, pattern = random.choice(GRANTS)
            await _insist(partial(calls.allow, f"group:{name}", rights, pattern))
        if self.flood is not None:
            await _insist(partial(calls.allow, FLOOD, RIGHTS, PATTERN))
            await _insist(partial(calls.set_quota, FLOOD, **self.flood.limits(max(QUOTAS))))
            self.flood.token = (await _insist(partial(calls.create_token, FLOOD))).token
        world.cluster.token = token
        if world.options.access != "off":
            await _insist(partial(self._turn_on, calls))

    async def _turn_on(self, calls: AccessCalls) -> None:
        """Return when every server acts by the mode with which the run begins."""
        mode, what = self._world.options.access, "access control is turned on"
        if self.mode is AccessMode.OFF:
            changed = await self.noted(what, calls.set_mode(mode), is_mode=True)
        else:
            async with self._world.cluster.admin() as admin:
                changed = await self.noted(what, admin.control.set_mode(mode), is_mode=True)
        if changed.unconfirmed:
            raise Unavailable(f"not confirmed: {changed.unconfirmed}")

    # Changes.

    async def noted(self, what: str, work: Awaitable[AccessChanged], *, is_mode: bool = False) -> AccessChanged:
        """Wait for a change, and note which servers have confirmed it."""
        changed = await work
        behind = [name.rpartition(" ") for name in changed.unconfirmed]
        nodes = frozenset(int(number) for kind, _, number in behind if kind == STORAGE_NODE)
        is_certain = all(kind == STORAGE_NODE for kind, _, _ in behind)
        self.history.confirmed.append(Confirmed(int(changed.revision), self.moment(), nodes, is_certain, what, is_mode))
        self._world.cluster.counts["change of rights"] += 1
        self._world.note(f"rights: {what}: revision {changed.revision}, not confirmed: {changed.unconfirmed}")
        return changed

    def flooders(self) -> list[Flooder]:
        """Return the clients under a quota."""
        if self.flood is None:
            return []
        return [Flooder(self._world, self.flood, f"flooder{i}", f"127.0.5.{i + 1}") for i in range(FLOODERS)]

    # What checkers ask for.

    def nodes_of(self, stream: LogStreamId) -> frozenset[int]:
        """Return all storage nodes that may have served a log stream."""
        leader = self._world.cluster.leader()
        found = leader.state.streams.get(stream) if leader is not None else None
        if found is None or self._world.options.operate_every or self._world.options.is_hasty:
            return frozenset()
        return frozenset(int(node) for node in (*found.members, *found.replicas))

    @property
    def mode(self) -> AccessMode:
        return self._model().mode

    @property
    def groups(self) -> dict[str, frozenset[str]]:
        return self._model().groups

    @property
    def rules(self) -> list[tuple[str, str]]:
        """The subjects and patterns of all rules that give something."""
        return [key for key, rights in self._model().rules.items() if rights]

    def positions_of(self, topic: str) -> list[int]:
        """Return positions where the topic has records, as far as they are known."""
        leader = self._world.cluster.leader()
        if topic != AUDIT_TOPIC or leader is None:
            return self.positions.get(topic, [1])
        topics = {one.topic for one in leader.state.topics.values() if one.name == AUDIT_TOPIC}
        return [max(1, int(one.last_glsn)) for one in leader.state.streams.values() if one.topic in topics] or [1]

    def has_token(self, name: str) -> bool:
        model, now = self._model(), self._world.loop.now
        return any(model.knows(name, text.split("_")[1], now) for text in self.tokens[name])

    def decided(self) -> list[Decided]:
        access = self._world.cluster.store.access
        return [access[index] for index in sorted(access)]

    def _model(self) -> RuleModel:
        model = RuleModel(clocks=self.clocks)
        for one in self.decided():
            model = RuleModel(model, one.decision)
        return model

    @property
    def clocks(self) -> ServerClocks:
        options = self._world.options
        may_stall = options.pause_every or options.hung_syncs
        return ServerClocks(WALL_START_NS // 1_000, options.drift, STALL_SECONDS_MAX if may_stall else 0.0)

    # The end.

    def unrest(self) -> str | None:
        """Return what still has to happen before the last inspection."""
        leader = self._world.cluster.leader()
        if leader is None:
            return "no metadata node leads"
        if leader.state.audit.pending:
            return f"{len(leader.state.audit.pending)} records wait for the audit"
        if not self.is_final:
            return "access control still changes"
        model, now = self._model(), self._world.loop.now
        for user in self.users:
            for call in user.following:
                if not model.allows(user.name, call.token, call.needs, now):
                    return f"{user.name} still goes on {call.what}, without the right"
        return None

    async def read_audit(self) -> None:
        """Read the whole audit, as an administrator does."""
        process = self._world.cluster.new_process("auditor", "127.0.3.5")
        self.audit = await self._world.loop.spawn(process, self._read_audit())

    async def _read_audit(self) -> list[AuditRecord]:
        async def read() -> list[bytes]:
            log = await self._world.cluster.connect(self._world.options.timeout)
            found = await log.table(AUDIT_TOPIC, columns=["value"], timeout=10.0)
            await log.close()
            values: list[bytes] = found["value"].to_pylist()
            return values

        records = [decode_audit(value) for value in await _insist(read)]
        if None in records:
            raise Violation("audit", "the audit has a record that cannot be read")
        return [record for record in records if record is not None]

    def check(self) -> None:
        drift = 1.0 - self._world.options.drift
        decided, lease_seconds = self.decided(), self._world.options.access_lease / drift
        check_access(self.history, decided, lease_seconds, self.clocks)
        if self.flood is not None:
            self.flood.check(decided, lease_seconds)
        if self._world.cluster.store.history:
            check_audit(self.audit, self._world.cluster.store.history)


class AccessAdmin(VirtualClient):
    """The administrator, who gives and takes rights all the time, and drops runs that nothing can publish."""

    def __init__(self, world: ShippedSimulation, access: AccessWorld, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.access = access
        self.enforce_at = self.random.uniform(0.2, 0.7) * world.options.seconds

    async def run(self, log: AsyncClient) -> None:
        options = self.world.options
        if options.access == "off":
            await asyncio.sleep(self.enforce_at / 2)
            await self._permit()
        async with self.world.cluster.admin() as admin:
            while not self.world.is_healed:
                await self.pause(options.access_changes_every)
                with suppress(CutwaterError):
                    if options.access != "enforced" and self.world.loop.now > self.enforce_at:
                        await self._enforce(admin, attempts=1)
                    await self._change(admin)
                    await self._drop_stuck(admin)
            await self._finish(admin)

    async def _permit(self) -> None:
        """Turn access control on, with the key of a metadata node."""
        machine = self.world.cluster.metadata[0]

        async def turn_on() -> AccessChanged:
            calls = await proven_admin(self.world.cluster.addresses, machine.key, None)
            return await calls.set_mode(AccessMode.PERMISSIVE)

        while self.access.mode is AccessMode.OFF:
            with suppress(CutwaterError):
                await turn_on()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _enforce(self, admin: Admin, attempts: int) -> None:
        for _ in range(attempts):
            if self.access.mode is AccessMode.ENFORCED:
                return
            with suppress(CutwaterError):
                changed = await self.access.noted("enforce", admin.control.set_mode(AccessMode.ENFORCED), is_mode=True)
                if not changed.unconfirmed:
                    return
            await asyncio.sleep(AGAIN_SECONDS)

    # Changes.

    async def _change(self, admin: Admin) -> None:
        work = [self._allow, self._remove, self._remove, self._group, self._token, self._revoke]
        if self.world.options.access_expiry:
            work += [self._token, self._expire]
        if self.access.flood is not None:
            work.append(self._set_quota)
        await self.random.choice(work)(admin.control)

    def _subject(self) -> str:
        users = [user.name for user in self.access.users]
        return self.random.choice([*users, *(f"group:{name}" for name in self.access.groups)])

    async def _allow(self, calls: AccessCalls) -> None:
        subject, (rights, pattern) = self._subject(), self.random.choice(GRANTS)
        await self.access.noted(f"{subject} gets {rights} on {pattern}", calls.allow(subject, rights, pattern))

    async def _remove(self, calls: AccessCalls) -> None:
        """Take a right away, and often ask again until all servers have confirmed that."""
        known = [key for key in self.access.rules if key[0] not in (STAFF, FLOOD)]
        if known:
            subject, pattern = self.random.choice(known)
            await self.access.noted(f"{subject} loses its rights on {pattern}", calls.remove(subject, pattern))

    async def _group(self, calls: AccessCalls) -> None:
        user, name = self.random.choice(self.access.users).name, self.random.choice(GROUPS)
        members = self.access.groups.get(name)
        if members is None:
            await self.access.noted(f"group {name} is made", calls.create_group(name, (user,)))
        elif self.random.random() < 0.1:
            await self.access.noted(f"group {name} is deleted", calls.delete_group(name))
        elif user in members:
            await self.access.noted(f"{user} leaves group {name}", calls.change_group(name, remove=(user,)))
        else:
            await self.access.noted(f"{user} enters group {name}", calls.change_group(name, add=(user,)))

    async def _token(self, calls: AccessCalls) -> None:
        user = self.random.choice(self.access.users).name
        scopes = self.random.choice(SCOPES) if self.random.random() < SCOPED else ()
        is_expiring = self.world.options.access_expiry and self.random.random() < EXPIRING
        expires = self._soon() if is_expiring else NEVER
        created = await calls.create_token(user, scopes=scopes, expires_us=expires)
        self.access.tokens[user].append(created.token)
        until = f"until {expires}" if expires else "for ever"
        self.world.note(
            f"rights: {user} gets token {created.id} {scopes} {until}, not confirmed: {created.unconfirmed}"
        )

    def _soon(self) -> int:
        """Return a time in the next seconds, in microseconds since 1970."""
        seconds = self.world.loop.now + self.random.uniform(0.0, EXPIRY_SECONDS_MAX)
        return WALL_START_NS // 1_000 + int(seconds * 1e6)

    async def _expire(self, calls: AccessCalls) -> None:
        """Let a token end soon that would have ended later, or never."""
        user = self.random.choice(self.access.users).name
        token = self.random.choice(self.access.tokens[user][-2:]).split("_")[1]
        expires = self._soon()
        await self.access.noted(f"token {token} of {user} ends at {expires}", calls.expire_token(token, expires))

    async def _set_quota(self, calls: AccessCalls) -> None:
        assert self.access.flood is not None
        limits = self.access.flood.limits(self.random.choice(QUOTAS))
        await self.access.noted(f"{FLOOD} may use {limits}", calls.set_quota(FLOOD, **limits))

    async def _revoke(self, calls: AccessCalls) -> None:
        user = self.random.choice(self.access.users).name
        token = self.random.choice(self.access.tokens[user][-2:]).split("_")[1]
        await self.access.noted(f"token {token} of {user} is revoked", calls.revoke_token(token))

    async def _drop_stuck(self, admin: Admin) -> None:
        """Drop runs whose decided rows belong to another principal, so that they are never published."""
        leader = self.world.cluster.leader()
        held_up = [run.run for run in leader.state.runs.publishing] if leader is not None else []
        for run in self.access.baits.intersection(held_up):
            await admin.drop_run(run)
            self.world.note(f"run {run} is dropped")

    # The end.

    async def _finish(self, admin: Admin) -> None:
        """Leave the rules in force, with a token for each user, and wait until all servers have them."""
        await self._enforce(admin, attempts=1_000)
        for user in self.access.users:
            await _insist(partial(self._token_for, admin, user.name))
        while True:
            with suppress(CutwaterError):
                await self._drop_stuck(admin)
                # Nothing is changed by this, but the answer says which servers are up to date.
                changed = await self.access.noted(
                    "nothing changes", admin.control.allow(STAFF, ("cluster-admin",), "cluster")
                )
                if not changed.unconfirmed and self.world.is_stopping:
                    break
            await asyncio.sleep(AGAIN_SECONDS)
        self.access.is_final = True
        while not all(user.is_done for user in self.access.users):
            await asyncio.sleep(AGAIN_SECONDS)
            with suppress(CutwaterError):
                await self._drop_stuck(admin)

    async def _token_for(self, admin: Admin, user: str) -> None:
        created = await admin.control.create_token(user)
        self.access.tokens[user].append(created.token)


async def _insist(work: Callable[[], Awaitable[T]]) -> T:
    """Call again and again until it succeeds."""
    while True:
        try:
            return await work()
        except CutwaterError:
            await asyncio.sleep(AGAIN_SECONDS)
