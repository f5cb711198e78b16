"""Reads the query of an address into the type that a route declares for it."""

from __future__ import annotations

import re
import typing
from functools import cache
from types import UnionType
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Struct

from cutwater.service.http.http_problems import HttpRefusal

FIELDS_MAX = 64
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII)
_BOOLEANS = {"true": True, "false": False}


def decode_query(query: bytes, kind: type[Struct] | None) -> Any:
    """Return the arguments as a struct of this type. An unknown, repeated or malformed one is refused."""
    given = _pairs(query)
    if kind is None:
        if given:
            raise _wrong(f"this address takes no arguments, and {next(iter(given))!r} is one")
        return None
    types = _types(kind)
    unknown = [name for name in given if name not in types]
    if unknown:
        raise _wrong(f"there is no argument {unknown[0]!r} here; arguments: {', '.join(types)}")
    try:
        return msgspec.convert({name: _value(name, text, types[name]) for name, text in given.items()}, kind)
    except msgspec.ValidationError as error:
        raise _wrong(f"an argument of the address is wrong: {error}") from None


def _pairs(query: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    parts = query.split(b"&") if query else []
    if len(parts) > FIELDS_MAX:
        raise _wrong(f"{len(parts)} arguments are too many: {FIELDS_MAX} is the most")
    for part in parts:
        if not part:
            continue
        name, _, value = part.partition(b"=")
        key = _text(name)
        if key in found:
            raise _wrong(f"the argument {key!r} is there twice: give it once")
        found[key] = _text(value)
    return found


def _text(raw: bytes) -> str:
    return decode_text(raw.replace(b"+", b" "))


def decode_text(raw: bytes) -> str:
    """Decode a part of an address."""
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise _wrong("the address is no UTF-8") from None


def _value(name: str, text: str, kind: type) -> Any:
    if kind is int:
        if not _WHOLE.fullmatch(text):
            raise _wrong(f"{name} is a whole number, not {text[:80]!r}")
        return int(text)
    if kind is bool:
        if text not in _BOOLEANS:
            raise _wrong(f"{name} is true or false, not {text[:80]!r}")
        return _BOOLEANS[text]
    return text


@cache
def _types(kind: type[Struct]) -> dict[str, type]:
    """Return the plain type of each field."""
    return {name: plain_type(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}


def plain_type(hint: Any) -> Any:
    """Return the type in an annotation, without None and constraints."""
    if typing.get_origin(hint) is Annotated:
        return plain_type(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return plain_type(next(one for one in typing.get_args(hint) if one is not type(None)))
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return hint


def _wrong(detail: str) -> HttpRefusal:
    return HttpRefusal(400, "invalid_argument", detail)
