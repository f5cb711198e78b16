"""What storage nodes answer to those who scan a range is believed only as far as it can be true."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from cutwater.client.read import range_reader
from cutwater.client.read.range_reader import BatchesInFile, RowBlock, Scanned, in_file, scanned
from cutwater.errors import CutwaterError, Damaged, ProtocolViolation
from cutwater.format.checksum import crc32c
from cutwater.protocol.scan_api import NOTHING, ScanAnswer, ScanArguments, pack
from cutwater.types import GLSN, LogStreamId

ASKED = ScanArguments(LogStreamId(1), GLSN(15), GLSN(40), 1_000)
RUNS = [
    (3, 10, 10, 7, 0, 1, 0, 4, crc32c(b"rows")),
    (13, 20, 1, 7, 0, NOTHING, 0, 0, 0),
    (14, 21, 5, 7, 0, 1, 0, 0, 0),
]


def scan_answer(runs: Sequence[tuple[int, ...]], rows: bytes = b"rows") -> Scanned:
    columns = [array("q", column) for column in zip(*runs, strict=True)]
    packed = pack(columns)
    return scanned(ASKED, ScanAnswer(len(runs), GLSN(40), crc32c(packed)), packed + rows)


def test_an_answer_to_a_scan_tells_where_the_rows_of_each_run_are() -> None:
    found = scan_answer(RUNS)
    assert (len(found), found.last_llsn, found.last_glsn) == (3, 18, 25)
    assert found.blocks == (RowBlock(1, 0, memoryview(b"rows")),)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({0: {6: 1}}, Damaged, "the batch at GLSN 10 arrived damaged: read it again"),
        ({0: {6: -4}}, Damaged, "arrived damaged"),
        ({0: {7: 3}}, Damaged, "arrived damaged"),
        ({1: {0: 14}}, ProtocolViolation, "from GLSN 20 and LLSN 14 on cannot be here"),
        ({1: {1: 19}}, ProtocolViolation, "from GLSN 19 and LLSN 13 on cannot be here"),
        ({2: {1: 41}}, ProtocolViolation, "from GLSN 41 and LLSN 14 on cannot be here"),
        ({0: {2: 0}}, ProtocolViolation, "0 records from GLSN 10"),
        ({0: {1: 2}}, ProtocolViolation, "from GLSN 2 and LLSN 3 on cannot be here"),
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
        scanned(ASKED, ScanAnswer(2, GLSN(40), 0), bytes(100))


@pytest.mark.parametrize("place", range(0, 8 * 9 * 3, 5))
def test_no_bit_of_what_is_told_of_runs_can_change_on_the_way(place: int) -> None:
    packed = pack([array("q", column) for column in zip(*RUNS, strict=True)])
    answer = ScanAnswer(len(RUNS), GLSN(40), crc32c(packed))
    damaged = bytearray(packed + b"rows")
    damaged[place] ^= 1
    with pytest.raises(Damaged, match="from GLSN 15 on arrived damaged"):
        scanned(ASKED, answer, bytes(damaged))


STORED = [
    (3, 10, 10, 7, 0, 1, 2, 4, crc32c(b"rows")),
    (13, 20, 1, 7, 0, NOTHING, 0, 0, 0),
    (14, 21, 5, 7, 0, 1, 10, 4, crc32c(b"more")),
    (19, 30, 5, 7, 0, 2, 18, 4, crc32c(b"last")),
]


def file_answer(path: Path, runs: Sequence[tuple[int, ...]]) -> list[BatchesInFile]:
    packed = pack([array("q", column) for column in zip(*runs, strict=True)])
    return in_file(ASKED, ScanAnswer(len(runs), GLSN(40), crc32c(packed), str(path), 3, 24), packed)


def test_what_is_told_of_a_file_is_read_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entries"
    path.write_bytes(b"...hdrows..hdmore..hdlast..")
    (everything,) = file_answer(path, STORED)
    assert [bytes(block.body) for block in everything.read().blocks] == [b"rows", b"more", b"last"]
    monkeypatch.setattr(range_reader, "SCAN_BYTES", 12)
    parts = file_answer(path, STORED)
    assert [(part.from_glsn, part.through) for part in parts] == [(15, 29), (30, 40)]
    found = [part.read() for part in parts]
    assert [[(b.schema, b.first_run, bytes(b.body)) for b in part.blocks] for part in found] == [
        [(1, 0, b"rows"), (1, 2, b"more")],
        [(2, 0, b"last")],
    ]
    assert [list(part.runs[range_reader.FIRST_LLSN]) for part in found] == [[3, 13, 14], [19]]
    assert all(part.is_stored for part in found)
    path.write_bytes(b"...hdrows..hdmore..hdlas")
    assert parts[0].read().last_llsn == 18
    with pytest.raises(Damaged, match="the batch at GLSN 30 arrived damaged"):
        parts[1].read()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        parts[0].read()


def test_runs_without_rows_need_no_file() -> None:
    (part,) = file_answer(Path("nowhere"), STORED[1:2])
    assert (len(part.read()), part.read().blocks, part.through) == (1, (), 40)


@pytest.mark.parametrize("changed", [{6: -2}, {6: 13}, {6: 21}, {7: -4}, {7: 7}])
def test_what_is_told_of_a_file_must_lie_in_it_in_order(changed: dict[int, int]) -> None:
    runs = [*STORED[:3], tuple(changed.get(k, value) for k, value in enumerate(STORED[3]))]
    with pytest.raises(ProtocolViolation, match="are not among 24"):
        file_answer(Path("entries"), runs)
