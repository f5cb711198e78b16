"""The reference of the benchmark is honest: what it acknowledges is in the files of every process of the chain."""

from __future__ import annotations

import os
from pathlib import Path

import google_crc32c
import pytest

from benchmarks.chain import HEADER, chain
from cutwater.runtime.processes import is_running


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("length", "size", "in_flight"), [(1, 100, 1), (3, 100, 64), (3, 300_000, 4)])
def test_what_the_bare_chain_acknowledges_is_in_every_file(
    tmp_path: Path, length: int, size: int, in_flight: int, overlaps: bool
) -> None:
    message = os.urandom(size)
    with chain(tmp_path, length, overlaps=overlaps) as bare:
        found = bare.run(message, in_flight, 0.05)
        # While it runs: nothing may be left to do for its end.
        stored = [(tmp_path / f"chain{place}").read_bytes() for place in range(length)]
    framed = HEADER.pack(size, google_crc32c.value(message)) + message
    assert found.messages >= in_flight
    assert stored == [framed * found.messages] * length
    assert len(found.latencies) == (found.messages if in_flight == 1 else 0)
    assert not any(is_running(pid) for pid in bare.pids)
