"""The codec at its edges: limits before allocation, large frames, what is no frame at all."""

from __future__ import annotations

import re

import pytest
from msgspec import Raw, msgpack

from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.protocol.errors import FrameTooLarge, MalformedFrame
from cutwater.wire import messages
from cutwater.wire.codec import LARGE_BYTES, FrameDecoder, encode_frame
from cutwater.wire.messages import FIXED, FIXED_BYTES, HEADERS, WITH_BODY, FrameKind, RequestHeader, WireFrame
from cutwater.wire.options import WireOptions

REQUEST = msgpack.encode(("read", 500, [1, 2]))


def decoder(frame_bytes_max: int = 1 << 20, header_bytes_max: int = 1 << 16, **more: object) -> FrameDecoder:
    return FrameDecoder(frame_bytes_max, header_bytes_max, **more)  # type: ignore[arg-type]


def taken(decoder: FrameDecoder, data: bytes) -> list[WireFrame]:
    decoder.feed(data)
    return list(iter(decoder.next_frame, None))


def test_a_request_comes_out_as_it_went_in() -> None:
    (frame,) = taken(decoder(), encode_frame(FrameKind.REQUEST, 7, REQUEST, b"body"))
    assert (frame.kind, frame.call, bytes(frame.body), frame.size) == (FrameKind.REQUEST, 7, b"body", len(REQUEST) + 4)
    assert isinstance(frame.header, RequestHeader)
    assert (frame.header.method, frame.header.timeout_ms) == ("read", 500)
    assert msgpack.decode(frame.header.argument) == [1, 2]


def test_the_format_does_not_change_by_accident() -> None:
    """These bytes were spoken by version 1, but PROOF, which is of version 2. If this fails, it is a new version."""
    frame = encode_frame(FrameKind.REQUEST, 258, msgpack.encode(("m", 3, None)), b"xy")
    assert frame.hex() == "02000000050000000201000000000000" + "0300" + "93a16d03c0" + "7879"
    assert {kind.name: kind.value for kind in FrameKind} == {
        "HELLO": 1,
        "WELCOME": 2,
        "REQUEST": 3,
        "RESPONSE": 4,
        "ERROR": 5,
        "STREAM_OPEN": 6,
        "STREAM_ITEM": 7,
        "BLOCKED": 8,
        "CREDIT": 9,
        "STREAM_END": 10,
        "CANCEL": 11,
        "NOTIFY": 12,
        "PING": 13,
        "PONG": 14,
        "GOAWAY": 15,
        "PROOF": 16,
    }
    assert FIXED_BYTES == 18


def test_the_table_of_kinds_in_the_docstring_is_complete() -> None:
    named = set(re.findall(r"^([A-Z_]+)(?:, ([A-Z_]+))?  ", messages.__doc__ or "", re.MULTILINE))
    assert {name for names in named for name in names if name} == {kind.name for kind in FrameKind}
    assert set(HEADERS) == set(FrameKind)


def test_an_oversized_frame_is_refused_by_its_first_bytes() -> None:
    subject = decoder(frame_bytes_max=1_000)
    with pytest.raises(FrameTooLarge, match="1100 bytes exceeds the limit of 1000") as caught:
        taken(subject, FIXED.pack(1_000, 100, 1, FrameKind.REQUEST, 0))
    assert (caught.value.size, caught.value.limit) == (1_100, 1_000)
    assert subject.held_bytes == 0


