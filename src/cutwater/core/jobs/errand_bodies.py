"""What the JSON of errands means: questions to agents and their answers, by kind.

=====================  =====================  ========================================================================
kind                   question               answer
=====================  =====================  ========================================================================
``validate``           ``ValidateQuestion``   ``ValidateAnswer``
``savepoint-describe`` ``{}``                 the manifest, as ``cutwater savepoint describe -o json`` prints it
``savepoint-verify``   ``{}``                 ``VerifyAnswer``
``savepoint-diff``     ``{}``                 the difference, as ``cutwater savepoint diff -o json`` prints it
``savepoint-delete``   ``{}``                 ``{"deleted": <id of the savepoint>}``
``state``              ``StateQuestion``      ``StateAnswer``
``log``                ``LogQuestion``        ``LogAnswer``
=====================  =====================  ========================================================================
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

STATE_ROWS = 100
"""How many keys of an operator an agent tells of, unless it is asked for fewer or more."""
LOG_BYTES = 64 * 1024


class ValidateQuestion(Struct, frozen=True, omit_defaults=True):
    """``allow_non_restored_state`` is about the savepoint, if the errand names one."""

    allow_non_restored_state: bool = False


class DataInfo(Struct, frozen=True, omit_defaults=True):
    """A topic that a program reads or writes, and its schema as text; the schema is empty if the topic does not
    exist or has none."""

    topic: str
    uid: str = ""
    schema: str = ""


class ValidateAnswer(Struct, frozen=True, omit_defaults=True):
    """What a program is, and what a savepoint would restore. A program that cannot be loaded, or cannot restore the
    savepoint, is answered with an error instead. ``plan`` is text, as ``Pipeline.explain`` gives it. ``restored``,
    ``left_behind`` and ``empty`` are operators and states by uid."""

    pipeline: str
    plan: str
    sources: tuple[DataInfo, ...] = ()
    sinks: tuple[DataInfo, ...] = ()
    restored: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class VerifyAnswer(Struct, frozen=True, omit_defaults=True):
    """A savepoint is intact. One that is not is answered with the error ``savepoint_damaged``."""

    files: int
    bytes: int
    intact: bool = True


class StateQuestion(Struct, frozen=True, omit_defaults=True):
    """Ask for the state of an operator, of all its keys or of one. ``key`` has a text for each column of the key. The
    state is that of the savepoint which the errand names."""

    uid: str = ""
    key: tuple[str, ...] = ()
    limit: int = STATE_ROWS


class StateAnswer(Struct, frozen=True, omit_defaults=True):
    """Rows of state by the uid of the operator, as ``cutwater savepoint inspect -o json`` prints them. ``more``: there
    are further ones."""

    operators: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    more: bool = False


class LogQuestion(Struct, frozen=True, omit_defaults=True):
    """Ask for the last bytes of what the present attempt has printed."""

    bytes: int = LOG_BYTES


class LogAnswer(Struct, frozen=True, omit_defaults=True):
    """``begin`` is the place of the text in what the attempt has printed, in bytes, and ``end`` that behind it."""

    text: str
    attempt: int = 0
    begin: int = 0
    end: int = 0
