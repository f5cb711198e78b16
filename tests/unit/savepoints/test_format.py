"""A savepoint is whole, intact and readable, or it is refused with words that say why."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from kit import Last, payments, pipeline, taken

from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused, SavepointDamaged
from cutwater.pipeline import ProcessFunction, ValueState, Watermark
from cutwater.pipeline.clocks.rule_one import RuleOneSnapshot
from cutwater.savepoints import (
    delete_savepoint,
    diff,
    edited_savepoint,
    list_savepoints,
    new_savepoint,
    open_savepoint,
)
from cutwater.savepoints.clocks import migrated
from cutwater.savepoints.manifest import NAME, UNFINISHED
from cutwater.savepoints.savepoint import directory_of


def test_what_was_kept_is_read_by_people_and_by_any_tool(tmp_path: Path) -> None:
    savepoint = taken(tmp_path / "sp")
    found = open_savepoint(tmp_path / "sp")
    assert found.manifest == savepoint.manifest
    found.verify()
    wanted = pipeline().test({"payments": payments()}, drain=False)
    rows = {row["key"]["user"]: row for row in found.table("last").to_pylist()}
    assert {user: row["state_last"] for user, row in rows.items()} == {
        user: kept["last"] for user, kept in wanted.state("last").items()
    }
    timers = sorted((time, user) for user, row in rows.items() for time in row["event_timers"])
    assert timers == [(timer.time, timer.key) for timer in wanted.timers("last")]
    (one,) = found.table("last", key="u3").to_pylist()
    assert one["key"] == {"user": "u3"}
    assert dict(one["state_counts"]) == wanted.state("last")["u3"]["counts"]
    for file in found.manifest.files:
        assert pq.read_table(tmp_path / "sp" / file.path).num_rows == file.rows
    with pytest.raises(NotFound, match="no operator 'x': it has last, w"):
        found.table("x")


def test_a_savepoint_of_before_topics_had_numbers_is_opened(tmp_path: Path) -> None:
    taken(tmp_path / "sp")
    path = tmp_path / "sp" / NAME
    plain = msgspec.json.decode(path.read_bytes())
    del plain["topics"]
    plain["checksum"] = hashlib.sha256(msgspec.json.encode({**plain, "checksum": ""})).hexdigest()
    path.write_bytes(msgspec.json.encode(plain))
    found = open_savepoint(tmp_path / "sp")
    found.verify()
    assert found.manifest.topics == {}


def test_every_flipped_byte_of_a_file_is_found(tmp_path: Path) -> None:
    savepoint = taken(tmp_path / "sp")
    files = [NAME, *(file.path for file in savepoint.manifest.files)]
    assert len(files) == 3
    for name in files:
        path = tmp_path / "sp" / name
        whole = path.read_bytes()
        for at in (0, len(whole) // 3, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises((SavepointDamaged, InvalidArgument, Refused)) as caught:
                open_savepoint(tmp_path / "sp").verify()
            assert str(tmp_path / "sp") in str(caught.value)
        path.write_bytes(whole[:-5])
        with pytest.raises((SavepointDamaged, InvalidArgument)):
            open_savepoint(tmp_path / "sp").verify()
        path.write_bytes(whole)
    last = tmp_path / "sp" / savepoint.manifest.files[0].path
    last.write_bytes(b"x" * 10)
    with pytest.raises(SavepointDamaged, match=r"is not the one in the manifest\. Nothing was loaded"):
        savepoint.table("last")
    last.unlink()
    with pytest.raises(SavepointDamaged, match="it is missing"):
        savepoint.verify()
    open_savepoint(tmp_path / "sp")


def test_a_half_written_one_is_refused_and_can_be_deleted(tmp_path: Path) -> None:
    taken(tmp_path / "good")
    taken(tmp_path / "half")
    (tmp_path / "half" / NAME).unlink()
    (tmp_path / "half" / UNFINISHED).write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("!")
    with pytest.raises(Refused, match="half-written"):
        open_savepoint(tmp_path / "half")
    listed = list_savepoints(tmp_path)
    assert set(listed) == {"good", "half"}
    assert "half-written" in str(listed["half"])
    with pytest.raises(AlreadyExists, match="is not empty"):
        taken(tmp_path / "half")
    delete_savepoint(tmp_path / "half")
    delete_savepoint(tmp_path / "good")
    assert not list_savepoints(tmp_path)
    for nothing in ("nope", "other/precious"):
        with pytest.raises(NotFound, match=f"there is no directory .*{nothing}"):
            list_savepoints(tmp_path / nothing)
    with pytest.raises(NotFound, match="so it is not deleted"):
        delete_savepoint(tmp_path / "other")
    assert (tmp_path / "other" / "precious").exists()


def test_a_savepoint_never_changes(tmp_path: Path) -> None:
    taken(tmp_path / "sp")
    with pytest.raises(AlreadyExists, match="never change"):
        taken(tmp_path / "sp")
    (tmp_path / "sp" / "mine").write_text("!")
    with pytest.raises(Refused, match="also has mine"):
        delete_savepoint(tmp_path / "sp")
    open_savepoint(tmp_path / "sp").verify()


def test_it_can_be_moved_and_copied(tmp_path: Path) -> None:
    savepoint = taken(tmp_path / "sp")
    shutil.copytree(tmp_path / "sp", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "sp")
    copy = open_savepoint(tmp_path / "elsewhere" / "copy")
    copy.verify()
    assert copy.manifest == savepoint.manifest
    with pytest.raises(NotFound, match="Name the directory of one savepoint"):
        open_savepoint(tmp_path / "elsewhere")


def test_what_is_different_is_told(tmp_path: Path) -> None:
    first, second = taken(tmp_path / "1", 20), taken(tmp_path / "2", 22)
    found = diff(first, second)
    assert found.glsn == 2
    (last,) = (operator for operator in found.operators if operator.uid == "last")
    assert (last.added, last.removed, last.changed) == (0, 0, 2)
    assert set(last.examples) == {"~u6", "~u0"}
    assert diff(first, open_savepoint(tmp_path / "1")).is_empty

    class Other(Last):
        extra = ValueState("string")

    third = taken(tmp_path / "3", 20, pipeline(Other()))
    (last,) = diff(first, third).operators
    assert last.states == ("+extra: value string",)


def test_a_savepoint_is_made_of_a_table(tmp_path: Path) -> None:
    table = pa.table(
        {"user": ["a", "b"], "last": pa.array([1, 2], pa.int64()), "event_timers": [[6, None, 5, 6], None]}
    )
    made = new_savepoint(tmp_path / "sp", pipeline(), glsn=7, states={"last": table})
    assert made.manifest.glsn == 7
    (row,) = made.table("last", key="a").to_pylist()
    assert (row["state_last"], row["event_timers"], row["key"]) == (1, [5, 6], {"user": "a"})
    for wrong, match in (
        ({"user": ["a", "a"]}, "more than once"),
        ({"who": ["a"]}, "needs user for the key"),
        ({"user": ["a"], "last": ["x"]}, "the state is kept as int"),
        ({"user": [[1]]}, "'user' for 'last' is array<bigint>: the key is string"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            new_savepoint(tmp_path / "wrong", pipeline(), glsn=7, states={"last": pa.table(wrong)})
    with pytest.raises(InvalidArgument, match="no operator 'lost'"):
        new_savepoint(tmp_path / "wrong", pipeline(), glsn=7, states={"lost": table})
    assert not (tmp_path / "wrong").exists()


class SeenAt(ProcessFunction):
    seen = ValueState("timestamp")

    def process(self, record: Any, ctx: Any) -> None:
        self.seen.set(ctx.event_time)


def test_a_table_of_integers_is_no_state_of_times(tmp_path: Path) -> None:
    p = pipeline(SeenAt())
    with pytest.raises(InvalidArgument, match="the column 'seen' for 'last': a bigint is an integer, and whether it"):
        new_savepoint(tmp_path / "sp", p, glsn=7, states={"last": pa.table({"user": ["a"], "seen": [1_000]})})


def test_a_copy_with_other_rows_is_a_savepoint_of_its_own(tmp_path: Path) -> None:
    before = taken(tmp_path / "before")
    table = before.table("last")
    kept = table.filter(pc.not_equal(table["key_bytes"], pa.scalar(b"\x03u3", pa.binary())))
    after = edited_savepoint(before, tmp_path / "after", {"last": kept})
    after.verify()
    assert after.manifest.id != before.manifest.id
    assert after.manifest.glsn == before.manifest.glsn
    (last,) = diff(before, after).operators
    assert (last.uid, last.examples) == ("last", ("-u3",))
    turned = pa.array([None if row is None else row[::-1] for row in table["event_timers"].to_pylist()])
    again = edited_savepoint(before, tmp_path / "again", {"last": table.set_column(3, "event_timers", turned)})
    assert not diff(before, again).operators
    renamed = pa.StructArray.from_arrays([pa.array(["x"] * len(table))], names=["user"])
    wrong = table.set_column(2, "key", renamed)
    for given, match in (
        (pa.concat_tables([table, table]), "has a key twice"),
        (table.drop_columns(["key_bytes"]), "lacks the column 'key_bytes'"),
        (wrong, "not what its key_bytes say"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            edited_savepoint(before, tmp_path / "never", {"last": given})
    with pytest.raises(NotFound, match="no operator 'x'"):
        edited_savepoint(before, tmp_path / "never", {"x": table})
    assert not (tmp_path / "never").exists()


def test_a_uid_is_a_safe_name() -> None:
    assert directory_of("fraud-2") == "state/fraud-2"
    strange = ["..", "a/b", "_x", ".x", "a b", "a.b", "x" * 300, "ü"]
    found = {directory_of(uid) for uid in strange}
    assert len(found) == len(strange)
    assert all(name.count("/") == 1 and not name.split("/")[1].startswith((".", "_")) for name in found)


class Nothing(ProcessFunction):
    def process(self, record: object, ctx: object) -> None:
        pass


def test_an_operator_that_keeps_nothing_has_no_files(tmp_path: Path) -> None:
    savepoint = taken(tmp_path / "sp", 20, pipeline(Nothing()))
    assert not savepoint.operator("last").files
    assert savepoint.table("last").num_rows == 0


def as_version_1(path: Path, clock: object = None) -> None:
    """The manifest as it was before rules had numbers, with its own checksum."""
    file = path / "manifest.json"
    plain = json.loads(file.read_bytes())
    plain |= {"version": 1, "clock": clock, "checksum": ""}
    del plain["rule"]
    plain["checksum"] = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    file.write_bytes(json.dumps(plain).encode())


def rewritten(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    plain = json.loads(file.read_bytes()) | changes | {"checksum": ""}
    plain["checksum"] = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()
    file.write_bytes(json.dumps(plain).encode())


def test_a_savepoint_says_under_which_rule_its_clocks_are(tmp_path: Path) -> None:
    made = taken(tmp_path / "s")
    assert made.manifest.rule == 2
    old = {
        "time_ms": 5,
        "streams": [["payments", 1]],
        "clocks": [
            [
                ["payments"],
                {
                    "glsn": 3,
                    "time": 5_000,
                    "watermark": 7_000,
                    "ended": False,
                    "streams": [
                        {
                            "log_stream_id": 0,
                            "strategy": {"type": "bounded", "bound_us": 0, "idle_after_us": 30_000_000},
                            "last_commit": 5_000,
                            "watermark": 7_000,
                        }
                    ],
                },
            ]
        ],
        "ended": [],
    }
    as_version_1(tmp_path / "s", old)
    manifest = open_savepoint(tmp_path / "s").manifest
    assert (manifest.version, manifest.rule) == (1, 1)
    assert isinstance(manifest.clock, RuleOneSnapshot)
    operators = tuple(state.operator for state in manifest.operators)
    clock = migrated(manifest.clock, {"payments": Watermark.ascending()}, operators, operators)
    assert clock is not None
    assert clock.watermark_ms == 7


def test_rules_and_fields_that_are_not_known_are_refused(tmp_path: Path) -> None:
    for number, (changes, said) in enumerate(
        [
            ({"rule": 3}, "made under rule 3 of the watermark, and this version of Cutwater knows 1 and 2"),
            ({"version": 3}, "has version 3 of the format"),
            ({"what": 1}, "has a field that this Cutwater does not know .*what"),
            ({"clock": {"rule": 2, "time_us": 0, "sources": [], "operators": [], "what": 1}}, "does not know .*what"),
        ]
    ):
        taken(tmp_path / str(number))
        rewritten(tmp_path / str(number), **changes)
        with pytest.raises(Refused, match=said):
            open_savepoint(tmp_path / str(number))
