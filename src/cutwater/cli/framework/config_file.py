"""``cutwater.toml``: values of options that neither the command line nor the environment sets.

::

    servers = "cutwater://10.0.0.9:7001"     # for all commands that have this option
    timeout = 20

    [append]                                 # for one command, by the long names of its options
    create = true

    [topic.create]
    streams = 4

The file in the current directory takes precedence over the one in ``~/.config/cutwater/``, option by option.
``CUTWATER_CONFIG`` names one file to read instead of both.
"""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from cutwater.errors import InvalidArgument

NAME = "cutwater.toml"
VARIABLE = "CUTWATER_CONFIG"

COMMON: Mapping[str, Any] = {
    "servers": str,
    "dir": str,
    "path": str,
    "timeout": float,
    "output": str,
    "debug": bool,
    "log-format": str,
    "log-level": str,
    "tls-ca": str,
    "tls-certificate": str,
    "tls-key": str,
    "token": str,
    "token-file": str,
}
"""Options that may be set for all commands at once, and their types."""
SECURITY = frozenset({"tls-ca", "tls-certificate", "tls-key", "token", "token-file"})
SECRETS = frozenset({"token"})
"""Options whose values are not shown."""
PLACES = frozenset({"servers", "dir", "path"})
"""Only one of these can hold, so setting one of them resets the others that were set with lower precedence."""


class ConfigFile(NamedTuple):
    path: Path
    document: Mapping[str, Any]


class Setting(NamedTuple):
    """The value of an option, and where it was found."""

    value: Any
    origin: str


def paths() -> list[Path]:
    """Return the files to read, the one with the highest precedence last."""
    if named := os.environ.get(VARIABLE):
        return [Path(named)]
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return [Path(base).expanduser() / "cutwater" / NAME, Path(NAME)]


def is_there(path: Path) -> bool:
    """Return whether the file exists. A home that cannot be read, such as that of the user who called ``sudo``, has
    none."""
    return os.path.exists(path)


def read(commands: Collection[str]) -> tuple[ConfigFile, ...]:
    """Read all files that exist, in the order of ``paths``. Their tables are checked when the command is known."""
    return tuple(_checked(path, commands) for path in paths() if is_there(path) or VARIABLE in os.environ)


def _checked(path: Path, commands: Collection[str]) -> ConfigFile:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as configuration: {error}") from error
    if _has_token(document):
        # Help needs nothing of the runtime.
        from cutwater.runtime.permissions import check_secret  # noqa: PLC0415

        check_secret(path, "a configuration with a token", "revoke the token and make another one")
    for key, value in document.items():
        if key in COMMON and not (key in commands and isinstance(value, dict)):
            _check_value(path, key, value, COMMON[key])
        elif key not in commands:
            raise InvalidArgument(
                f"{path}: nothing is called {key!r}; options of all commands are {_listed(COMMON)}, and tables are for "
                f"{_listed(commands)}"
            )
        elif not isinstance(value, dict):
            raise InvalidArgument(f"{path}: {key!r} is a command: write a table [{key}] with its options")
    return ConfigFile(path, document)


def _has_token(table: Mapping[str, Any]) -> bool:
    """Return whether a table, or one in it, sets a token."""
    return isinstance(table.get("token"), str) or any(
        _has_token(inner) for inner in table.values() if isinstance(inner, dict)
    )


def default_map(files: tuple[ConfigFile, ...], command: Any, words: tuple[str, ...]) -> dict[str, Any]:
    """Return the defaults of a command for Typer; for a noun, of each of its commands."""
    commands = getattr(command, "commands", None)
    if commands is None:
        return {name: setting.value for name, setting in settings(files, command, words).items()}
    for file in files:
        for key, value in _table(file, words).items():
            if key not in commands or not isinstance(value, dict):
                raise InvalidArgument(
                    f"{file.path}: [{'.'.join(words)}] takes tables for {_listed(commands)}, not {key!r}"
                )
    return {name: default_map(files, found, (*words, name)) for name, found in commands.items()}


def settings(files: tuple[ConfigFile, ...], command: Any, words: tuple[str, ...]) -> dict[str, Setting]:
    """Return what the files set for a command's options, by the names of its parameters."""
    options = options_of(command)
    hints = _types_of(command)
    found: dict[str, Setting] = {}
    for file in files:
        own = _table(file, words)
        common = {key: value for key, value in file.document.items() if key in COMMON and key in options}
        if "token" not in options:
            # Servers have these options too, but values for all commands are about clients.
            common = {key: value for key, value in common.items() if key not in SECURITY}
        for table, where in ((common, str(file.path)), (own, f"{file.path} [{'.'.join(words)}]")):
            if PLACES & table.keys():
                found = {
                    name: kept
                    for name, kept in found.items()
                    if name not in {options[p] for p in PLACES & options.keys()}
                }
            for key, value in table.items():
                if key not in options:
                    raise InvalidArgument(f"{where}: there is no option {key!r}; there are {_listed(options)}")
                _check_value(where, key, value, hints[options[key]])
                found[options[key]] = Setting(value, where)
    return found


def options_of(command: Any) -> dict[str, str]:
    """Return the long names of a command's options, without dashes, and the names of their parameters."""
    return {
        option.removeprefix("--"): parameter.name
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and parameter.name != "help"
    }


def _types_of(command: Any) -> dict[str, Any]:
    """Return the type of each parameter."""
    parameters = inspect.signature(command.callback).parameters.values()
    # Only the first part of an annotation is the type; the second is for Typer.
    return {p.name: get_args(p.annotation)[0] for p in parameters if get_origin(p.annotation) is Annotated}


def _table(file: ConfigFile, words: tuple[str, ...]) -> Mapping[str, Any]:
    table: Mapping[str, Any] = file.document
    for word in words:
        inner = table.get(word, {})
        # ``token`` is a command and an option of other commands. As an option, it has a text.
        table = inner if isinstance(inner, dict) else {}
    return table


def _check_value(where: object, key: str, value: Any, wanted: Any) -> None:
    try:
        msgspec.convert(value, wanted, dec_hook=lambda kind, given: kind(given))
    except (msgspec.ValidationError, TypeError) as error:
        shown = "(secret)" if key in SECRETS else repr(value)
        raise InvalidArgument(f"{where}: {key} = {shown} is invalid: {error}") from None


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
