"""What storage nodes answer to those who scan a range is believed only as far as it can be true."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from cutwater.client.ranges import Block, Scanned, scanned
from cutwater.errors import CutwaterError, Damaged, ProtocolViolation
from cutwater.storage.checksum import crc32c
from cutwater.types import GLSN, LogStreamId
from cutwater.wire.scan_api import NOTHING, ScanAnswer, ScanArguments, pack

ASKED = ScanArguments(LogStreamId(1), GLSN(15), GLSN(40), 1_000)
RUNS = [
    (3, 10, 10, 7, 0, 1, 0, 4, crc32c(b"rows")),
    (13, 20, 1, 7, 0, NOTHING, 0, 0, 0),
    (14, 21, 5, 7, 0, 1, 0, 0, 0),
]


def scan_answer(runs: Sequence[tuple[int, ...]], rows: bytes = b"rows") -> Scanned:
    columns = [array("q", column) for column in zip(*runs, strict=True)]
    return scanned(ASKED, ScanAnswer(len(runs), GLSN(40)), pack(columns) + rows)


def test_an_answer_to_a_scan_tells_where_the_rows_of_each_run_are() -> None:
    found = scan_answer(RUNS)
    assert (len(found), found.last_llsn, found.last_glsn) == (3, 18, 25)
    assert found.blocks == (Block(1, 0, memoryview(b"rows")),)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({0: {6: 1}}, Damaged, "the batch at GLSN 10 arrived damaged: read it again"),
        ({0: {6: -4}}, Damaged, "arrived damaged"),
        ({0: {7: 3}}, Damaged, "arrived damaged"),
        ({1: {0: 14}}, ProtocolViolation, "GLSN 20 with LLSN 14 was not asked for"),
        ({1: {1: 19}}, ProtocolViolation, "GLSN 19 with LLSN 13 was not asked for"),
        ({2: {1: 41}}, ProtocolViolation, "GLSN 41 with LLSN 14 was not asked for"),
        ({0: {2: 0}}, ProtocolViolation, "was not asked for"),
        ({0: {1: 2}}, ProtocolViolation, "GLSN 2 with LLSN 3 was not asked for"),
        ({2: {5: 2}}, ProtocolViolation, "the batch at GLSN 21 came without its rows"),
    ],
)
def test_an_answer_to_a_scan_that_cannot_be_true_is_not_taken(
    changed: dict[int, dict[int, int]], error: type[CutwaterError], text: str
) -> None:
    runs = [tuple(changed.get(i, {}).get(k, value) for k, value in enumerate(run)) for i, run in enumerate(RUNS)]
    with pytest.raises(error, match=text):
        scan_answer(runs)


def test_an_answer_to_a_scan_that_is_too_short_for_its_runs_is_not_taken() -> None:
    with pytest.raises(ProtocolViolation, match="2 runs do not fit into 100 bytes"):
        scanned(ASKED, ScanAnswer(2, GLSN(40)), bytes(100))
