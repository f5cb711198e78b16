"""Bugs in the embedded log, and the profile of the simulator that is made for each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planted_bugs import Patch, PlantedBug, plant

from cutwater import embedded
from cutwater.client.cluster.holder_file import read_holder
from cutwater.embedded import EmbeddedLog
from cutwater.runtime import local_files
from cutwater.storage.files import Lock
from cutwater.wire.identity import server_keys
from cutwater.wire.identity.auth import ANONYMOUS, Credentials, PeerIdentity
from cutwater.wire.identity.server_keys import ServerKey


def lock_of_the_log_not_held() -> list[Patch]:
    right = embedded._locked

    def wrong(directory: Path) -> Lock | None:
        lock = right(directory)
        if lock is not None:
            lock.release()
        return lock

    return [(embedded, "_locked", wrong)]


def dead_holder_taken_for_alive() -> list[Patch]:
    right = embedded._locked

    def wrong(directory: Path) -> Lock | None:
        return right(directory) if read_holder(directory) is None else None

    return [(embedded, "_locked", wrong)]


def keys_made_at_every_opening() -> list[Patch]:
    def wrong(paths: Iterable[Path]) -> ServerKey:
        key = ServerKey.generate()
        for path in paths:
            local_files.write_secret(path, key.to_pem(), is_lasting=True)
        return key

    return [(embedded, "load_or_make", wrong)]


def keys_not_synced() -> list[Patch]:
    def wrong(path: Path, data: bytes, *, is_lasting: bool) -> None:
        local_files.write_secret(path, data)

    return [(server_keys, "write_secret", wrong)]


def directory_of_the_log_not_synced() -> list[Patch]:
    def wrong(files: object, path: Path) -> None:
        pass

    return [(local_files, "_sync_name", wrong)]


def log_released_before_its_servers_have_stopped() -> list[Patch]:
    right = EmbeddedLog.stop

    async def wrong(self: EmbeddedLog) -> None:
        self._lock.release()
        await right(self)

    return [(EmbeddedLog, "stop", wrong)]


def everyone_let_in() -> list[Patch]:
    def wrong(secret: str, credentials: Credentials) -> PeerIdentity:
        return ANONYMOUS

    return [(embedded, "_authenticate", wrong)]


def _plant(bug: Any, seed: int, what: str, **changes: Any) -> tuple[str, PlantedBug]:
    usual = {"embedded": True, "storage_nodes": 1, "replication": 1, "store": "sqlite", "appenders": 1, "timeout": 1.0}
    return plant(bug, seed, what, **(usual | changes))


EMBEDDED_BUGS: dict[str, PlantedBug] = dict(
    (
        _plant(
            lock_of_the_log_not_held,
            0,
            "the process that opened a log does not keep its lock",
            rivals_every=0.1,
        ),
        _plant(
            dead_holder_taken_for_alive,
            0,
            "a holder file counts, though its process was killed",
            kill_every=0.3,
        ),
        _plant(
            keys_made_at_every_opening,
            0,
            "a log that is opened again gets new keys",
            restart_every=0.3,
        ),
        _plant(
            keys_not_synced,
            0,
            "the keys of the servers are not on disk when they are used",
            power_every=0.3,
        ),
        _plant(
            directory_of_the_log_not_synced,
            0,
            "the name of a new directory is not on disk when the log is used",
            power_every=0.3,
        ),
        _plant(
            log_released_before_its_servers_have_stopped,
            2,
            "closing a log lets others in before its servers have stopped",
            restart_every=0.2,
            rivals_every=0.05,
        ),
        _plant(
            everyone_let_in,
            0,
            "the servers do not ask for the secret of the directory",
            rivals_every=0.1,
        ),
    )
)
