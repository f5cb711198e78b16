"""Bodies that are not what they claim to be are found out, whatever is wrong with them; and nothing else is refused."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from cutwater.client.append.plain_arrow import Single, plain_body
from cutwater.errors import Unavailable
from cutwater.format import bodies, seen_bytes
from cutwater.format.bodies import KEY_VALUE_FORM, BodyForm, problem_with
from cutwater.format.ipc_message import BadMessage, read_message
from cutwater.format.plain_bodies import HEAD_BYTES, is_plain, layout
from cutwater.format.projection import KEY_VALUE, serialize

VIEWS = pa.schema([("text", pa.string_view()), ("lists", pa.list_view(pa.int32()))])
TYPED = pa.schema(
    [
        pa.field("at", pa.timestamp("ms"), nullable=False),
        pa.field("user", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("x", pa.float64()), ("y", pa.large_binary())])),
        pa.field("flag", pa.bool_()),
        pa.field("money", pa.decimal128(10, 2)),
    ]
)


def typed_rows(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "at": 1_000 + i,
                "user": None if i % 5 == 0 else f"u{i}é",
                "tags": [f"t{j}" for j in range(i % 3)],
                "place": {"x": i / 2, "y": bytes([i % 256])},
                "flag": i % 2 == 0,
                "money": None,
            }
            for i in range(count)
        ],
        schema=TYPED,
    )


def form_of(schema: pa.Schema, event_time: str = "") -> BodyForm:
    return BodyForm(schema.serialize().to_pybytes(), event_time)


def singles(count: int, keys: bool = True) -> bytes:
    made = plain_body(
        [Single(b"v" * (i % 7), b"k" * (i % 3) if keys and i % 2 else None, 10 + i) for i in range(count)]
    )
    assert made is not None
    return made.body


def problem(body: bytes, count: int = 1, low: int = 10, high: int = 10, form: BodyForm = KEY_VALUE_FORM) -> str:
    return problem_with(body, form, count, low, high)


# Sound bodies.


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 255, 256, 257, 3_000])
@pytest.mark.parametrize("keys", [True, False])
def test_plain_bodies_are_sound_with_and_without_arrow(count: int, keys: bool) -> None:
    body = singles(count, keys)
    assert problem(body, count, 10, 9 + count) == ""
    assert problem(memoryview(body), count, 10, 9 + count) == ""
    assert is_plain(body, count, 10, 9 + count) == (count <= 256)


def test_what_stands_before_plain_columns_is_what_arrow_writes() -> None:
    for count, missing in ((1, 1), (1, 0), (5, 2), (300, 300)):
        rows = [(None if i < missing else b"key", b"value") for i in range(count)]
        batch = pa.RecordBatch.from_arrays(
            [
                pa.array([key for key, _ in rows], pa.binary()),
                pa.array([value for _, value in rows], pa.binary()),
                pa.array([1] * count, KEY_VALUE.field(2).type),
                pa.array([None] * count, KEY_VALUE.field(3).type),
            ],
            schema=KEY_VALUE,
        )
        written = batch.serialize().to_pybytes()
        expected = layout(count, missing, 3 * (count - missing), 5 * count)
        assert written[:HEAD_BYTES] == expected.head
        assert problem(written, count, 1, 1) == ""


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("count", [1, 40, 600])
def test_typed_bodies_are_sound(compression: str | None, count: int) -> None:
    body = serialize(typed_rows(count), compression).to_pybytes()
    times = (1_000_000, 1_000_000 + (count - 1) * 1_000)
    assert problem_with(body, form_of(TYPED, "at"), count, *times) == ""
    assert problem_with(body, form_of(TYPED), count, 5, 5) == ""
    assert problem_with(body, BodyForm(TYPED.serialize().to_pybytes(), None), count, 5, 9) == ""


def test_views_and_empty_values_are_sound() -> None:
    rows = pa.RecordBatch.from_pylist([{"text": "x" * 40, "lists": [1, 2]}, {"text": None, "lists": []}], schema=VIEWS)
    assert problem(rows.serialize().to_pybytes(), 2, 1, 1, form_of(VIEWS)) == ""


# Hostile ones.


def put(body: bytes, at: int, form: str, *values: int) -> bytes:
    changed = bytearray(body)
    struct.pack_into(form, changed, at, *values)
    return bytes(changed)


def offsets_at(body: bytes) -> int:
    """Where the offsets of the value column lie: its second buffer."""
    message = read_message(body)
    return message.data_at + message.offsets[4]


@pytest.mark.parametrize("count", [2, 300])
@pytest.mark.parametrize("offset", [-1, 1 << 30, -(1 << 31), (1 << 31) - 1])
def test_wrong_inner_offsets(count: int, offset: int) -> None:
    body = singles(count)
    assert "no record batch of its schema" in problem(
        put(body, offsets_at(body) + 4, "<i", offset), count, 10, 9 + count
    )


def test_not_arrow() -> None:
    for body in (b"", b"x", b"\xff\xff\xff\xff", b"hello world, this is no Arrow at all", bytes(1_000)):
        assert "no Arrow record batch" in problem(body)
    schema = KEY_VALUE.serialize().to_pybytes()
    assert "no record batch" in problem(schema)


def test_more_than_one_message_or_less() -> None:
    body = singles(1)
    for other in (body + body, body + bytes(8), body[:-8], body[:HEAD_BYTES]):
        assert "no Arrow record batch: it says that" in problem(other)


def test_counts() -> None:
    body = singles(3)
    assert problem(body, 3, 10, 12) == ""
    for count in (2, 4, most := bodies.RECORDS_MAX):
        assert f"it has 3 records, and its header says {count}" in problem(body, count, 10, 12)
    for count in (0, -1, most + 1, 1 << 31, 1 << 32):
        assert f"its header says that it has {count} records" in problem(body, count, 10, 12)


def test_columns_of_nothing_do_not_become_much() -> None:
    schema = pa.schema([("nothing", pa.null()), ("inside", pa.list_(pa.null()))])
    body = pa.RecordBatch.from_pylist([{"nothing": None, "inside": [None]}], schema=schema).serialize().to_pybytes()
    form = form_of(schema)
    assert problem(body, 1, 1, 1, form) == ""
    message = read_message(body)
    nodes_at = body.index(struct.pack("<qqqq", 1, 1, 1, 0))
    assert message.values == (1, 1, 1)
    big = (1 << 31) - 1
    swollen = put(put(body, nodes_at + 32, "<q", big), message.data_at + message.offsets[1] + 4, "<i", big)
    assert "one of its columns has" in problem(swollen, 1, 1, 1, form)


def test_event_times() -> None:
    for count in (1, 3, 300):
        body = singles(count)
        for low, high in ((9, 9 + count), (10, 10 + count), (10, 1 << 62), (11, 9 + count), (0, 0)):
            if (low, high) != (10, 9 + count):
                told = f"event times go from 10 to {9 + count}, and its header says {low} to {high}"
                assert told in problem(body, count, low, high)
    body = serialize(typed_rows(2)).to_pybytes()
    assert "one event time, and its header says 1 to 2" in problem(body, 2, 1, 2, form_of(TYPED))


def test_another_schema() -> None:
    rows = pa.record_batch([pa.array([1, 2])], names=["n"])
    assert "its schema has 7" in problem(rows.serialize().to_pybytes(), 2, 1, 1)
    assert "its schema has 9" in problem(singles(2), 2, 10, 11, form_of(TYPED))


def test_nulls_where_none_may_be() -> None:
    loose = pa.schema([field.with_nullable(True) for field in KEY_VALUE])
    for column in ("value", "timestamp"):
        row = {"value": b"x", "timestamp": 10} | {column: None}
        body = pa.RecordBatch.from_pylist([row], schema=loose).serialize().to_pybytes()
        assert f"column {column!r} has nulls" in problem(body)


def test_text_that_is_no_utf8() -> None:
    schema = pa.schema([("text", pa.string())])
    good = pa.record_batch([pa.array(["abcdefgh"])], schema=schema).serialize().to_pybytes()
    assert problem(good.replace(b"abcdefgh", b"abc\xff\xfefgh"), 1, 1, 1, form_of(schema)) != ""


def test_bombs_are_refused_before_they_are_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("zeros", pa.binary())])
    size = 300 * bodies.MIB
    bomb = serialize(pa.record_batch([pa.array([bytes(size)], pa.binary())], schema=schema), "zstd").to_pybytes()
    assert len(bomb) < 100_000
    monkeypatch.setattr(bodies, "_read", lambda *_: pytest.fail("it was decompressed"))
    form = form_of(schema)
    assert f"when they are decompressed, and at most {bodies.INFLATED_BYTES_MAX}" in problem(bomb, 1, 1, 1, form)
    small = pa.record_batch([pa.array([bytes(40 * bodies.MIB)], pa.binary())], schema=schema)
    assert f"at most {bodies.RATIO_MAX} times" in problem(serialize(small, "zstd").to_pybytes(), 1, 1, 1, form)


def test_a_declared_length_that_is_not_true() -> None:
    schema = pa.schema([("zeros", pa.binary())])
    batch = pa.record_batch([pa.array([bytes(size := bodies.MIB)], pa.binary())], schema=schema)
    body = serialize(batch, "zstd").to_pybytes()
    at = body.rindex(struct.pack("<q", size))
    form = form_of(schema)
    assert problem(body, 1, 1, 1, form) == ""
    for declared in (size - 1, size + 1, 8):
        assert "no record batch of its schema" in problem(put(body, at, "<q", declared), 1, 1, 1, form)
    assert "no Arrow record batch" in problem(put(body, at, "<q", -5), 1, 1, 1, form)


@pytest.mark.parametrize(
    ("error", "is_content"),
    [
        (pa.ArrowInvalid("offsets"), True),
        (pa.ArrowTypeError("a type"), True),
        (pa.ArrowNotImplementedError("a feature"), True),
        (pa.ArrowIndexError("an index"), True),
        (EOFError("the end"), True),
        (OverflowError("a number"), True),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "no text"), True),
        (OSError("Invalid flatbuffers message"), True),
        (OSError("ZSTD decompression failed: Data corruption detected"), True),
        (OSError("no batch of column 'ZSTD failed: Allocation'"), True),
        (OSError("ZSTD decompression failed: Allocation error : not enough memory"), False),
        (OSError("LZ4 init failed: ERROR_allocation_failed"), False),
        (OSError(12, "Cannot allocate memory"), False),
        (pa.ArrowMemoryError("malloc of size 48000000 failed"), False),
        (MemoryError(), False),
        (pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"), False),
        (RuntimeError("can't start new thread"), False),
    ],
)
def test_what_is_wrong_with_the_machine_is_said_of_no_body(
    error: Exception, is_content: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    body = singles(300)
    monkeypatch.setattr(bodies, "_read", fail)
    if is_content:
        assert "it is no record batch of its schema" in problem(body, 300, 10, 309)
    else:
        with pytest.raises(Unavailable, match=r"because of this machine.*: try again"):
            problem(body, 300, 10, 309)


def test_without_memory_a_sound_body_is_not_called_malformed() -> None:
    """In a process of its own, which gets no more memory and no more threads."""
    noise = pa.array(random.Random(1).choices(range(1 << 40), k=(count := 1_000_000)), pa.int64())
    body = serialize(pa.record_batch([noise], names=["n"]), "zstd").to_pybytes()
    run = subprocess.run(
        [sys.executable, "-c", STARVED, str(count)], input=body, capture_output=True, timeout=120, check=False
    )
    assert run.stdout.split() == [b"Unavailable", b"sound"], f"{run.stdout!r}\n{run.stderr[-2_000:]!r}"


STARVED = """
import resource, sys
import pyarrow as pa
from cutwater.errors import Unavailable
from cutwater.format.bodies import BodyForm, problem_with
form = BodyForm(pa.schema([("n", pa.int64())]).serialize().to_pybytes())
claims = (sys.stdin.buffer.read(), form, int(sys.argv[1]), form.nodes, form.nodes)
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))
try:
    found = problem_with(*claims)
