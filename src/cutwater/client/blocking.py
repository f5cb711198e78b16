"""Derives a blocking class from its asynchronous one: one line per method, with the same signature and docstring.

::

    class Client(Blocking[AsyncClient]):
        append = blocking(AsyncClient.append)

The type checker sees ``append`` with the parameters of ``AsyncClient.append`` and with the result that awaiting it
gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from cutwater.client.loop_thread import LoopThread, NotThisWay, Visit
from cutwater.runtime.deadlines import check_timeout

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")
W = TypeVar("W")
Self = TypeVar("Self")


class Blocking(Generic[A]):
    """An asynchronous object, and the loop that it runs on."""

    def __init__(self, loop: LoopThread, wrapped: A) -> None:
        self._loop = loop
        self._async = wrapped

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing; subclasses with something to close override this."""


class BindableMethod(Protocol[P, R_co]):
    """A method as stored in a class: a function that binds its object."""

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R_co]: ...


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
    quick: Callable[..., Visit[R] | None] | None = None,
) -> BindableMethod[P, R]:
    """Make a blocking method from a coroutine method. ``quick`` takes the same arguments and may be called from any
    thread. It does the same as the method in a cheaper way, or returns None."""

    @functools.wraps(method)
    def call(self: Blocking[Any], /, *args: Any, **kwargs: Any) -> R:
        try:
            visit = None if quick is None else quick(self._async, *args, **kwargs)
        except TypeError:
            _check_fit(self, method, args, kwargs)
            raise
        if visit is not None:
            try:
                return self._loop.visit(visit)
            except NotThisWay:
                pass
        return _waited_for(self, method, args, kwargs)

    return cast("BindableMethod[P, R]", call)


def blocking_made(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]], wrap: Callable[[LoopThread, A], W]
) -> BindableMethod[P, W]:
    """Make a blocking method from a coroutine method that makes an object, and wrap that object too."""

    @functools.wraps(method)
    def call(self: Blocking[Any], /, *args: Any, **kwargs: Any) -> W:
        return wrap(self._loop, _waited_for(self, method, args, kwargs))

    return cast("BindableMethod[P, W]", call)


def made(method: Callable[Concatenate[Any, P], A], wrap: Callable[[LoopThread, A], W]) -> BindableMethod[P, W]:
    """Make a blocking method from a plain method that makes an object on the loop's own thread."""

    @functools.wraps(method)
    def call(self: Blocking[Any], /, *args: Any, **kwargs: Any) -> W:
        async def make() -> A:
            return method(self._async, *args, **kwargs)

        try:
            return wrap(self._loop, self._loop.run(make()))
        except TypeError:
            _check_fit(self, method, args, kwargs)
            raise

    return cast("BindableMethod[P, W]", call)


def _waited_for(
    self: Blocking[Any], method: Callable[..., Coroutine[Any, Any, R]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> R:
    seconds = kwargs.get("timeout")
    if seconds is not None:
        check_timeout(seconds)
    try:
        # Calling a coroutine function runs none of it, so this fails only if the arguments do not fit.
        work = method(self._async, *args, **kwargs)
    except TypeError:
        _check_fit(self, method, args, kwargs)
        raise
    return self._loop.run(work, seconds)


def _check_fit(
    self: Blocking[Any], method: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ``TypeError`` in the name of the called method if the arguments do not fit: a user of this class does not
    know the class behind it."""
    try:
        inspect.signature(method).bind(self, *args, **kwargs)
    except TypeError as misfit:
        raise TypeError(f"{type(self).__name__}.{method.__name__}() {misfit}") from None
