"""The event loop that Cutwater runs on: uvloop where it is installed."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import threading
from collections.abc import Coroutine
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")

RECEIVE_BYTES = 64 * 1024
KEPT_BYTES = 128 * 1024 * 1024
"""Free memory that a server does not return to the operating system."""
HEAP_STEP_BYTES = 16 * 1024 * 1024
MAPPED_BYTES_MIN = 32 * 1024 * 1024
"""Larger blocks are mapped separately and returned to the operating system at once. glibc allows no larger limit."""
STANDARD_ERROR = 2
DESCRIPTORS_MAX = 65_536
_MALLOPT_SETTINGS = ((-1, KEPT_BYTES), (-2, HEAP_STEP_BYTES), (-3, MAPPED_BYTES_MIN))
"""``M_TRIM_THRESHOLD``, ``M_TOP_PAD`` and ``M_MMAP_THRESHOLD`` of glibc's ``malloc.h``."""


class _Received(threading.local):
    def __init__(self) -> None:
        self.view = memoryview(bytearray(RECEIVE_BYTES))


_received = _Received()


def receive_buffer() -> memoryview:
    """Return the buffer that all transports of this thread's event loop receive into.

    The receiver must empty it at once.
    """
    return _received.view


def occupy_standard_descriptors() -> None:
    """Open the null device in place of closed standard input, output or error, if it exists.

    Otherwise the next file or socket would get the closed descriptor. Printed text would go there, and libuv ends the
    process when it is closed.
    """
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)


def allow_descriptors() -> None:
    """Raise the limit of file descriptors as far as the system allows. For a server process.

    The soft limit is usually 1,024, for programs that call ``select``. Connections and files of replicas share the
    descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else DESCRIPTORS_MAX
    wanted = min(wanted, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def new_event_loop() -> asyncio.AbstractEventLoop:
    occupy_standard_descriptors()
    if find_spec("uvloop") is None:  # uvloop does not exist for Windows.
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, on this event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def settle_in() -> None:
    """Prepare memory for a server that has just started.

    Objects that exist now will stay, so the garbage collector need not scan them again and again while requests wait.
    Memory that large messages were received into is reused, because getting it from the operating system again costs
    more than filling it.
    """
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _MALLOPT_SETTINGS:
            mallopt(setting, value)
