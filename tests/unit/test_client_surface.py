"""The blocking client is the asynchronous one with other words: same methods, same parameters, same documentation."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cutwater
from cutwater import errors
from cutwater.client import errors as client_errors
from cutwater.client.async_client import AsyncClient
from cutwater.client.blocking import Blocking
from cutwater.client.client import Client, Cursor, Producer, Stager, Subscription, connect
from cutwater.client.cluster.cursors import AsyncCursor
from cutwater.client.loop_thread import LoopThread
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.publish.part_writer import AsyncStager
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.protocol import errors as wire_errors

PAIRS: list[tuple[type[Any], type[Any], set[str]]] = [
    # Names that only one side has any use for.
    (AsyncClient, Client, {"connect", "open"}),
    (AsyncCursor, Cursor, {"close"}),
    (
        AsyncProducer,
        Producer,
        {"open", "enqueue", "finish", "held_bytes", "is_closed", "prepare", "timeout", "buffer_bytes", "wait_for_room"},
    ),
    (AsyncSubscription, Subscription, {"abandon", "begun"}),
    (AsyncStager, Stager, {"begin"}),
]


def public(cls: type[Any]) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "blocking", "own"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_both_have_the_same_methods(asynchronous: type[Any], blocking: type[Any], own: set[str]) -> None:
    instance_only = {"id", "topic", "cluster", "servers"}
    assert public(asynchronous) - own - instance_only == public(blocking) - own - instance_only
    for name in public(blocking) & public(asynchronous):
        one, other = getattr(asynchronous, name), getattr(blocking, name)
        if not callable(one):
            continue
        assert [*inspect.signature(one).parameters.values()][1:] == [*inspect.signature(other).parameters.values()][1:]
        if name != "close":
            assert (inspect.getdoc(one) or "").split() == (inspect.getdoc(other) or "").split(), name


def test_connect_takes_what_the_asynchronous_one_takes() -> None:
    assert inspect.signature(connect).parameters == inspect.signature(AsyncClient.connect).parameters


def test_opening_takes_what_the_asynchronous_one_takes() -> None:
    assert inspect.signature(cutwater.open).parameters == inspect.signature(AsyncClient.open).parameters


def test_arguments_that_do_not_fit_are_told_of_the_call_that_was_made() -> None:
    loop = LoopThread("test")
    wrapped: Any = SimpleNamespace(_is_closed=True, _timeout=1.0)
    client = object.__new__(Client)
    Blocking.__init__(client, loop, wrapped)
    try:
        for name in ("append", "read", "subscribe", "producer", "cursor", "stager"):
            with pytest.raises(TypeError, match=rf"^Client.{name}\(\) missing a required argument: "):
                getattr(client, name)()
            with pytest.raises(TypeError, match=rf"^Client.{name}\(\) got an unexpected keyword argument 'wrong'"):
                getattr(client, name)(*("x",) * (1 + (name == "append") + 2 * (name == "stager")), wrong=3, id=1)
    finally:
        loop.close()
    for name in ("append", "stage", "stager", "publish", "open_run", "find_runs"):
        with pytest.raises(TypeError, match=rf"^AsyncClient.{name}\(\) got an unexpected keyword argument 'wrong'"):
            getattr(AsyncClient, name)(object(), wrong=3)
    with pytest.raises(TypeError, match=r"^open\(\) got an unexpected keyword argument 'wrong'"):
        cutwater.open("x", wrong=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^connect\(\) got an unexpected keyword argument 'wrong'"):
        cutwater.connect("x", wrong=3)  # type: ignore[call-arg]


def test_a_class_derived_from_the_client_leaves_its_names_alone() -> None:
    class Own(AsyncClient):
        pass

    assert Own.publish.__qualname__ == AsyncClient.publish.__qualname__ == "AsyncClient.publish"


def test_whoever_calls_a_client_is_told_how_one_is_made() -> None:
    for cls, call in (Client, "cutwater"), (AsyncClient, "await cutwater.AsyncClient"):
        for given in (), ("./data",), (Path("data"),):
            with pytest.raises(TypeError, match=rf"is not called: {call}.open\(.*, and {call}.connect\("):
                cls(*given)  # type: ignore[arg-type, call-arg]


def test_every_public_method_says_what_it_does() -> None:
    for cls in (AsyncClient, Client, AsyncProducer, Producer, AsyncCursor, Cursor):
        for name in public(cls):
            value = inspect.getattr_static(cls, name)
            if inspect.isfunction(value) and name not in {"open"}:
                assert inspect.getdoc(getattr(cls, name)), f"{cls.__name__}.{name}"


def test_calls_that_reach_the_cluster_take_a_timeout() -> None:
    for cls in (AsyncClient, AsyncProducer, AsyncCursor):
        for name in public(cls) - {"close", "open", "finish"}:
            method = getattr(cls, name)
            if inspect.iscoroutinefunction(method):
                assert "timeout" in inspect.signature(method).parameters, f"{cls.__name__}.{name}"


def test_public_names_are_there_and_no_others() -> None:
    for name in cutwater.__all__:
        assert getattr(cutwater, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cutwater.nothing


def test_every_error_is_a_public_name() -> None:
    for module in (errors, client_errors, wire_errors):
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, errors.CutwaterError):
                assert getattr(cutwater, name) is cls
                assert name in cutwater.__all__


def test_public_names_are_seen_before_they_are_loaded() -> None:
    program = """
import cutwater, sys
assert {"open", "connect", "errors", "AppendUnknown"} <= set(dir(cutwater))
assert cutwater.errors.AppendUnknown is cutwater.AppendUnknown
assert issubclass(cutwater.ClientClosed, cutwater.Refused)
sys.exit("pyarrow" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
