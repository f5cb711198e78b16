"""The codec on any bytes: what was encoded comes out whatever the pieces it comes in, and for everything else the
outcome is an error of ours or a wish for more bytes, within bounded memory.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw, msgpack

from cutwater.errors import CutwaterError
from cutwater.protocol.errors import WireError
from cutwater.wire.codec import FrameDecoder, encode_frame
from cutwater.wire.messages import (
    FIXED_BYTES,
    HEADERS,
    WITH_BODY,
    BlockedHeader,
    CreditHeader,
    FrameKind,
    GoAway,
    Hello,
    ItemHeader,
    NotifyHeader,
    OpenHeader,
    PeerLimits,
    Proof,
    RequestHeader,
    Welcome,
    WireFrame,
)

FRAME_BYTES_MAX = 200_000
HEADER_BYTES_MAX = 20_000

counts = st.integers(0, 2**62)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
raws = values.map(lambda value: Raw(msgpack.encode(value)))
texts = st.text(max_size=30)
secrets = st.binary(max_size=80)
wire_errors = st.builds(
    WireError,
    texts,
    texts,
    st.booleans(),
    st.dictionaries(texts, st.integers(0, 100), max_size=3).map(lambda fields: Raw(msgpack.encode(fields))),
    st.lists(texts, max_size=3).map(tuple),
)
limits = st.builds(PeerLimits, counts, counts, counts, counts)
headers: dict[int, st.SearchStrategy[Any]] = {
    FrameKind.HELLO: st.builds(Hello, texts, counts, counts, counts, texts, texts, texts, limits, secrets, secrets),
    FrameKind.WELCOME: st.builds(
        Welcome, texts, counts, counts, counts, texts, texts, limits, secrets, secrets, secrets
    ),
    FrameKind.PROOF: st.builds(Proof, secrets),
    FrameKind.REQUEST: st.builds(RequestHeader, texts, counts, raws),
    FrameKind.RESPONSE: raws,
    FrameKind.ERROR: wire_errors,
    FrameKind.STREAM_OPEN: st.builds(OpenHeader, texts, counts, raws, counts, counts),
    FrameKind.STREAM_ITEM: st.builds(ItemHeader, counts, counts, raws),
    FrameKind.BLOCKED: st.builds(BlockedHeader, counts, counts, counts, counts, counts),
    FrameKind.CREDIT: st.builds(CreditHeader, counts, counts),
    FrameKind.NOTIFY: st.builds(NotifyHeader, texts, raws),
    FrameKind.GOAWAY: st.builds(GoAway, st.none() | wire_errors),
}
bodies = st.binary(max_size=200) | st.integers(0, 100_000).map(lambda size: bytes([size % 251]) * size)


@st.composite
def encoded_frames(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(FrameKind))
    header = draw(headers[kind].map(msgpack.encode)) if kind in headers else b""
    return encode_frame(kind, draw(st.integers(0, 2**64 - 1)), header, draw(bodies) if kind in WITH_BODY else b"")


def new_decoder(admit: Any = None) -> FrameDecoder:
    return FrameDecoder(FRAME_BYTES_MAX, HEADER_BYTES_MAX, admit)


def bound(fed: int) -> int:
    """What a decoder may hold after it was fed so many bytes since it was last asked."""
    return FRAME_BYTES_MAX + FIXED_BYTES + fed


def drain(decoder: FrameDecoder) -> list[WireFrame]:
    return list(iter(decoder.next_frame, None))


def encoded_again(frame: WireFrame) -> bytes:
    """The header is encoded anew, so this is equal only if nothing was lost on the way."""
    header = b"" if HEADERS[frame.kind] is None else msgpack.encode(frame.header)
    return encode_frame(frame.kind, frame.call, header, frame.body)


@given(st.lists(encoded_frames(), min_size=1, max_size=8), st.randoms(use_true_random=False), st.booleans())
def test_frames_come_out_whatever_the_pieces(frames: list[bytes], rng: random.Random, in_place: bool) -> None:
    data = b"".join(frames)
    decoder = new_decoder()
    found: list[bytes] = []
    position = 0
    while position < len(data):
        count = rng.choice([1, 3, 17, 18, 19, 100, 5_000, 60_000, len(data)])
        target = decoder.target()
        if in_place and target is not None:
            piece = data[position : position + min(count, len(target))]
            target[: len(piece)] = piece
            decoder.filled(len(piece))
        else:
            piece = data[position : position + count]
            decoder.feed(piece)
        position += len(piece)
        found += [encoded_again(frame) for frame in drain(decoder)]
        assert decoder.held_bytes <= bound(0)
    assert found == frames
    assert not decoder.is_amid_frame
    assert decoder.frames == len(frames)


def feed_all(data: bytes, rng: random.Random, admit: Any = None) -> CutwaterError | None:
    """Feed bytes in random pieces until the end or the first error, which must be one of ours."""
    decoder = new_decoder(admit)
    position = 0
    while position < len(data):
        piece = data[position : position + rng.choice([1, 10, 1_000, len(data)])]
        position += len(piece)
        decoder.feed(piece)
        try:
            for frame in drain(decoder):
                assert frame.size <= FRAME_BYTES_MAX
                assert frame.kind in HEADERS
        except CutwaterError as error:
            assert decoder.held_bytes == 0
            return error
        assert decoder.held_bytes <= bound(0)
    return None


@given(st.binary(max_size=500), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_random_bytes_are_an_error_or_incomplete(data: bytes, rng: random.Random) -> None:
    feed_all(data, rng)


@given(
    st.lists(encoded_frames(), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 10**9), st.sampled_from("flip set insert delete copy".split())), min_size=1, max_size=8
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=300)
def test_damaged_frames_are_frames_or_an_error(
    frames: list[bytes], damages: list[tuple[int, str]], rng: random.Random, refuse: bool
) -> None:
    data = bytearray(b"".join(frames))
    for place, how in damages:
        at = place % max(len(data), 1)
        if how == "flip" and data:
            data[at] ^= 1 << rng.randrange(8)
        elif how == "set" and data:
            data[at] = rng.randrange(256)
        elif how == "insert":
            data[at:at] = rng.randbytes(rng.randrange(20))
        elif how == "delete":
            del data[at : at + rng.randrange(20)]
        else:
            data[at:at] = data[at : at + rng.randrange(200)]
    feed_all(bytes(data), rng, (lambda kind, call, size: False) if refuse else None)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_fuzz_of_headers(seed: int) -> None:
    """Valid outer frames around hostile headers, which random damage seldom makes."""
    rng = random.Random(seed)
    openers = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 3_000,
    ]
    openers += [msgpack.encode(value) for value in ("x", -1, 2**63, 1.5, None, [1, 2, 3], {"a": 1}, b"x")]
    openers += [bytes([code]) for code in range(256)]
    for _ in range(5_000):
        header = b"".join(rng.choice(openers) for _ in range(rng.randrange(6)))
        if rng.random() < 0.5:
            header = bytes([0x90 + rng.randrange(8)]) + header
        feed_all(encode_frame(rng.choice(list(FrameKind)), rng.randrange(2**64), header[:HEADER_BYTES_MAX]), rng)


def test_nothing_on_the_wire_is_ever_unpickled() -> None:
    """Headers decode into the types of the table and plain values, and into nothing that the bytes name."""
    import pickle

    class Trap:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit('unpickled')",)

    payload = pickle.dumps(Trap())
    for header in (payload, msgpack.encode(payload), msgpack.encode(msgspec.msgpack.Ext(1, payload))):
        for kind in FrameKind:
            feed_all(encode_frame(kind, 1, header), random.Random(0))
