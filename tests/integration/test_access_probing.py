"""Calls with numbers do not tell which log streams, topics, runs and tokens exist: each call of the table is made
about a forbidden thing and about nothing, and must get the same answers in the same order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cutwater.core import requests as r
from cutwater.core.access import access_requests as q
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.principals import token_id
from cutwater.protocol import storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.methods import Notice
from tests.access_table import Row, rows
from tests.integration.access_cluster import AccessCluster, access_cluster
from tests.integration.test_access_table import SECRET, Arguments, Attack, Caller, attack, prepare

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

NOTHING = 987_654
ANSWERS_MAX = 100
NEEDS_NO_NUMBER = {
    # The name of a part has 32 random digits, and a part that is not there is staged again.
    storage_api.FINISH_PART.name: "a part",
    storage_api.DISCARD_PART.name: "a part",
    # Runs are numbered from 1 on, so each of them tells how many there are.
    r.PublishRequest.__name__: "a run",
    # The key of a run is random.
    r.OpenRunRequest.__name__: "the key of a run",
    # A notice has no answer.
    storage_api.COMPLAINT.name: "a notice",
}


def numbered() -> Iterator[Row]:
    """The calls that name what they are about by a number."""
    for row in rows():
        if any(need.is_by_number for need in row.access.needs):
            yield row


async def forbidden(cluster: AccessCluster, given: Arguments, row: Row, *, is_there: bool) -> Any:
    """An argument about what is forbidden, or about what does not exist."""
    topic = next(info.topic for info in (await cluster.admin(r.CatalogRequest())).topics if info.name == SECRET)
    number = {"stream": given.stream, "run": given.run, "topic": int(topic)}
    if not is_there:
        number = dict.fromkeys(number, NOTHING)
    made = Arguments(number["stream"], number["run"], given.part).of(row, Caller.OTHER)
    if row.name == storage_api.STAGE.name:
        return structs.replace(made, part=structs.replace(made.part, topic=number["topic"]))
    if isinstance(made, q.DescribeTokenRequest):
        return q.DescribeTokenRequest(token_id(cluster.root) or "" if is_there else "abcdef")
    return made


async def answers(cluster: AccessCluster, attacker: Attack, row: Row, argument: Any) -> list[str]:
    """All answers to the same call, up to the one that stays. Numbers are left out; repetitions count once."""
    cluster.nodes[1].access.control.names._topics._first_missed.clear()  # type: ignore[attr-defined]
    found: list[str] = []
    for _ in range(ANSWERS_MAX):
        code, message, error = await attacker.call(row, argument)
        told = re.sub(r"\d+|abcdef", "N", f"{code}: {message} {getattr(error, 'resource', '')}")
        if told not in found:
            found.append(told)
        if code != "unavailable":
            break
        await asyncio.sleep(0.02)
    return found


async def test_what_is_forbidden_answers_like_what_does_not_exist(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, mode=AccessMode.ENFORCED) as cluster:
        given = await prepare(cluster)
        other = await cluster.principal("other", ("read,append", "topic:mine"), ("publish", "run:mine"))
        async with cluster.client(cluster.root) as log:
            # The storage node knows the topic by now, so it can answer at once.
            await log.append(SECRET, b"2")
        wrong, compared = [], set()
        for name, token in (("another principal", other), ("nobody", "")):
            async with attack(cluster, lambda at, t=token: cluster.connection(at, t)) as attacker:
                for row in numbered():
                    if row.name in NEEDS_NO_NUMBER:
                        continue
                    assert not isinstance(row.method, Notice)
                    both = [
                        await answers(cluster, attacker, row, await forbidden(cluster, given, row, is_there=is_there))
                        for is_there in (True, False)
                    ]
                    compared.add(row.name)
                    if both[0] != both[1] or not both[0][-1].startswith("permission_denied"):
                        wrong.append(f"{name}: {row.server} {row.name}: {both[0]} and {both[1]}")
        assert not wrong, "\n".join(wrong)
        on_streams = {"append", "read", "follow", "find", "event_time", "measure", "heads", "groups", "scan", "stage"}
        assert on_streams <= {row.name for row in numbered() if row.server == STORAGE_NODE} & compared
