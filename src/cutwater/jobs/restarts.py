"""Defines restart strategies: whether a failed job is started again, and after how long.

A strategy is a value, and ``parse`` reads it from what a user writes. ``Restarts`` is the state machine that follows
one: its input is the time of a failure, and its output is how long to wait, or None to give up. Time and randomness are
arguments.

==========================================================  ===========================================================
``none``                                                    the first failure ends the job
``fixed:delay=5s,attempts=3``                               up to ``attempts`` restarts, each after the same delay
``exponential:initial=1s,max=60s,multiplier=2,…``           the delay grows; after ``reset`` without a failure it
                                                            starts again; ``jitter=0.1`` varies it by up to 10 %
``rate:failures=3,per=5m,delay=5s``                         a failure after ``failures`` others within ``per`` ends
                                                            the job
==========================================================  ===========================================================
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Struct

from cutwater import errors
from cutwater.durations import milliseconds, shown


class NoRestart(Struct, frozen=True, tag_field="strategy", tag="none"):
    pass


class FixedDelay(Struct, frozen=True, tag_field="strategy", tag="fixed"):
    delay_ms: int = 5_000
    attempts: int = 3


class ExponentialDelay(Struct, frozen=True, tag_field="strategy", tag="exponential"):
    initial_ms: int = 1_000
    max_ms: int = 60_000
    multiplier: float = 2.0
    jitter: float = 0.1
    reset_ms: int = 600_000


class FailureRate(Struct, frozen=True, tag_field="strategy", tag="rate"):
    failures: int = 3
    per_ms: int = 300_000
    delay_ms: int = 5_000


Strategy: TypeAlias = NoRestart | FixedDelay | ExponentialDelay | FailureRate
DEFAULT: Final = ExponentialDelay()

_KINDS: Final[dict[str, type[Strategy]]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Strategy)}
_LEAST: Final = {"attempts": 1, "failures": 1, "multiplier": 1.0, "jitter": 0.0}
_MOST: Final = {"jitter": 0.5}
_DURATION: Final = "_ms"


def parse(text: str) -> Strategy:
    """Parse a strategy as users write it. Missing settings have their defaults."""
    name, _, rest = text.strip().partition(":")
    kind = _KINDS.get(name)
    if kind is None:
        known = ", ".join(written(kind()) for kind in _KINDS.values())
        raise errors.InvalidArgument(f"{text!r} is no restart strategy: write {known}")
    fields = {field.name.removesuffix(_DURATION): field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        given, _, value = part.strip().partition("=")
        field = fields.get(given)
        if field is None:
            raise errors.InvalidArgument(
                f"{text!r}: the strategy {name!r} has no {given!r}; it has {', '.join(fields) or 'nothing to set'}, as "
                f"in {written(kind())}"
            )
        if field.name in values:
            raise errors.InvalidArgument(f"{text!r} says {given!r} twice")
        values[field.name] = _value(text, given, field.type, value, is_duration=field.name.endswith(_DURATION))
    strategy = kind(**values)
    if isinstance(strategy, ExponentialDelay) and strategy.initial_ms > strategy.max_ms:
        raise errors.InvalidArgument(
            f"{text!r}: the first delay is longer than the longest: let initial be at most max"
        )
    return strategy


def _value(text: str, name: str, kind: Any, value: str, *, is_duration: bool) -> int | float:
    if is_duration:
        return milliseconds(value.strip(), f"{name} in {text!r}")
    least, most = _LEAST[name], _MOST.get(name)
    try:
        number: int | float = int(value) if kind is int else float(value)
    except ValueError:
        number = float("nan")
    if not (number >= least and (most is None or number <= most)):
        wanted = f"a {'whole number' if kind is int else 'number'} from {least}{f' to {most}' if most else ' on'}"
        raise errors.InvalidArgument(f"{text!r}: {name} is {value!r}, and must be {wanted}")
    return number


def written(strategy: Strategy) -> str:
    """Return the strategy as ``parse`` reads it."""
    name = strategy.__struct_config__.tag
    parts = [
        f"{field.removesuffix(_DURATION)}={shown(value) if field.endswith(_DURATION) else f'{value:g}'}"
        for field, value in msgspec.structs.asdict(strategy).items()
    ]
    return f"{name}:{','.join(parts)}" if parts else f"{name}"


class Restarts:
    """Follows a strategy through the life of a job. Times are milliseconds of any monotonic clock."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.count = 0
        """The number of restarts so far."""
        self._delay_ms = 0.0
        self._restarted_at = 0
        self._failures: deque[int] = deque()

    def failed(self, now_ms: int, chance: float) -> int | None:
        """Return how long to wait before the next start, or None to give up. ``chance`` is random, from -1 to 1."""
        wait = self._wait(now_ms, chance)
        if wait is not None:
            self.count += 1
            self._restarted_at = now_ms + wait
        return wait

    def _wait(self, now_ms: int, chance: float) -> int | None:
        match self.strategy:
            case FixedDelay(delay_ms, attempts):
                return delay_ms if self.count < attempts else None
            case FailureRate(failures, per_ms, delay_ms):
                while self._failures and self._failures[0] <= now_ms - per_ms:
                    self._failures.popleft()
                if len(self._failures) >= failures:
                    return None
                self._failures.append(now_ms)
                return delay_ms
            case ExponentialDelay() as strategy:
                is_anew = self.count == 0 or now_ms - self._restarted_at >= strategy.reset_ms
                grown = strategy.initial_ms if is_anew else self._delay_ms * strategy.multiplier
                self._delay_ms = min(grown, strategy.max_ms)
                return round(self._delay_ms * (1 + strategy.jitter * chance))
        return None


_HOPELESS: Final = (
    errors.InvalidArgument,
    errors.NotFound,
    errors.AlreadyExists,
    errors.Refused,
    errors.Fenced,
    errors.Trimmed,
    errors.Malformed,
    errors.SavepointDamaged,
    errors.CheckpointDamaged,
)
_CURABLE: Final = (errors.StagedExpired,)


def is_hopeless(error: BaseException) -> bool:
    """Report whether the same program with the same arguments would fail again: the arguments are wrong, or another run
    has taken over. Any other failure is worth another start."""
    if isinstance(error, errors.CutwaterError):
        return isinstance(error, _HOPELESS) and not error.retriable and not isinstance(error, _CURABLE)
    return isinstance(error, ImportError | SyntaxError)
