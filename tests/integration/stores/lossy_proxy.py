"""Stands between a client and a server: loses answers, holds requests back, cuts connections."""

from __future__ import annotations

import asyncio


class LossyProxy:
    """``loses_answers``: what the server says is thrown away. ``lets_through``: cleared, what the client says waits."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.connections = 0
        self.answer_bytes_lost = 0
        self.loses_answers = False
        self.lets_through = asyncio.Event()
        self.lets_through.set()

    async def start(self) -> LossyProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        """End all connections; new ones may be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(back)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, back))
                group.create_task(self._answers(there, writer))
            self._writers.discard(back)
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            # The end of a connection, from whichever side, is what this is for.
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self.lets_through.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                if self.loses_answers:
                    self.answer_bytes_lost += len(data)
                    continue
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
