"""A sample of the access oracle over real connections: random rules, groups, tokens and calls against the dumb model.

The answer to a change comes when all servers act by it, so each call is compared with the model as it is then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cutwater.admin.access_calls import AccessCalls
from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.principals import Scope, token_id
from cutwater.core.access.rights import parse_pattern
from cutwater.errors import CutwaterError, PermissionDenied
from cutwater.protocol import storage_api
from cutwater.protocol.errors import Unauthenticated
from cutwater.protocol.metadata_api import ASK
from cutwater.protocol.methods import Method
from cutwater.runtime import system
from cutwater.types import GLSN, LogStreamId
from cutwater.wire.connection import Connection
from tests.integration.access_cluster import AccessCluster, access_cluster, new_token
from tests.integration.log_cluster import seeded
from tests.integration.test_access import ON, read_arguments, stream_of
from tests.property.test_access_oracle import Model

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(100)]

PRINCIPALS = ("ann", "bob", "cid")
GROUPS = ("g", "h")
TOPICS = ("a", "ab", "b")
PATTERNS = ("topic:a", "topic:a*", "topic:b", "topic:*", "cursor:a", "cursor:*", "cluster")
RIGHTS = {
    "topic": ["read", "describe", "trim", "alter"],
    "cursor": ["cursor", "describe"],
    "cluster": ["cluster-operate", "cluster-admin", "describe"],
}
ATTEMPTS_MAX = 100
STEPS = 90
SEEN_MIN = 5
"""More calls than this have to be allowed, and denied; few random rules allow much, so some seeds take more steps."""
CONFIRMED_SECONDS = 30.0


class Sample:
    """The cluster and the model of it. Tokens are numbered."""

    def __init__(self, cluster: AccessCluster, random: Random) -> None:
        self.cluster, self.random, self.model = cluster, random, Model()
        self.tokens: dict[int, str] = {}
        self.streams: dict[str, LogStreamId] = {}
        self.allowed = self.denied = 0

    def grant(self) -> tuple[str, list[str]]:
        pattern = self.random.choice(PATTERNS)
        known = RIGHTS[pattern.partition(":")[0]]
        return pattern, self.random.sample(known, self.random.randint(1, 2))

    async def change(self) -> None:
        """Change something about access control, on both sides."""
        model, random = self.model, self.random
        subject = random.choice((*PRINCIPALS, *(f"group:{name}" for name in model.groups)))
        pattern, rights = self.grant()
        match random.randrange(7):
            case 0 | 1:
                await self.admin(q.AllowRequest(subject, tuple(rights), parse_pattern(pattern)))
                model.rules |= {(subject, right, pattern) for right in rights}
            case 2 if model.rules:
                taken = random.choice(sorted(model.rules))
                await self.admin(q.RemoveRightsRequest(taken[0], parse_pattern(taken[2]), (taken[1],)))
                model.rules.remove(taken)
            case 3:
                name = random.choice(GROUPS)
                members = set(random.sample(PRINCIPALS, random.randint(0, 2)))
                known = model.groups.get(name)
                if known is None:
                    await self.admin(q.CreateGroupRequest(name, tuple(members)))
                else:
                    change = q.ChangeGroupRequest(name, tuple(members - known), tuple(known - members))
                    await self.admin(change)
                model.groups[name] = members
            case 4 if len(model.tokens) > 2:
                number = random.choice(sorted(model.tokens))
                await self.admin(q.RevokeTokenRequest(token_id(self.tokens[number]) or ""))
                model.end(number)
            case 5 if model.tokens.keys() - model.parents.keys():
                await self.child(random.choice(sorted(model.tokens.keys() - model.parents.keys())))
            case _:
                principal = random.choice(PRINCIPALS)
                grants = [self.grant() for _ in range(random.choice((0, 0, 1)))]
                scopes = tuple(Scope(tuple(rights), parse_pattern(pattern)) for pattern, rights in grants)
                number = len(self.tokens) + 1
                self.tokens[number], request = new_token(principal, scopes)
                await self.admin(request)
                flat = [(right, pattern) for pattern, rights in grants for right in rights]
                model.tokens[number] = principal, flat, 0

    async def child(self, parent: int) -> None:
        """Make a child of a token, or let it end one of its children."""
        model, calls = self.model, AccessCalls(partial(self.ask_as, parent))
        children = [child for child, its in model.parents.items() if its == parent]
        if len(children) > 1:
            await calls.end_own_token(token_id(self.tokens[children[0]]) or "")
            model.end(children[0])
        else:
            made = await calls.create_child_token(system.wall_time_ns() // 1_000 + 3_600_000_000)
            number = len(self.tokens) + 1
            self.tokens[number], model.parents[number] = made.token, parent
            model.tokens[number] = model.tokens[parent]
        await self.admin(q.ConfirmAccessRequest())

    async def ask_as(self, number: int, request: r.Request, expected: type, *, idempotent: bool = True) -> Any:
        connection = await self.cluster.connection(self.cluster.metadata[0].address, self.tokens[number])
        try:
            return (await connection.call(ASK, request, timeout_ms=5_000)).value
        finally:
            connection.abort()

    async def admin(self, request: q.AccessRequest) -> None:
        """Ask as an administrator, and return when all servers act by the change."""
        answer: q.AccessChanged = await self.cluster.admin(request)
        deadline = asyncio.get_running_loop().time() + CONFIRMED_SECONDS
        while answer.unconfirmed:
            # On a machine with other work, a server may need longer than a change waits for it.
            assert asyncio.get_running_loop().time() < deadline, answer
            answer = await self.cluster.admin(q.ConfirmAccessRequest(answer.revision))

    async def compare(self) -> None:
        """Make one call with one token, and compare the outcome with the model."""
        random, cluster = self.random, self.cluster
        number = random.choice(sorted(self.tokens))
        token = self.tokens[number]
        right, what, is_at_node, call = self.call()
        server = random.choice([one.address for one in cluster.metadata])
        try:
            connection = await cluster.connection(cluster.node_addresses[1] if is_at_node else server, token)
        except Unauthenticated:
            assert number not in self.model.tokens, f"token {number} was not revoked"
            return
        assert number in self.model.tokens, f"token {number} was revoked"
        principal = self.model.tokens[number][0]
        expected = self.model.allows(principal, right, what, number)
        try:
            found = await call(connection)
        finally:
            connection.abort()
        assert found == expected, (principal, right, what, number, self.model)
        self.allowed += found
        self.denied += not found

    def call(self) -> tuple[str, str, bool, Callable[[Connection], Awaitable[bool]]]:
        """Return a right, a resource, whether the storage node is called, and a call that needs the right."""
        topic, cursor = self.random.choice(TOPICS), self.random.choice(("a", "b"))
        arguments = read_arguments(self.streams[topic])

        async def is_visible(connection: Connection) -> bool:
            found = await connection.call(ASK, r.CatalogRequest(), timeout_ms=5_000)
            assert isinstance(found.value, r.Catalog)
            return topic in {info.name for info in found.value.topics}

        calls: list[tuple[str, str, bool, Callable[[Connection], Awaitable[bool]]]] = [
            ("read", f"topic:{topic}", True, _tried(storage_api.READ, arguments)),
            ("describe", "cluster", True, _tried(storage_api.STATUS, None)),
            ("cluster-operate", "cluster", True, _tried(storage_api.VERIFY_STAGED, None)),
            ("describe", f"topic:{topic}", False, is_visible),
            ("trim", f"topic:{topic}", False, _tried(ASK, r.TrimRequest(topic, GLSN(1)))),
            ("describe", f"cursor:{cursor}", False, _tried(ASK, r.ReadCursorRequest(cursor))),
            ("cursor", f"cursor:{cursor}", False, _tried(ASK, r.CommitCursorRequest(cursor, GLSN(1)))),
            ("cluster-admin", "cluster", False, _tried(ASK, q.ListGroupsRequest())),
        ]
        return self.random.choice(calls)


def _tried(method: Method[Any, Any], argument: object) -> Callable[[Connection], Awaitable[bool]]:
    async def call(connection: Connection) -> bool:
        for attempt in count(1):
            try:
                await connection.call(method, argument, timeout_ms=5_000)
            except PermissionDenied:
                return False
            except CutwaterError as error:
                # What may not be described is answered like what a storage node does not know yet.
                if error.message.endswith("does not exist: nothing was done, try again") and attempt < ATTEMPTS_MAX:
                    await asyncio.sleep(0.05)
                    continue
                if error.retriable:
                    raise
            return True
        raise AssertionError

    return call


async def test_random_rules_and_calls_agree_with_the_model(tmp_path: Path) -> None:
    random = seeded()
    async with access_cluster(tmp_path, metadata=2, mode=ON) as cluster, cluster.client(cluster.root) as log:
        sample = Sample(cluster, random)
        for topic in TOPICS:
            await log.create_topic(topic)
            await log.append(topic, b"1")
            sample.streams[topic] = await stream_of(cluster, topic)
        async with asyncio.timeout(80):
            steps = count()
            while next(steps) < STEPS or min(sample.allowed, sample.denied) <= SEEN_MIN:
                await sample.change()
                for _ in range(2 if sample.tokens else 0):
                    await sample.compare()
        assert sample.allowed > SEEN_MIN
        assert sample.denied > SEEN_MIN
