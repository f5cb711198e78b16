"""``docs/wire.md`` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import Struct

from cutwater.protocol import errors
from cutwater.protocol.errors import HEADER_BYTES_MIN
from cutwater.wire.calls.credits import CreditPool, SendWindow
from cutwater.wire.codec import FrameDecoder, encode_frame
from cutwater.wire.messages import ENCODE, FIXED, HEADERS, WITH_BODY, FrameKind
from cutwater.wire.options import KIB, MIB, ListenerOptions, WireOptions

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")


def test_the_example_is_what_goes_over_the_wire() -> None:
    """To renew the block, print these two."""
    request = encode_frame(FrameKind.REQUEST, 7, ENCODE(("echo", 500, None)), b"hi")
    answer = encode_frame(FrameKind.RESPONSE, 7, ENCODE(None), b"hi")
    assert f"```\n{request.hex(' ')}\n{answer.hex(' ')}\n```" in TEXT
    decoder = FrameDecoder(1_000, 1_000)
    decoder.feed(request + answer)
    assert [(frame.kind, frame.call, frame.body) for frame in iter(decoder.next_frame, None)] == [
        (FrameKind.REQUEST, 7, b"hi"),
        (FrameKind.RESPONSE, 7, b"hi"),
    ]


def test_the_fixed_part_is_as_described() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| [a-z ]+ \|", TEXT, re.MULTILINE)
    assert [(int(offset), int(size)) for offset, size in rows] == [(0, 4), (4, 4), (8, 8), (16, 1), (17, 1)]
    assert FIXED.format == "<IIQBB"


def test_the_table_of_kinds_is_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \| [^|]+\| (yes )?\| ([^|]+) \|$", TEXT, re.MULTILINE)
    assert [(int(number), name) for number, name, _, _ in rows] == [(kind.value, kind.name) for kind in FrameKind]
    for number, _, body, header in rows:
        assert (body != "") == (int(number) in WITH_BODY)
        assert header.startswith("none") == (HEADERS[int(number)] is None)


@pytest.mark.parametrize("options", [WireOptions(), ListenerOptions()])
def test_the_limits_are_the_defaults(options: Struct) -> None:
    section = TEXT.split(f"`{type(options).__name__}`, for")[1]
    table = section[: section.index("\n\n", section.index("| ---"))]
    units = {"MiB": MIB, "KiB": KIB, "": 1}
    found = {
        name: int(number.replace(",", "")) * units[unit]
        for name, number, unit in re.findall(r"^\| `(\w+)` \| ([\d,]+) ?(\w*) \|", table, re.MULTILINE)
    }
    assert found == {name: getattr(options, name) for name in options.__struct_fields__}
    assert f"at least {HEADER_BYTES_MIN}" in TEXT


def test_every_error_of_the_wire_is_listed() -> None:
    section = TEXT.split("\n## Errors\n")[1].split("\n## ")[0]
    codes = set(re.findall(r"`([a-z_]+)`", section))
    own = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.CutwaterError)}
    assert own - {"cutwater_error", "refused"} <= codes


def test_the_example_of_credit_is_what_happens() -> None:
    pool = CreditPool(4, 1_000, 1, 16 * MIB)
    member, *credit = pool.join()
    window = SendWindow(*credit)
    said = [f"STREAM_OPEN, credit {window.items}, {window.bytes}"]
    items = [300, 300, 300, 200, 300]
    while items:
        if window.fits(items[0]):
            window.use(items[0])
            pool.received(member, items.pop(0), len(items), sum(items))
            continue
        back = window.give_back()
        backlog = len(items), sum(items)
        said.append("BLOCKED: backlog {}, {}; next {}; back {}, {}".format(*backlog, items[0], *back))
        pool.blocked(member, items[0], *back, backlog)
        if len(said) > 3:
            break
        pool.consumed(member, 1, 300)
        ((_, *credit),) = pool.grants()
        said.append("takes an item: CREDIT {}, {}".format(*credit))
        window.grant(*credit)
    assert len(said) == 4
    positions = [TEXT.index(one) for one in said]
    assert positions == sorted(positions)