except Unavailable:
    found = "Unavailable"
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(found or "sound")
print(problem_with(*claims) or "sound")
"""


def test_views_that_point_to_the_same_bytes() -> None:
    schema = pa.schema([("text", pa.string_view())])
    text = "x" * bodies.MIB
    view = pa.array([text], pa.string_view())
    one = bytes(view.buffers()[1])
    many = pa.Array.from_buffers(pa.string_view(), 300, [None, pa.py_buffer(one * 300), view.buffers()[2]])
    body = pa.record_batch([many], schema=schema).serialize().to_pybytes()
    assert "point to the same bytes again and again" in problem(body, 300, 1, 1, form_of(schema))


def body_of(column: pa.Array, compression: str | None = None) -> tuple[bytes, BodyForm]:
    schema = pa.schema([("c", column.type)])
    return serialize(pa.record_batch([column], schema=schema), compression).to_pybytes(), form_of(schema)


def same_text(count: int, make: str) -> pa.Array:
    text = pa.array(["x" * bodies.MIB])
    places, ones = pa.array([0] * count, pa.int32()), pa.array([1] * count, pa.int32())
    if make == "list view":
        return pa.ListViewArray.from_arrays(places, ones, text)
    if make == "runs":
        return pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), text)
    if make == "union":
        return pa.UnionArray.from_dense(pa.array([0] * count, pa.int8()), places, [text])
    inside = pa.StructArray.from_arrays([same_text(count, "list view")], ["x"])
    return pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), inside)


@pytest.mark.parametrize("make", ["list view", "runs", "union", "inside of others"])
def test_a_small_body_is_not_a_large_one_for_its_readers(make: str) -> None:
    for compression in (None, "zstd"):
        body, form = body_of(same_text(300, make), compression)
        assert "point to the same bytes again and again" in problem(body, 300, 1, 1, form)
        # Topics that have such columns keep what is sound.
        body, form = body_of(same_text(100, make), compression)
        assert problem(body, 100, 1, 1, form) == ""


def test_runs_inside_of_others_with_more_values_than_can_be_looked_at() -> None:
    """They are counted value by value, so that a few bytes would take gigabytes to look into."""
    count = seen_bytes.RUNS_VALUES_MAX + 1
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), pa.array(["x"]))
    body, form = body_of(pa.ListArray.from_arrays(pa.array([0, count, count], pa.int32()), runs))
    assert len(body) < 1_000
    assert f"has {count} values in runs" in problem(body, 2, 1, 1, form)


def test_lists_of_nothing_that_are_shown_again_and_again() -> None:
    nothing, count = pa.nulls(1 << 20), 1_000
    column = pa.ListViewArray.from_arrays(
        pa.array([0] * count, pa.int32()), pa.array([len(nothing)] * count, pa.int32()), nothing
    )
    body, form = body_of(column)
    assert "again and again" in problem(body, count, 1, 1, form)


def test_extension_types_are_what_they_are_stored_as() -> None:
    """The client makes no such columns; whoever has one reads it on."""
    numbers = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    for column in (
        pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), numbers),
        pa.ExtensionArray.from_storage(pa.opaque(pa.string_view(), "a", "b"), pa.array(["x", "y"], pa.string_view())),
    ):
        body, form = body_of(column)
        assert problem(body, 2, 1, 1, form) == ""
    view = pa.array(["x" * bodies.MIB], pa.string_view())
    many = pa.Array.from_buffers(
        pa.string_view(), 300, [None, pa.py_buffer(bytes(view.buffers()[1]) * 300), view.buffers()[2]]
    )
    body, form = body_of(pa.ExtensionArray.from_storage(pa.opaque(pa.string_view(), "a", "b"), many))
    assert "again and again" in problem(body, 300, 1, 1, form)


INT = pa.field("a", pa.int64(), nullable=False)


@pytest.mark.parametrize(
    ("kind", "sound", "wrong", "where"),
    [
        (pa.struct([INT]), [{"a": 1}, None], [{"a": 1}, {"a": None}], "c.a"),
        (pa.list_(INT), [[1], None, []], [[1, None]], "c.a"),
        (pa.list_(INT, 2), [[1, 2], None], [[1, None]], "c.a"),
        (pa.map_(pa.string(), INT), [[("k", 1)], None], [[("k", None)]], "c.value"),
        (pa.list_(pa.struct([pa.field("s", pa.struct([INT]))])), [[{"s": None}]], [[{"s": {"a": None}}]], "c.item.s.a"),
    ],
)
def test_nulls_inside_of_others_where_none_may_be(kind: pa.DataType, sound: Any, wrong: Any, where: str) -> None:
    for values in (sound, wrong):
        column = pa.array(values, loose(kind))
        body = pa.record_batch([column], names=["c"]).serialize().to_pybytes()
        found = problem(body, len(values), 1, 1, form_of(pa.schema([("c", kind)])))
        assert found == ("" if values is sound else f"column {where!r} has nulls, and must have none")


def loose(kind: pa.DataType) -> pa.DataType:
    """The same with nulls everywhere."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, loose(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, pa.field(kind.item_field.name, loose(kind.item_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(pa.field(kind.value_field.name, loose(kind.value_type)), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, loose(kind.value_type)))
    return kind


