"""An embedded log that is held open for Spark applications, with the holder in this process and without a JVM."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

import cutwater
from cutwater import embedded
from cutwater.client.cluster.holder_file import Holder
from cutwater.errors import Unavailable
from cutwater.runtime import processes
from cutwater.spark.session import log_holder

FIRST, SECOND = 2**30, 2**30 + 1
"""Applications. No process has such a number."""


def test_a_log_is_held_for_all_who_were_sent_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts while the application of before is ending is not sent to a log that is about to be closed."""
    cutwater.open(tmp_path).close()
    log, running, seen = str(tmp_path), {FIRST, os.getpid()}, []
    monkeypatch.setattr(log_holder, "lives_on", lambda number, _: number in running)
    assert log_holder._noted(tmp_path, FIRST)

    def between_looks(_: float) -> None:
        seen.append(len(running))
        if FIRST in running:
            running.remove(FIRST)
            running.add(SECOND)
            assert log_holder.servers_of(log, SECOND, timeout=10).startswith("cutwater://127.0.0.1:")
        else:
            running.remove(SECOND)

    monkeypatch.setattr(log_holder.time, "sleep", between_looks)
    log_holder.hold(log)
    assert seen == [2, 2]
    assert (tmp_path / log_holder.LOCK_FILE).read_text() == ""


def test_nobody_is_sent_to_a_log_that_is_being_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cutwater.open(tmp_path).close()
    told: list[str] = []
    stop = embedded.EmbeddedLog._remove_holder

    def closing(log: embedded.EmbeddedLog) -> None:
        with pytest.raises(Unavailable) as error:
            log_holder.servers_of(str(tmp_path), os.getpid(), timeout=0)
        told.append(error.value.message)
        stop(log)

    monkeypatch.setattr(embedded.EmbeddedLog, "_remove_holder", closing)
    (tmp_path / log_holder.LOCK_FILE).touch()
    log_holder.hold(str(tmp_path))
    assert len(told) == 1


def test_another_process_with_the_number_of_one_that_was_killed_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the one that had the log open, nor for an application that needed it."""
    cutwater.open(tmp_path).close()
    started = processes.started_at(os.getpid())
    (tmp_path / log_holder.LOCK_FILE).write_text(f"{os.getpid()} {started - 1}\n")
    log_holder.hold(str(tmp_path))
    assert (tmp_path / log_holder.LOCK_FILE).read_text() == ""
    alive = Holder(os.getpid(), "cutwater://127.0.0.1:1", started)
    killed = structs.replace(alive, started=started - 1)
    helpers: list[Path] = []
    monkeypatch.setattr(log_holder, "_start", helpers.append)
    (tmp_path / "holder.json").write_bytes(msgspec.json.encode(alive))
    assert log_holder.servers_of(str(tmp_path), os.getpid(), timeout=0) == alive.servers
    assert embedded._end_of(tmp_path, alive) == ""
    (tmp_path / "holder.json").write_bytes(msgspec.json.encode(killed))
    with pytest.raises(Unavailable):
        log_holder.servers_of(str(tmp_path), os.getpid(), timeout=0)
    assert helpers == [tmp_path]
    assert "has closed it, or ended" in embedded._end_of(tmp_path, killed)
