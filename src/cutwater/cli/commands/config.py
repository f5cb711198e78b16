"""``cutwater config``: shows what is configured, and where."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import copy
from math import isfinite
from typing import Annotated, Any

import typer
from msgspec import Struct

from cutwater.cli import main
from cutwater.cli.framework import config_file
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import check_one_place
from cutwater.cli.io.output import show as show_result
from cutwater.cli.io.output import table
from cutwater.client.convert.json_values import encode
from cutwater.errors import InvalidArgument
from cutwater.runtime.redaction import without_secrets

app = noun("Show what is configured, and where.")


class Configured(Struct, frozen=True):
    """An option with another value than its default, for these commands."""

    option: str
    value: Any
    origin: str
    commands: list[str]


@command(app)
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value comes from.")] = False,
) -> None:
    """Show options that the environment or a file sets, and for which commands. Checks all of them as commands
    would."""
    files = config_file.read(frozenset(main.ENTRIES))
    loaded = {name: main.load(name) for name in main.ENTRIES}
    for name, loaded_command in loaded.items():
        config_file.default_map(files, loaded_command, (name,))
    leaves = dict(_leaves((), loaded))
    found: list[Configured] = []
    commands: dict[tuple[str, bytes, str], list[str]] = {}
    for words, leaf in leaves.items():
        for option, setting in _configured(files, words, leaf):
            key = option, encode(setting.value), setting.origin
            if key not in commands:
                commands[key] = []
                value = "(secret)" if option in config_file.SECRETS else _shown(setting.value)
                found.append(Configured(option, value, setting.origin, commands[key]))
            commands[key].append(" ".join(words))
    found.sort(key=lambda one: (one.option, str(one.value), one.origin))
    known = {variable for words, leaf in leaves.items() for variable in _variables(words, leaf).values()}
    for variable in sorted(os.environ):
        if variable.startswith(f"{main.VARIABLES}_") and variable not in known | {config_file.VARIABLE}:
            found.append(Configured("?", "(not shown)", f"{variable}, which no command knows", []))
    looked = ", ".join(f"{path}{'' if config_file.is_there(path) else ' (not there)'}" for path in config_file.paths())
    columns = ["option", "value", *(["from"] if origin else []), "commands"]
    rows = [(f.option, f.value, *([f.origin] if origin else []), f.commands) for f in found]
    show_result(found, table(columns, rows, f"files: {looked}") if rows else f"nothing is set; files: {looked}")


def _shown(value: Any) -> Any:
    return without_secrets(value) if isinstance(value, str) else value


def _leaves(words: tuple[str, ...], commands: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command, with the words that call it."""
    for name, found in commands.items():
        if hasattr(found, "commands"):
            yield from _leaves((*words, name), found.commands)
        else:
            yield (*words, name), found


def _configured(
    files: tuple[config_file.ConfigFile, ...], words: tuple[str, ...], command: Any
) -> Iterator[tuple[str, config_file.Setting]]:
    settings = config_file.settings(files, command, words)
    variables = _variables(words, command)
    set_here = {name for name, variable in variables.items() if os.environ.get(variable)}
    options = config_file.options_of(command)
    places = {options[place] for place in config_file.PLACES & options.keys()}
    check_one_place(places & set_here, "ENVIRONMENT")
    if places & set_here:
        # The environment takes precedence over files in naming a log.
        settings = {name: setting for name, setting in settings.items() if name not in places}
    check_one_place(places & settings.keys(), "DEFAULT_MAP")
    parameters = {parameter.name: parameter for parameter in command.params}
    for option, name in options.items():
        if name in set_here:
            variable = variables[name]
            yield option, _checked(command, parameters[name], option, None, variable)
        elif name in settings:
            yield option, _checked(command, parameters[name], option, settings[name].value, settings[name].origin)


def _checked(command: Any, parameter: Any, option: str, value: Any, origin: str) -> config_file.Setting:
    """Return a value as the command would parse it; without a value, that of the environment variable ``origin``."""
    context = typer.Context(command)
    # Callbacks of the command are not run here.
    bare = copy(parameter)
    bare.callback = None
    if value is None:
        bare.envvar = origin
        value = bare.value_from_envvar(context)
    try:
        made = bare.process_value(context, value)
    except typer.BadParameter as error:
        raise InvalidArgument(f"{origin}: {option} = {value!r} is invalid: {error.message}") from None
    if isinstance(made, float) and not isfinite(made):
        raise InvalidArgument(f"{origin}: {option} = {value!r} is invalid: give a finite number")
    return config_file.Setting(made, origin)


def _variables(words: tuple[str, ...], command: Any) -> dict[str, str]:
    """Return the environment variable of each parameter, as Typer would look for it."""
    prefix = "_".join((main.VARIABLES, *words)).replace("-", "_")
    return {
        parameter.name: parameter.envvar or f"{prefix}_{parameter.name}".upper()
        for parameter in command.params
        if parameter.name != "help"
    }
