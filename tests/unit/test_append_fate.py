"""What the catalog tells of an append that nobody has answered; the simulator checks that it is true."""

from __future__ import annotations

import pytest

from cutwater.core.append_fate import AppendFate, fate_of, is_out_of_date
from cutwater.core.requests import StreamInfo
from cutwater.types import GLSN, LLSN, CutTime, Epoch, LogStreamId, Revision, StorageNodeId, TopicId

SENT_IN = Epoch(3)
KNOWN = LLSN(10)


def stream(epoch: int, *, is_open: bool, end: int, start: int | None) -> StreamInfo:
    nodes = (StorageNodeId(1),)
    return StreamInfo(
        LogStreamId(1), TopicId(1), Epoch(epoch), is_open, False, nodes, nodes, LLSN(end), GLSN(end), GLSN(0),
        CutTime(0), GLSN(0), None if start is None else LLSN(start),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("info", "fate"),
    [
        # Its epoch goes on, whatever is committed; a catalog that is older says nothing.
        (stream(3, is_open=True, end=10, start=0), AppendFate.PENDING),
        (stream(3, is_open=True, end=12, start=0), AppendFate.PENDING),
        (stream(2, is_open=False, end=9, start=0), AppendFate.PENDING),
        # Sealed, and not opened again yet.
        (stream(3, is_open=False, end=10, start=0), AppendFate.ABSENT),
        (stream(3, is_open=False, end=11, start=0), AppendFate.UNDECIDED),
        # Opened again: what was committed afterwards does not matter.
        (stream(4, is_open=True, end=10, start=10), AppendFate.ABSENT),
        (stream(4, is_open=True, end=50, start=10), AppendFate.ABSENT),
        (stream(4, is_open=True, end=50, start=11), AppendFate.UNDECIDED),
        (stream(4, is_open=False, end=50, start=10), AppendFate.ABSENT),
        (stream(7, is_open=True, end=50, start=10), AppendFate.ABSENT),
        # A server that does not tell where the epoch began.
        (stream(4, is_open=True, end=10, start=None), AppendFate.ABSENT),
        (stream(4, is_open=True, end=11, start=None), AppendFate.UNDECIDED),
        # Deleted.
        (None, AppendFate.UNDECIDED),
    ],
)
def test_the_fate_of_an_append(info: StreamInfo | None, fate: AppendFate) -> None:
    assert fate_of(info, SENT_IN, KNOWN) is fate


def test_a_catalog_is_out_of_date_when_a_later_one_was_heard_of() -> None:
    assert is_out_of_date(Revision(3), Revision(4))
    assert not is_out_of_date(Revision(4), Revision(4))
    assert not is_out_of_date(Revision(4), Revision(0)), "0: the server is older, and does not tell"
