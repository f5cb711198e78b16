"""What an error means for an append decides whether it may be sent again, so every class is looked at here."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from concurrent.futures import Future

import pytest

from cutwater import errors
from cutwater.client import errors as client_errors
from cutwater.client.append.sender import is_definite, may_go_elsewhere
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument
from cutwater.protocol import errors as wire_errors
from cutwater.protocol.errors import ConnectionLost
from cutwater.runtime.daemon_executor import DaemonExecutor
from cutwater.runtime.deadlines import Deadline

UNKNOWN = {
    # It may have been taken before this was said, or nobody can tell.
    "AppendUnknown", "DeadlineExceeded", "InternalError", "CutwaterError", "ConnectionLost",
    # Alarms: something is wrong with whoever says so.
    "ProtocolViolation", "InvalidTransition", "ImpossibleReport", "ContradictoryCommand", "OrderLayerLostMemory",
    "MalformedFrame",
    # Never said about an append; so whatever they might mean, it is not certain.
    "AlreadyExists", "Damaged", "Malformed", "NoRecordHere", "NotYetCommitted", "Trimmed", "PipelineFailed",
    "NotLeader", "CannotListen", "Fenced", "LeaderFenced", "ProducerFenced", "RunFenced", "SavepointDamaged",
    "CheckpointDamaged", "NotAnswered",
}  # fmt: skip
ELSEWHERE = {
    "ConnectionLost", "DeadlineExceeded", "NotFound", "NotLeader", "QuotaExceeded", "ReadOnly", "ResourceExhausted",
    "StreamSealed", "Unavailable", "WrongEpoch", "CannotListen", "Refused", "NotAnswered",
}  # fmt: skip

CLASSES = [
    cls
    for module in (errors, wire_errors, client_errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, CutwaterError) and cls.__module__ == module.__name__
]


def made(cls: type[CutwaterError]) -> CutwaterError:
    """An error of the class, without what its constructor wants to know."""
    error = cls.__new__(cls)
    error.message, error.history = "", ()
    return error


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_an_error_means_for_an_append(cls: type[CutwaterError]) -> None:
    error = made(cls)
    if isinstance(error, ConnectionLost):
        error.outcome_unknown = True
    assert is_definite(error) == (cls.__name__ not in UNKNOWN)
    assert may_go_elsewhere(error) == (cls.__name__ in ELSEWHERE)


def test_a_request_that_never_left_is_certain_to_have_failed() -> None:
    assert is_definite(ConnectionLost("refused", outcome_unknown=False))
    assert not is_definite(ConnectionLost("lost", outcome_unknown=True))


def test_errors_of_the_client_have_stable_codes() -> None:
    own = [cls for cls in CLASSES if cls.__module__ == client_errors.__name__]
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    for cls in own:
        assert cls.code == re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        line = rf"{cls.__name__} +{cls.code} "
        assert re.search(line, client_errors.__doc__ or ""), "it is missing in the tree"


def test_a_deadline_says_what_is_left() -> None:
    async def test() -> None:
        deadline = Deadline(0.02)
        assert 0 < deadline.left <= 0.02
        assert 1 <= deadline.left_ms() <= 20
        assert deadline.left_ms(at_most=5) <= 5
        deadline.check("nothing")
        await deadline.pause(10)
        assert deadline.is_over
        assert deadline.left_ms() == 1
        with pytest.raises(DeadlineExceeded, match=r"it is late, after 0\.02 s"):
            deadline.check("it is late")
        for wrong in (0, -1, float("nan"), float("inf")):
            with pytest.raises(InvalidArgument):
                Deadline(wrong)

    asyncio.run(test())


def test_the_executor_works_in_parallel_and_ends() -> None:
    executor = DaemonExecutor(3, "test")
    barrier = threading.Barrier(3, timeout=20)
    futures: list[Future[int]] = [executor.submit(barrier.wait) for _ in range(3)]
    assert sorted(future.result(20) for future in futures) == [0, 1, 2]
    assert executor.submit(lambda: threading.current_thread().daemon).result(20)
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(20)
    executor.shutdown()
    assert not any(thread.name.startswith("test") for thread in threading.enumerate())
    with pytest.raises(RuntimeError):
        executor.submit(barrier.wait)
