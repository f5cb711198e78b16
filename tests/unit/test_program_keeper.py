"""The leader and its copies of programs, without storage nodes."""

from __future__ import annotations

import asyncio

import pytest
from test_order_layer_repair import cluster

from cutwater.core import requests as r
from cutwater.core.internal_topics import PROGRAMS
from cutwater.core.jobs.job_records import ProgramPlace
from cutwater.core.order.state import OrderState
from cutwater.errors import Unavailable
from cutwater.metadata.internal.program_keeper import ProgramKeeper
from cutwater.types import GLSN, StorageNodeId
from cutwater.wire.connection import Connection


def stored() -> OrderState:
    """A program is stored."""
    nodes = cluster()
    nodes.leader.answer(r.MakeInternalTopicsRequest((PROGRAMS,)))
    state = nodes.leader.state
    state.jobs.note_program("ab" * 32, ProgramPlace(GLSN(state.high_watermark + 1), 1, 10))
    return state


async def no_node(node: StorageNodeId, address: str) -> Connection:
    raise Unavailable("no storage node")


def test_a_trim_that_will_be_refused_copies_nothing() -> None:
    state = stored()
    asked: list[r.Request] = []

    async def decide(request: r.Request) -> r.Answer:
        asked.append(request)
        raise Unavailable("no leader")

    keeper = ProgramKeeper(state, no_node, decide)
    beyond = r.TrimRequest(PROGRAMS.name, GLSN(state.high_watermark + 2))
    asyncio.run(keeper.prepare(beyond))
    assert asked == []
    with pytest.raises(Unavailable):
        asyncio.run(keeper.prepare(r.TrimRequest(PROGRAMS.name, GLSN(state.high_watermark + 1))))
    assert asked == [r.CatalogRequest()], "programs are read, to find out what has to be copied"