def test_messages_of_older_versions_are_not_taken() -> None:
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, KEY_VALUE, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([{"value": b"x", "timestamp": 10}], schema=KEY_VALUE))
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    body = reader.read_next_message().serialize().to_pybytes()
    with pytest.raises(BadMessage, match="version 5"):
        read_message(body)


@pytest.mark.parametrize(("offset", "length"), [(0, 1 << 40), (1 << 40, 0), (-8, 8), (8, -8)])
def test_columns_outside_of_the_message_are_found_before_arrow_sees_it(offset: int, length: int) -> None:
    batch = pa.RecordBatch.from_pylist([{"value": b"x", "timestamp": 10}], schema=KEY_VALUE)
    body = bytearray(serialize(batch))
    message = read_message(bytes(body))
    found = struct.pack("<2q", message.offsets[-1], message.lengths[-1])
    place = bytes(body[: message.data_at]).rindex(found)
    struct.pack_into("<2q", body, place, offset, length)
    with pytest.raises(BadMessage, match="a column lies outside"):
        read_message(bytes(body))


# Anything.

FUZZ = """
import random, sys
from tests.unit.test_bodies import fuzz
fuzz(int(sys.argv[1]), int(sys.argv[2]))
"""


def fuzz(seed: int, rounds: int) -> None:
    """Flip bytes of sound bodies; what is then called sound can be read to its last value."""
    rng = random.Random(seed)
    typed, views = form_of(TYPED, "at"), form_of(VIEWS)
    rows = pa.RecordBatch.from_pylist([{"text": f"{'x' * i}", "lists": [i] * i} for i in range(30)], schema=VIEWS)
    cases = [(singles(count), KEY_VALUE_FORM, count, 10, 9 + count) for count in (1, 2, 9, 260)]
    for compression in (None, "lz4", "zstd"):
        body = serialize(typed_rows(30), compression).to_pybytes()
        cases.append((body, typed, 30, 1_000_000, 1_029_000))
        cases.append((serialize(rows, compression).to_pybytes(), views, 30, 1, 1))
    sound = 0
    for _ in range(rounds):
        body, form, *claims = rng.choice(cases)
        changed = bytearray(body)
        limit = rng.choice([len(body), min(len(body), 600)])
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(limit)
            if rng.random() < 0.5:
                changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            else:
                at -= at % 4
                some = rng.choice([0, 1, 8, 1 << 30, (1 << 31) - 1, (1 << 32) - 1, rng.randrange(1 << 32)])
                changed[at : at + 4] = some.to_bytes(4, "little")
        made = bytes(changed[: len(body)])
        if problem_with(made, form, *claims) == "":
            sound += 1
            batch = pa.ipc.read_record_batch(pa.py_buffer(made), form.schema)
            assert batch.num_rows == claims[0]
            with suppress(ValueError, OverflowError):  # A timestamp that no datetime can hold.
                batch.to_pylist()
            batch.slice(1).serialize()
    assert 0 < sound < rounds


def test_flipped_bytes_never_crash() -> None:
    """In a process of its own, because the fault would end it."""
    seed = random.SystemRandom().randrange(1 << 32)
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, str(seed), "6000"], capture_output=True, text=True, timeout=120, check=False
    )
    replay = f"python -c 'from tests.unit.test_bodies import fuzz; fuzz({seed}, 6000)'"
    assert run.returncode == 0, f"{replay}\nended with {run.returncode}\n{run.stderr[-2_000:]}"
