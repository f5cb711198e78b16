"""An asyncio event loop with a virtual clock, shared by simulated processes.

When nothing is ready, the clock jumps to the next timer, so hours of timeouts pass in milliseconds. Every callback
belongs to the process in whose context it was scheduled. A killed process runs no callback any more, not even a
``finally`` block; a paused one runs them when it continues.

Jobs of executors and steps of workers run in this thread too, as a whole, after a random delay. What they pass to
``call_soon_threadsafe``, and their result, arrives when the time is over that their disk charged.

The order of callbacks depends on the seed alone: not on hashes of texts, addresses of objects or real time. The garbage
collector is off during a run, because it would close abandoned coroutines at moments that depend on the past of the
Python process.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from cutwater.errors import ProtocolViolation
from cutwater.testing.disk_faults import ProcessDied
from cutwater.testing.virtual.processes import SimProcess, current_process, process_variable
from cutwater.testing.virtual.trace import Trace

if TYPE_CHECKING:
    from cutwater.testing.virtual.network import SimNetwork

T = TypeVar("T")
Callback = Callable[..., object]

JOB_SECONDS_MAX = 0.001
"""A job of an executor begins and reports within this time each, unless its process is slow."""
TIMER_SLACK_SECONDS = 1e-9
"""A timer fires this much early, as rounding makes it."""
TIMER_SECONDS_MIN = 1e-6
"""A timer takes at least this long: no real clock stands still between two calls."""
CALLBACKS_AT_ONCE_MAX = 200_000
"""More callbacks than this at one moment are a loop without end."""
SWEEP_TIMERS_MIN = 500


class Stuck(Exception):
    """The simulation cannot go on: nothing is ready and no timer is set, or one moment never ends."""


class SimHandle:
    """A callback that waits for its turn. Stands in for ``asyncio.TimerHandle``."""

    __slots__ = ("_loop", "args", "callback", "context", "due", "process")

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callback,
        args: tuple[Any, ...],
        context: contextvars.Context,
        process: SimProcess | None,
        due: float = 0.0,
    ) -> None:
        self._loop = loop
        self.callback: Callback | None = callback
        self.args = args
        self.context = context
        self.process = process
        self.due = due
        """The time of a timer by the clock of its process; 0 for a callback that runs soon."""

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self.args = ()
            if self.due:
                self._loop.timer_cancelled()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.due


class SimTask(asyncio.Task[T]):
    """A task whose place in a set does not depend on its address."""

    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.AbstractEventLoop):
    def __init__(self, random: Random, trace: Trace) -> None:
        self.random = random
        self.trace = trace
        self.network: SimNetwork
        self.now = 0.0
        """The true time, which no process sees."""
        self.callbacks = 0
        """Number of callbacks so far."""
        self.complaints: list[str] = []
        self.alarms: list[ProtocolViolation] = []
        """What servers logged that no part of a sound cluster does."""
        """Errors in callbacks, and errors of tasks that nothing awaits."""
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timers_set = 0
        self._timers_cancelled = 0
        self._tasks = 0
        self._held: list[SimHandle] | None = None
        """What a job or step has passed to ``call_soon_threadsafe``; None outside of one."""
        self._is_closed = False

    # Running.

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        """Run a coroutine to its end, outside of all processes."""
        main = self.create_task(future)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        try:
            self._run(main)
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return main.result()

    def _run(self, main: asyncio.Future[Any]) -> None:
        ready, timers, call, at_once = self._ready, self._timers, self._call, 0
        while not main.done():
            if ready:
                handle = ready.popleft()
                at_once += 1
                if at_once > CALLBACKS_AT_ONCE_MAX:
                    raise Stuck(f"{at_once} callbacks at {self.now:.6f}, the last is {handle.callback} {handle.args}")
                call(handle)
                continue
            if not timers:
                raise Stuck(f"nothing is ready and no timer is set at {self.now:.6f}")
            when, _, handle = heapq.heappop(timers)
            if handle.callback is None:
                self._timers_cancelled -= 1
                continue
            if when > self.now:
                self.now = when
                at_once = 0
            process = handle.process
            if process is not None and process.time(self.now) < handle.due - TIMER_SLACK_SECONDS:
                # The clock of the process has slowed down since the timer was set.
                self._set_timer(handle)
            else:
                call(handle)

    def _call(self, handle: SimHandle) -> None:
        callback, process = handle.callback, handle.process
        if callback is None:
            return
        if process is not None and not process.is_running:
            process.keep(handle)
            return
        self.callbacks += 1
        try:
            handle.context.run(callback, *handle.args)
        except ProcessDied:
            pass
        except Exception as error:
            self.call_exception_handler({"message": f"error in {callback}", "exception": error})
        if process is not None:
            disk = process.disk
            if disk is not None and disk.charged_seconds:
                # The event loop itself waited for the disk.
                process.pause()
                self.call_as_later(None, process.take_charge(), process.resume, self)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.call_soon(self.create_task, generator.aclose())

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error, process = context.get("exception"), current_process()
        if self._is_closed or (process is not None and process.is_dead):
            return
        where = "" if process is None else f"{process.name}: "
        self.complaints.append(f"{where}{context['message']}: {error!r}{place_of(error)}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    # Callbacks and timers.

    def time(self) -> float:
        """The monotonic clock of the current process."""
        process = process_variable.get()
        return self.now if process is None else process.time(self.now)

    def call_soon(  # type: ignore[override]
        self, callback: Callback, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        """Returns a ``SimHandle``, which serves as an ``asyncio.Handle``."""
        if context is None:
            context = contextvars.copy_context()
        handle = SimHandle(self, callback, args, context, context.get(process_variable))
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callback, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        handle = self.call_soon(callback, *args, context=context)
        if self._held is not None:
            self._ready.pop()
            self._held.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callback, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callback, *args: Any, context: contextvars.Context | None = None) -> Any:  # type: ignore[override]
        if context is None:
            context = contextvars.copy_context()
        handle = SimHandle(self, callback, args, context, context.get(process_variable), when)
        self._set_timer(handle)
        return handle

    def _set_timer(self, handle: SimHandle) -> None:
        process, when = handle.process, handle.due
        if process is not None:
            when = process.true_time(when)
        soonest = self.now + TIMER_SECONDS_MIN
        self._timers_set += 1
        heapq.heappush(self._timers, (when if when > soonest else soonest, self._timers_set, handle))

    def requeue(self, handles: list[SimHandle]) -> None:
        """Run callbacks of a process that continues."""
        self._ready.extend(handles)

    def timer_cancelled(self) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > SWEEP_TIMERS_MIN and self._timers_cancelled * 2 > len(self._timers):
            self._timers[:] = [timer for timer in self._timers if timer[2].callback is not None]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def call_as(self, process: SimProcess | None, callback: Callback, *args: Any) -> Any:
        """Call something in a process; None is the world outside."""
        handle = SimHandle(self, callback, args, context_of(process), process)
        self._ready.append(handle)
        return handle

    def call_as_later(self, process: SimProcess | None, delay: float, callback: Callback, *args: Any) -> Any:
        """Call something in a process after a true delay."""
        when = self.now + delay
        if process is not None:
            when = process.time(when)
        handle = SimHandle(self, callback, args, context_of(process), process, when)
        self._set_timer(handle)
        return handle

    # Tasks and futures.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        process = process_variable.get() if context is None else context.get(process_variable)
        self._tasks += 1
        SimTask.number = self._tasks  # the constructor puts the task into a set
        task: SimTask[T] = SimTask(coro, loop=self, name=name or "task", context=context)
        task.number = self._tasks
        if process is not None:
            process.keep_task(task)
        return task

    def spawn(self, process: SimProcess, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine, and everything that it starts, as a part of ``process``."""
        return self.create_task(work, context=context_of(process))

    # Threads.

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the job in this thread, later."""
        future: asyncio.Future[T] = self.create_future()
        count = getattr(executor, "count", _count_nothing)
        count(1)

        def done(result: Any, error: BaseException | None) -> None:
            count(-1)
            _settle(future, result, error)

        def job() -> None:
            if future.cancelled():
                count(-1)
            else:
                self.in_thread(lambda: func(*args), done)

        self.call_later(self._job_seconds(), job)
        return future

    def in_thread(self, job: Callable[[], T], done: Callable[[Any, BaseException | None], None]) -> float:
        """Run a part of a simulated thread now, and pass its outcome on when its time is over. Returns that time."""
        assert self._held is None, "a simulated thread runs another one"
        held = self._held = []
        process = process_variable.get()
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = job()
        except BaseException as error:
            failure = error
        finally:
            self._held = None

        def report() -> None:
            self._ready.extend(held)
            done(result, failure)

        charged = 0.0 if process is None else process.take_charge()
        return float(self.call_later(self._job_seconds() + charged, report).when())

    def _job_seconds(self) -> float:
        process = process_variable.get()
        slowness = 1.0 if process is None else process.slowness
        return self.random.random() * JOB_SECONDS_MAX * slowness

    # Connections.

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **options: Any
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        transport = await self.network.connect(protocol_factory, host, port)
        return transport, transport.get_protocol()

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], sock: Any, **options: Any
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        protocol = protocol_factory()
        sock.transport.attach(protocol)
        return sock.transport, protocol

    def add_reader(self, fd: Any, callback: Callback, *args: Any) -> None:  # type: ignore[override]
        fd.watch(callback, args)

    def remove_reader(self, fd: Any) -> bool:
        return bool(fd.unwatch())


def new_loop(random: Random, trace: Trace) -> VirtualLoop:
    return VirtualLoop(random, trace)  # type: ignore[abstract]  # the rest is not used


def context_of(process: SimProcess | None) -> contextvars.Context:
    return _OUTSIDE.copy() if process is None else process.context.copy()


_OUTSIDE = contextvars.Context()


def _count_nothing(change: int) -> None:
    """Stands for the executor of a process, which ends with it."""


def _settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def place_of(error: BaseException | None) -> str:
    trace = error.__traceback__ if error is not None else None
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
