"""One process of a job with everything that it starts: its keeper, three pipes, and its end.

1. The keeper is waited for only when no other process is left. Until then the system does not give its number, which is
   that of a session, to another process.
2. ``ended`` returns only when no process is left, and everything that they wrote was passed on.
3. No pipe takes more memory than its bound: what is sent and not read, and the beginning of a line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, to_builtins

from cutwater.agent.processes import keeper
from cutwater.agent.processes.watchdog import VARIABLE, kill_members
from cutwater.errors import Unavailable
from cutwater.jobs.child import how_it_ended
from cutwater.runtime.threads import to_the_end

_log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
LINE_BYTES_MAX = 2 * 1024 * 1024
SENT_BYTES_MAX = 1024 * 1024
KILL_SECONDS = 5.0
"""How long one try to kill all processes takes before it is logged that some are left."""


class ProcessPlace(Struct, frozen=True, omit_defaults=True):
    """Where a process runs: see ``keeper``. ``directory`` is its working directory. Without ``uid``, it runs as the
    user of the agent."""

    directory: str
    cgroup: str = ""
    processors: tuple[int, ...] = ()
    nice: int = 0
    uid: int | None = None
    gid: int = 0
    groups: tuple[int, ...] = ()

    @property
    def group_root(self) -> str:
        """The group of which ``cgroup`` is a part; ``members`` looks below it."""
        return os.path.dirname(self.cgroup) if self.cgroup else ""


class JobProcess:
    """See the module. ``on_line`` gets the lines that the process writes to its events, ``on_output`` what it prints.
    Both are called on the event loop."""

    def __init__(
        self, mark: str, place: ProcessPlace, on_line: Callable[[bytes], None], on_output: Callable[[bytes], None]
    ) -> None:
        self._mark, self._place = mark, place
        self._on_line, self._on_output = on_line, on_output
        self._process: subprocess.Popen[bytes] | None = None
        self._input: asyncio.WriteTransport | None = None
        self._readers: dict[int, Callable[[bytes], None]] = {}
        self._rest = b""
        self._is_over = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._pidfd = -1
        self.killed_because = ""
        """Why the agent killed it; empty if it did not."""

    @property
    def pid(self) -> int:
        """The number of its keeper, and of the keeper's session; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``command``, with the number of the descriptor for its events as last argument."""
        events, writes = os.pipe()
        output, prints = os.pipe()
        place = json.dumps({name: value for name, value in to_builtins(self._place).items() if value is not None})
        whole = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), place, *command, str(writes)]

        def spawn() -> None:
            self._process = subprocess.Popen(
                whole,
                stdin=subprocess.PIPE,
                stdout=prints,
                stderr=prints,
                pass_fds=(writes,),
                start_new_session=True,
                cwd="/",
                env={**environment, VARIABLE: self._mark},
            )

        try:
            try:
                await to_the_end(asyncio.to_thread(spawn))
            finally:
                os.close(writes)
                os.close(prints)
            await self._connect(events, output)
        except BaseException as error:
            for descriptor in (events, output):
                self._forget(descriptor) if descriptor in self._readers else os.close(descriptor)
            await to_the_end(self._undo())
            if isinstance(error, OSError):
                raise Unavailable(f"{command[0]} cannot be started: {error.strerror or error}") from error
            raise

    async def _connect(self, events: int, output: int) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        loop = asyncio.get_running_loop()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._keeper_ended)
        self._readers = {events: self._take_events, output: self._on_output}
        for descriptor in self._readers:
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, self._read, descriptor)

    async def _undo(self) -> None:
        """End a process that was started, and of which the caller will never know."""
        process, self.killed_because = self._process, "its start was given up"
        if process is None:
            return
        await self._kill()
        self.close_input()
        if self._pidfd >= 0:
            self._keeper_ended()
        await asyncio.to_thread(process.wait)

    def send(self, data: bytes) -> None:
        """Send a line. One that does not read what it is sent is killed."""
        if self._input is None or self._input.is_closing():
            return
        if self._input.get_write_buffer_size() + len(data) > SENT_BYTES_MAX:
            self.kill("it did not read what it was told")
            return
        self._input.write(data)

    def close_input(self) -> None:
        """Tell it that nothing more comes; it ends then."""
        if self._input is not None:
            self._input.close()

    def kill(self, because: str = "") -> None:
        """Kill all processes, until none is left."""
        self.killed_because = self.killed_because or because
        if self._killing is None and self._process is not None:
            self._killing = asyncio.create_task(self._kill())

    async def ended(self) -> str:
        """Wait until no process is left, and return in words how the command ended."""
        await self._is_over.wait()
        process = self._process
        assert process is not None
        # The keeper has ended what was left, unless it was killed itself.
        self.kill()
        assert self._killing is not None
        await self._killing
        self._close()
        code = process.wait()
        how = how_it_ended(code)
        return f"{how}: {self.killed_because}" if self.killed_because else how

    # What is written and read.

    def _read(self, descriptor: int) -> bool:
        """Read once. Returns whether there may be more now."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._forget(descriptor)
            return False
        self._readers[descriptor](data)
        return descriptor in self._readers

    def _take_events(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            self._rest = b""
            self.kill(f"it wrote a line of more than {LINE_BYTES_MAX} bytes to the agent")
        for line in lines:
            self._on_line(line)

    def _forget(self, descriptor: int) -> None:
        if self._readers.pop(descriptor, None) is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    # The end.

    def _keeper_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._is_over.set()

    async def _kill(self) -> None:
        process = self._process
        assert process is not None
        groups = [root] if (root := self._place.group_root) else []
        kill = partial(kill_members, self._mark, [process.pid], groups, seconds=KILL_SECONDS)
        while left := await asyncio.to_thread(kill):
            _log.error("processes of a job do not end: %s (mark %s)", sorted(left), self._mark)

    def _close(self) -> None:
        """Pass on what is left in the pipes, which nothing writes to any more, and close them."""
        self.close_input()
        for descriptor in list(self._readers):
            while descriptor in self._readers and self._read(descriptor):
                pass
            self._forget(descriptor)
