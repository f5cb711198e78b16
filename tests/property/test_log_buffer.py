"""What is kept of a log, against a buffer that keeps everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutwater.programs import log_buffer
from cutwater.programs.log_buffer import HOUR_SECONDS, LogBuffer

HEAD, TAIL = 10, 30

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 100)),
        st.tuples(st.just("append"), st.integers(1, 40)),
        st.tuples(st.just("wait"), st.integers(0, 4_000)),
        st.tuples(st.just("fail"), st.integers(1, 40)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_beginning_and_the_end_are_appended_and_nothing_else_than_was_written(
    steps: list[tuple[str, int]],
) -> None:
    log_buffer.PIECE_BYTES_MIN, least = 1, log_buffer.PIECE_BYTES_MIN
    try:
        follow(steps)
    finally:
        log_buffer.PIECE_BYTES_MIN = least


def follow(steps: list[tuple[str, int]]) -> None:
    buffer, written, stored, now = LogBuffer(0.0, head_bytes=HEAD, tail_bytes=TAIL), b"", dict[int, int](), 0.0
    in_flight = None

    def append(most: int) -> bool:
        piece = buffer.next(most, now)
        if piece is None:
            return False
        assert 0 < len(piece.data) <= most
        assert written[piece.offset : piece.end] == piece.data
        assert not any(at in stored for at in range(piece.offset, piece.end)), "bytes are appended once"
        stored.update(zip(range(piece.offset, piece.end), piece.data, strict=True))
        buffer.appended(piece)
        return True

    for what, number in steps:
        if what == "write":
            data = bytes((len(written) + at) % 251 for at in range(number))
            written += data
            buffer.write(data)
        elif what == "append":
            append(number)
        elif what == "wait":
            now += number
        else:
            # Appended without an answer: more may be written before it is appended again.
            in_flight = buffer.next(number, now)
            assert in_flight is None or written[in_flight.offset : in_flight.end] == in_flight.data
        assert buffer.waiting_bytes <= HEAD + TAIL
        tail = sum(1 for at in stored if at >= HEAD)
        assert tail <= TAIL + TAIL * now / HOUR_SECONDS, "an attempt has a share"
    buffer.end()
    buffer.write(b"more")
    while append(7):
        pass
    assert buffer.is_done
    expected = {*range(min(HEAD, len(written))), *range(max(0, len(written) - TAIL), len(written))}
    assert expected <= stored.keys()


def test_pieces_that_were_written_over_while_they_were_appended_count_once() -> None:
    buffer = LogBuffer(0.0, head_bytes=2, tail_bytes=4)
    buffer.write(b"ab")
    piece = buffer.next(10, 0.0)
    assert piece is not None
    buffer.appended(piece)
    buffer.write(b"cdef")
    piece = buffer.next(10, 0.0)
    assert piece is not None
    assert (piece.offset, piece.data) == (2, b"cdef")
    buffer.write(b"ghi")
    buffer.appended(piece)
    buffer.end()
    piece = buffer.next(10, 0.0)
    assert piece is not None
    assert (piece.offset, piece.data) == (6, b"ghi")
