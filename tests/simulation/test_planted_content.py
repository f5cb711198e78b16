"""Planted bugs about the content of batches: each is one wrong line in the storage node, and an attack on real servers
finds it. Without the bug, the same attack finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from planted_bugs import Patch, planted

from cutwater.client.async_client import AsyncClient
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.storagenode.publish.staged_checks import PartChecks
from cutwater.storagenode.validation.content_checks import ContentChecks
from tests.integration.log_cluster import LogCluster, with_log
from tests.integration.test_hostile_bodies import Attack, cases


def believe_bodies() -> list[Patch]:
    def append(self, stream, batch, asker, take):
        take(batch)

    return [(ContentChecks, "append", append)]


def check_after_the_llsn_is_given() -> list[Patch]:
    right = ContentChecks.append

    def append(self, stream, batch, asker, take):
        take(batch)
        right(self, stream, batch, asker, lambda batch: None)

    return [(ContentChecks, "append", append)]


def stage_without_looking() -> list[Patch]:
    return [(PartChecks, "check", lambda self, data: None)]


def believe_event_times() -> list[Patch]:
    from cutwater.format import bodies

    return [(bodies, "_time_problem", lambda batch, form, time_min, time_max: "")]


BUGS: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "believe_bodies": ("heads do not look into batches", believe_bodies),
    "check_after_the_llsn_is_given": ("a batch gets its place, and is refused then", check_after_the_llsn_is_given),
    "stage_without_looking": ("holders do not look into parts", stage_without_looking),
    "believe_event_times": ("event times in headers are believed", believe_event_times),
}


def attacked(directory: Path) -> list[str]:
    """What a hostile client could do to a topic."""
    found: list[str] = []

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t")
        first = await log.append("t", b"before")
        attack = Attack(log._catalogs.view.catalog, "t")
        for case in cases():
            for way, send in (("append", attack.append), ("stage", attack.stage)):
                try:
                    await send(case)
                    found.append(f"{case.name}: {way} was taken")
                except InvalidArgument:
                    pass
                except CutwaterError as error:
                    found.append(f"{case.name}: {way} ended with {error.code}")
        last = await log.append("t", b"after")
        if last.llsn != first.llsn + 1:
            found.append(f"what was refused has a place: LLSN {last.llsn} follows {first.llsn}")
        if found:
            # Whoever reads it now crashes, for it is marked as checked.
            return
        values = [record.value async for record in log.subscribe("t", follow=False)]
        if values != [b"before", b"after"]:
            found.append(f"readers get {values}")

    with_log(directory, test)
    return found


def test_the_attack_finds_nothing_in_the_shipped_code(tmp_path: Path) -> None:
    assert attacked(tmp_path) == []


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    what, patches = BUGS[name]
    with planted(patches()):
        found = attacked(tmp_path)
    print(f"{name} ({what}): {found[:3]}")
    assert found