def test_an_oversized_header_is_refused_even_in_a_frame_that_would_fit() -> None:
    with pytest.raises(FrameTooLarge, match="a header"):
        taken(decoder(header_bytes_max=100), FIXED.pack(0, 101, 1, FrameKind.REQUEST, 0))


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param((0, 0, 0, 0, 0), id="kind 0"),
        pytest.param((0, 0, 0, 16, 0), id="kind 16"),
        pytest.param((0, 0, 0, 255, 0), id="kind 255"),
        pytest.param((0, 0, 0, FrameKind.PING, 1), id="flags"),
        pytest.param((1, 0, 0, FrameKind.PING, 0), id="a ping with a body"),
        pytest.param((0, 1, 0, FrameKind.PING, 0), id="a ping with a header"),
        pytest.param((5, 10, 0, FrameKind.ERROR, 0), id="an error with a body"),
    ],
)
def test_what_is_no_frame_is_refused_by_its_first_bytes(fixed: tuple[int, ...]) -> None:
    with pytest.raises(MalformedFrame):
        taken(decoder(), FIXED.pack(*fixed))


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\xc1", id="no MessagePack"),
        pytest.param(b"\x93\xa1m\x03", id="cut off"),
        pytest.param(REQUEST + b"\xc0", id="something behind it"),
        pytest.param(msgpack.encode(("m", -1, None)), id="a negative timeout"),
        pytest.param(msgpack.encode(("m", 2**63, None)), id="a timeout beyond all limits"),
        pytest.param(msgpack.encode({"method": "m"}), id="another shape"),
        pytest.param(b"\x93\xa1\xff\x03\xc0", id="no UTF-8"),
        pytest.param(b"\x93\xa1m\x03" + b"\x91" * 50_000 + b"\xc0", id="nested too deeply"),
        pytest.param(b"\x93\xa1m\x03\xdd\xff\xff\xff\xff", id="an array of four billion"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_of_ours(header: bytes) -> None:
    with pytest.raises(MalformedFrame, match="REQUEST"):
        taken(decoder(), encode_frame(FrameKind.REQUEST, 1, header))


def test_after_an_error_there_is_nothing_but_the_error() -> None:
    subject = decoder()
    with pytest.raises(MalformedFrame) as first:
        taken(subject, b"\xff" * 100)
    with pytest.raises(MalformedFrame) as second:
        taken(subject, encode_frame(FrameKind.PING, 1, b""))
    assert first.value is second.value


def test_a_large_frame_can_be_received_in_place() -> None:
    subject = decoder()
    body = bytes(range(256)) * 400
    data = encode_frame(FrameKind.REQUEST, 9, REQUEST, body) + encode_frame(FrameKind.PING, 4, b"")
    assert taken(subject, data[:30]) == []
    received = 30
    while (target := subject.target()) is not None and len(target):
        count = min(len(target), 5_000)
        target[:count] = data[received : received + count]
        subject.filled(count)
        received += count
        if received < len(data) - FIXED_BYTES:
            assert subject.next_frame() is None
    frame = subject.next_frame()
    assert frame is not None
    assert isinstance(frame.body, memoryview)
    assert frame.body.readonly
    assert frame.body == body
    assert subject.target() is None
    (ping,) = taken(subject, data[received:])
    assert ping.call == 4


def test_room_is_asked_for_before_it_is_taken() -> None:
    asked = []

    def admit(kind: int, call: int, size: int) -> bool:
        asked.append((kind, call, size))
        return False

    subject = decoder(admit=admit)
    data = encode_frame(FrameKind.REQUEST, 3, REQUEST, bytes(100_000))
    subject.feed(data[:20])
    skipped = subject.next_frame()
    assert asked == [(FrameKind.REQUEST, 3, 100_000 + len(REQUEST))]
    assert skipped is not None
    assert (skipped.skipped, skipped.call, skipped.size) == (True, 3, 100_000 + len(REQUEST))
    for start in range(20, len(data), 1_000):
        assert taken(subject, data[start : start + 1_000]) == []
        assert subject.held_bytes == 0
        assert subject.target() is None
    assert [frame.call for frame in taken(subject, encode_frame(FrameKind.PING, 4, b""))] == [4]


def test_small_frames_are_not_asked_about() -> None:
    subject = decoder(admit=lambda kind, call, size: False)
    data = encode_frame(FrameKind.REQUEST, 3, REQUEST, bytes(LARGE_BYTES - len(REQUEST)))
    assert taken(subject, data[:-1]) == []
    assert [frame.skipped for frame in taken(subject, data[-1:])] == [False]


def test_a_frame_knows_what_it_holds() -> None:
    subject = decoder()
    assert not subject.is_amid_frame
    subject.feed(encode_frame(FrameKind.PING, 1, b"")[:5])
    assert subject.is_amid_frame
    assert subject.held_bytes == 5


def test_only_some_kinds_have_bodies() -> None:
    for kind in FrameKind:
        header = {FrameKind.HELLO: msgpack.encode(1), FrameKind.WELCOME: msgpack.encode(1)}.get(kind, b"")
        data = encode_frame(kind, 1, header, b"x")
        if kind in WITH_BODY:
            # The header is not there, which is found out only after the body was let in.
            with pytest.raises(MalformedFrame, match=f"header of a {kind.name}"):
                taken(decoder(), data)
        else:
            with pytest.raises(MalformedFrame, match="no frame has"):
                taken(decoder(), data)


def test_later_versions_may_append_to_headers() -> None:
    (frame,) = taken(decoder(), encode_frame(FrameKind.REQUEST, 1, msgpack.encode(("m", 1, None, "new", {"more": 1}))))
    assert frame.header.method == "m"


@pytest.mark.parametrize(
    "wrong",
    [
        {"frame_bytes_max": 0},
        {"header_bytes_max": 2048, "frame_bytes_max": 1024},
        {"frame_bytes_max": 100, "header_bytes_max": 10, "call_bytes_max": 99},
        {"frame_bytes_max": 2**32, "call_bytes_max": 2**33},
        {"send_low_bytes": 2, "send_high_bytes": 1},
        {"ping_ms": -1},
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        WireOptions(**wrong)


def test_a_response_is_left_for_its_caller_to_read() -> None:
    (frame,) = taken(decoder(), encode_frame(FrameKind.RESPONSE, 1, msgpack.encode({"a": 1})))
    assert isinstance(frame.header, Raw)
    with pytest.raises(CutwaterError):
        taken(decoder(), encode_frame(FrameKind.RESPONSE, 1, b"\xc1"))
