"""Lets other processes reach the supervisor of a job: one request and one answer, each a line, on a local socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, BaseSelector

import msgspec

from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, Refused, Unavailable
from cutwater.jobs.job_file import Job
from cutwater.jobs.messages import READ_BYTES, Answer, Lines, Request, Told, first_line, line, read_answer, read_request

CONVERSATIONS_MAX = 16
ANSWER_SECONDS = 5.0


class Conversation:
    """A client that sends one request."""

    def __init__(self, connection: socket.socket, forget: Callable[[Conversation], None]) -> None:
        self.connection, self._forget, self.lines = connection, forget, Lines()

    def answer(self, answer: Answer) -> None:
        # The client may be gone.
        with suppress(OSError):
            self.connection.settimeout(ANSWER_SECONDS)
            self.connection.sendall(line(answer))
        self._forget(self)

    def refuse(self, error: CutwaterError) -> None:
        self.answer(Answer(error=Told.of(error)))


class Control:
    """The supervisor's side. ``handle`` is called with each request, and may answer later."""

    def __init__(self, path: Path, selector: BaseSelector, handle: Callable[[Conversation, Request], None]) -> None:
        self.path, self._selector, self._handle = path, selector, handle
        self._conversations: set[Conversation] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            raise InvalidArgument(
                f"no socket can be made at {path}: {error}; set TMPDIR to a directory with a short name"
            ) from error
        self._listener.listen(CONVERSATIONS_MAX)
        self._listener.setblocking(False)
        selector.register(self._listener, EVENT_READ, self._accept)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            if len(self._conversations) >= CONVERSATIONS_MAX:
                connection.close()
                return
            connection.setblocking(False)
            conversation = Conversation(connection, self._forget)
            self._conversations.add(conversation)
            self._selector.register(connection, EVENT_READ, lambda: self._read(conversation))

    def _read(self, conversation: Conversation) -> None:
        try:
            data = conversation.connection.recv(READ_BYTES)
            lines = conversation.lines.add(data)
        except (OSError, ValueError):
            data, lines = b"", []
        if not data:
            self._forget(conversation)
        for one in lines[:1]:
            try:
                request = read_request(one)
            except msgspec.MsgspecError as error:
                conversation.refuse(InvalidArgument(f"not a valid request: {error}; do both have one version?"))
                return
            self._handle(conversation, request)

    def _forget(self, conversation: Conversation) -> None:
        if conversation in self._conversations:
            self._conversations.remove(conversation)
            self._selector.unregister(conversation.connection)
            conversation.connection.close()

    def close(self) -> None:
        for conversation in list(self._conversations):
            conversation.refuse(Unavailable("the job has ended"))
        self._selector.unregister(self._listener)
        self._listener.close()


def ask(job: Job, request: Request, seconds: float) -> Answer:
    """Send a request to the supervisor of a job. Raises the error that it answers with."""
    if not job.is_alive:
        raise Refused(
            f"pipeline {job.pipeline!r} does not run, it is {job.state_now}: `cutwater pipeline run "
            f"{job.file or 'FILE'}` goes on with it, and `cutwater pipeline savepoint` takes a savepoint as it is"
        )
    if not job.control:
        raise Refused(
            f"pipeline {job.pipeline!r} is run by a program of its own, process {job.pid}: stop it there; under "
            "`cutwater pipeline run` it can be stopped, rescaled and saved by commands"
        )
    try:
        answer = read_answer(_exchanged(job.control, line(request), seconds))
    except TimeoutError:
        raise DeadlineExceeded(
            f"pipeline {job.pipeline!r} has not answered within {seconds:g} s: `cutwater pipeline describe` shows what "
            "has become of it; --timeout allows for more"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise Unavailable(f"the supervisor of {job.pipeline!r}, process {job.pid}, does not answer: {error}") from error
    if answer.error is not None:
        raise answer.error.error()
    return answer


def _exchanged(path: str, data: bytes, seconds: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(path)
        connection.sendall(data)
        found = first_line(lambda: connection.recv(READ_BYTES))
    if not found:
        raise ConnectionError("it hung up")
    return found
