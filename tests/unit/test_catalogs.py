"""What a client knows of the catalog is as new as it has to be."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.requests import Catalog
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, CutTime, Revision

pytestmark = pytest.mark.asyncio


class Answering:
    """A metadata repository that answers at once; the log grows with every question."""

    trouble = ""

    def __init__(self) -> None:
        self.asked = 0

    async def ask(self, request: object, answer: type, *, timeout_ms: int) -> Catalog:
        self.asked += 1
        return Catalog(Revision(1), GLSN(self.asked), CutTime(0), (), ())


@pytest.mark.parametrize("turns", range(6))
async def test_a_catalog_that_was_asked_for_before_is_not_fresh(turns: int) -> None:
    """Also if the answer has come, and nobody has taken it yet."""
    repository = Answering()
    catalogs = Catalogs(cast(Repository, cast(Any, repository)))
    earlier = asyncio.create_task(catalogs.fresh(Deadline(10.0)))
    for _ in range(turns):
        await asyncio.sleep(0)
    asked = repository.asked
    view = await catalogs.fresh(Deadline(10.0))
    assert view.catalog.high_watermark > asked
    await earlier
    await catalogs.close()


async def test_an_older_catalog_that_comes_later_is_not_taken() -> None:
    """From a leader that was deposed meanwhile, say."""
    catalogs = Catalogs(cast(Repository, cast(Any, Answering())))
    seen: list[tuple[int, int]] = []
    catalogs.listeners[lambda view: seen.append((view.catalog.revision, view.catalog.high_watermark))] = None

    def taken(revision: int, high_watermark: int) -> tuple[int, int]:
        catalogs.take(Catalog(Revision(revision), GLSN(high_watermark), CutTime(0), (), ()))
        return catalogs.view.catalog.revision, catalogs.view.catalog.high_watermark

    assert taken(5, 10) == (5, 10)
    assert taken(4, 30) == (5, 10)
    assert taken(5, 9) == (5, 10)
    assert taken(5, 11) == (5, 11)
    assert taken(6, 11) == (6, 11)
    assert seen == [(5, 10), (6, 11)], "whoever listens hears of other revisions only"
    await catalogs.close()
