"""An old copy of the metadata repository's store is put back: nobody is shown the past as the present."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import cutwater
from cutwater.errors import OrderLayerLostMemory


def copy_store(data: Path, to: Path) -> None:
    to.mkdir()
    for path in data.glob("metadata.sqlite*"):
        shutil.copy(path, to / path.name)


def put_back(data: Path, copy: Path) -> None:
    for path in data.glob("metadata.sqlite*"):
        path.unlink()
    for path in copy.iterdir():
        shutil.copy(path, data / path.name)


def test_an_old_store_is_noticed_before_anybody_reads_tail_catalog_or_cursors(tmp_path: Path) -> None:
    data, old, newest = tmp_path / "data", tmp_path / "old", tmp_path / "newest"
    with cutwater.open(data) as log:
        log.create_topic("orders", streams=2)
        log.append("orders", b"first")
    copy_store(data, old)
    with cutwater.open(data) as log:
        for i in range(20):
            ack = log.append("orders", b"%d" % i)
        tail = log.tail()
    assert tail >= ack.glsn
    copy_store(data, newest)
    put_back(data, old)
    with pytest.raises(OrderLayerLostMemory, match="was an old copy put back"), cutwater.open(data) as log:
        assert log.tail() >= tail
    # The way out that the error names.
    put_back(data, newest)
    with cutwater.open(data) as log:
        assert log.tail() >= tail
        assert log.append("orders", b"after").glsn > tail
