"""``cutwater config``: what is configured, and where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from msgspec import Struct

from cutwater.cli import config_file, main
from cutwater.cli.commands import command, noun
from cutwater.cli.tables import show as show_result
from cutwater.cli.tables import table

app = noun("What is configured, and where.")


SECRETS = frozenset({"token"})


class Configured(Struct, frozen=True):
    """An option that has another value than its default, for these commands."""

    option: str
    value: str
    origin: str
    commands: tuple[str, ...]


@command(app)
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value comes from.")] = False,
) -> None:
    """Options that the environment or a file sets, and for which commands. Checks all files as a whole."""
    files = config_file.read(frozenset(main.ENTRIES))
    for name in main.ENTRIES:
        config_file.default_map(files, main.load(name), (name,))
    commands: dict[tuple[str, str, str], list[str]] = {}
    for words, leaf in _leaves():
        for option, setting in _configured(files, words, leaf):
            value = "(secret)" if option in SECRETS else str(setting.value)
            commands.setdefault((option, value, setting.origin), []).append(" ".join(words))
    found = [Configured(*key, tuple(used)) for key, used in sorted(commands.items())]
    known = {variable for words, leaf in _leaves() for variable in _variables(words, leaf).values()}
    for variable in sorted(os.environ):
        if variable.startswith(f"{main.VARIABLES}_") and variable not in known | {config_file.VARIABLE}:
            found.append(Configured("?", "(not shown)", f"{variable}, which no command knows", ()))
    looked = ", ".join(f"{path}{'' if path.exists() else ' (not there)'}" for path in config_file.paths())
    columns = ["option", "value", *(["from"] if origin else []), "commands"]
    rows = [(f.option, f.value, *([f.origin] if origin else []), f.commands) for f in found]
    show_result(found, table(columns, rows, f"files: {looked}") if rows else f"nothing is set; files: {looked}")


def _leaves() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, and how it is called."""
    for name in main.ENTRIES:
        yield from _leaves_of((name,), main.load(name))


def _leaves_of(words: tuple[str, ...], loaded: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    verbs = getattr(loaded, "commands", None)
    if verbs is None:
        yield words, loaded
        return
    for verb, found in verbs.items():
        yield from _leaves_of((*words, verb), found)


def _configured(
    files: tuple[config_file.ConfigFile, ...], words: tuple[str, ...], command: Any
) -> Iterator[tuple[str, config_file.Setting]]:
    settings = config_file.settings(files, command, words)
    variables = _variables(words, command)
    for option, name in config_file.options_of(command).items():
        value = os.environ.get(variables.get(name, ""))
        if value:
            yield option, config_file.Setting(value, variables[name])
        elif name in settings:
            yield option, settings[name]


def _variables(words: tuple[str, ...], command: Any) -> dict[str, str]:
    """The environment variable of each parameter, as Typer would look for it."""
    prefix = "_".join((main.VARIABLES, *words)).replace("-", "_")
    return {
        parameter.name: parameter.envvar or f"{prefix}_{parameter.name}".upper()
        for parameter in command.params
        if parameter.name != "help"
    }
