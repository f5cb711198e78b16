"""Damage of an embedded log, which has one copy of everything: what is damaged is named, and so is the way out."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import cutwater as library
from cutwater import embedded
from cutwater.admin.operations import Admin
from cutwater.admin.verification import Finding, verify
from cutwater.client.cluster.credentials import ANYONE
from cutwater.client.cluster.holder_file import read_holder, with_secret
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.errors import Damaged
from cutwater.format.errors import DamagedEntries
from cutwater.metadata.stores.store_errors import DamagedStore
from tests.integration.test_cli_records import cutwater
from tests.integration.test_storage_node_damage import damage_entry, flip
from tests.integration.test_storage_node_small_files import flipped

REPLICA = Path("volume/cid=1/snid=1/lsid=1")


def body(number: int) -> bytes:
    return b"record %04d " % number * 20


def verified(path: Path) -> tuple[Finding, ...]:
    async def work(url: str) -> tuple[Finding, ...]:
        async with Admin(parse_servers(url), access=with_secret(url, ANYONE)) as admin:
            return (await verify(await admin.describe(), timeout_ms=30_000, access=admin.access)).findings

    with embedded.open_to_administer(path, 30.0):
        holder = read_holder(path)
        assert holder is not None
        return asyncio.run(work(holder.servers))


def damaged_log(path: Path, harm: Callable[[Path], None]) -> Path:
    with library.open(path) as client:
        client.create_topic("orders")
        client.create_topic("others")
        for number in range(8):
            client.append("orders", body(number))
        client.append("others", b"intact")
    harm(path / REPLICA)
    return path


def test_a_lost_hard_state_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = damaged_log(tmp_path, lambda replica: flipped(replica / "state"))
    state = str(path / REPLICA / "state")
    with pytest.raises(Damaged) as raised:
        library.open(path)
    assert f"log stream 1 of topic 'orders': {state} is damaged" in raised.value.message
    assert "an embedded log has no other copy" in raised.value.message
    assert f"cutwater topic delete orders --path {path}" in raised.value.message

    (found,) = verified(path)
    assert (found.stream, state in found.what) == (1, True)
    assert "no other storage node holds a copy" in found.way_out
    assert "restore the damaged one from a backup" in found.way_out

    # The servers of the log may write to standard error behind the answer.
    checks = json.loads(cutwater("doctor", "--path", str(path), "-o", "json", code=3).splitlines()[0])
    told = [check["found"] for check in checks if check["name"] == "cluster"]
    assert any(f"it cannot be trusted ({state} is damaged" in line and "up to LLSN 8" in line for line in told), told
    assert any("no other storage node holds a copy" in line for line in told), told

    with embedded.open_to_administer(path, 30.0) as client:
        client.delete_topic("orders")
    with library.open(path) as client:
        assert next(iter(client.subscribe("others", start="earliest"))).value == b"intact"


def test_damaged_entries_are_named_by_llsn_and_file(tmp_path: Path) -> None:
    path = damaged_log(tmp_path, lambda replica: damage_entry(replica, body(5)))
    told = cutwater("verify", "--path", str(path), code=20)
    assert "1 finding; 2 replicas looked at" in told
    assert re.search(r"^1 +1 +6 +the checksum of the body is wrong +" + re.escape(str(path / REPLICA)), told, re.M), (
        told
    )
    assert "log stream 1: no other storage node holds a copy" in told
    assert told.count("are damaged (") <= 1, "the cause is not wrapped twice"

    found = re.search(r"`cutwater subscribe orders --start (\d+) --path (.*?)`", told)
    assert found is not None, told
    assert found[2] == str(path)
    assert f"`cutwater topic trim orders --before {found[1]} --path {path}`" in told
    assert f"`cutwater topic delete orders --path {path}`" in told
    with library.open(path) as client:
        assert client.subscribe("orders", start=int(found[1]), follow=False).take()[0].value == body(6)
        client.trim("orders", before=int(found[1]))
    assert verified(path) == (), "what is trimmed is no finding"


def test_a_damaged_commit_context_is_named(tmp_path: Path) -> None:
    def harm(replica: Path) -> None:
        flip(sorted(replica.glob("*.commits"))[0], 2048 + 64 + 5)

    path = damaged_log(tmp_path, harm)
    with pytest.raises(Damaged, match="commit context 1 is wrong"):
        library.open(path)
    assert any(found.what == "commit context 1 is wrong" for found in verified(path))


@pytest.mark.parametrize("name", ["decision", "leader"])
def test_a_damaged_record_of_the_metadata_is_named_at_once(tmp_path: Path, name: str) -> None:
    with library.open(tmp_path) as client:
        client.create_topic("orders")
    database = tmp_path / "metadata.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        where = "batches" if name == "decision" else "records WHERE name = 'leader'"
        (stored,) = connection.execute(f"SELECT data FROM {where}").fetchone()
    flip(database, database.read_bytes().index(stored) + len(stored) - 3)
    begun = time.monotonic()
    told = rf"metadata\.sqlite: {name}.* is damaged \(the checksum is wrong\)"
    with pytest.raises(DamagedStore, match=told):
        library.open(tmp_path)
    with pytest.raises(DamagedStore, match=told):
        embedded.open_to_administer(tmp_path, 30.0)
    assert time.monotonic() - begun < 5.0


def test_readers_of_the_only_copy_are_told_of_damage_after_what_is_intact(tmp_path: Path) -> None:
    path = damaged_log(tmp_path, lambda replica: damage_entry(replica, body(5)))
    with library.open(path) as client:
        records = client.subscribe("orders", start="earliest", follow=False)
        begun = time.monotonic()
        assert [next(records).value for _ in range(5)] == [body(number) for number in range(5)]
        with pytest.raises(DamagedEntries, match="the entries of LLSN 6 to 6 are damaged"):
            next(records)
        damaged = client.read(3).glsn + 3
        with pytest.raises(DamagedEntries, match="There is no other replica: `cutwater verify`"):
            client.read(damaged)
        assert time.monotonic() - begun < 10.0
