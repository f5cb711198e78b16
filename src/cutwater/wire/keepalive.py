"""Detects a peer that is gone. Pure: called once per interval, it says what to do next.

A silent peer is asked whether it is there. A peer that sends half a message and no more, or sends byte by byte, is
detected by how long the message takes.
"""

from __future__ import annotations

import enum


class KeepaliveVerdict(enum.Enum):
    FINE = "fine"
    ASK = "ask"
    """The peer sent nothing for an interval: ask whether it is there."""
    GONE = "gone"
    """The peer was asked, and sent nothing for another interval."""
    STUCK = "stuck"
    """A message of the peer is incomplete for too long."""


class Keepalive:
    """Judges a peer by what it sent and read since the last call.

    Call ``judge`` every ``interval`` seconds. A call that comes much later means that this process stood still.
    Messages of the peer may wait to be read then, so that call never finds the peer gone or stuck.
    """

    __slots__ = ("_frame_seconds_max", "_frames", "_frames_since", "_interval", "_is_asked", "_judged_at", "_unsent")

    def __init__(self, interval: float, frame_seconds_max: float, now: float) -> None:
        self._interval = interval
        self._frame_seconds_max = frame_seconds_max
        self._judged_at = self._frames_since = now
        self._frames = 0
        self._unsent = 0
        self._is_asked = False

    def judge(self, now: float, *, heard: bool, unsent: int, frames: int, is_amid_frame: bool) -> KeepaliveVerdict:
        """Return what to do next.

        ``heard``: bytes came since the last call. ``unsent``: bytes that wait to be sent; if there are fewer than last
        time, the peer is reading.
        """
        is_late = now - self._judged_at > 1.5 * self._interval
        is_reading = unsent < self._unsent
        self._judged_at, self._unsent = now, unsent
        if is_late or not is_amid_frame or frames != self._frames:
            self._frames, self._frames_since = frames, now
        elif now - self._frames_since > self._frame_seconds_max:
            return KeepaliveVerdict.STUCK
        if heard or is_reading or is_late:
            self._is_asked = False
            return KeepaliveVerdict.FINE
        if self._is_asked:
            return KeepaliveVerdict.GONE
        self._is_asked = True
        return KeepaliveVerdict.ASK
