"""Turns the arguments of a pipeline, which users write as text, into what its function takes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final

from cutwater.errors import InvalidArgument

_BOOLS: Final[Mapping[str, bool]] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_TYPES: Final = (bool, int, float, str)


def converted(what: str, function: Callable[..., Any], arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the values to call a function with. A parameter gets an ``int``, a ``float`` or a ``bool`` if its
    annotation, or else its default, is of that type, and otherwise the text. ``what`` names the function in errors."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return dict(arguments)
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    known = [name for name, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    for name in arguments:
        if name not in known and not takes_all:
            raise InvalidArgument(f"{what} has no argument {name!r}: it has {', '.join(known) or 'none'}")
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        raise InvalidArgument(
            f"{what} needs the argument {missing[0]!r}: give it as text (--arg {missing[0]}=VALUE), or give it a "
            "default in the program"
        )
    types = _types(function)
    return {name: _value(what, name, text, _type_of(name, parameters, types)) for name, text in arguments.items()}


def _types(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:
        # An annotation may name what exists for type checkers only.
        return {}


def _type_of(name: str, parameters: Mapping[str, inspect.Parameter], types: Mapping[str, Any]) -> type:
    if name not in parameters:
        return str
    annotated = types.get(name)
    wanted = [one for one in _TYPES if one in (annotated, *typing.get_args(annotated))]
    if wanted:
        return wanted[-1]
    default = parameters[name].default
    return type(default) if annotated is None and type(default) in _TYPES else str


def _value(what: str, name: str, text: str, wanted: type) -> Any:
    try:
        return _BOOLS[text.lower()] if wanted is bool else wanted(text)
    except (KeyError, ValueError):
        one = "true or false" if wanted is bool else f"{'an' if wanted is int else 'a'} {wanted.__name__}"
        raise InvalidArgument(f"the argument {name!r} of {what} is {one}, not {text[:80]!r}") from None
