"""Turns a function into a command: its options, its help, and how it ends.

A parameter whose type is a ``Bundle`` stands for all options that are the fields of that bundle, so a set of options
that many commands have is written down once. Every command also has ``--output``, unless it has one of its own or
needs none, and ``--debug``.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from cutwater.cli.framework.exit_codes import Settings, ended_well, hidden, show
from cutwater.errors import InvalidArgument

B = TypeVar("B", bound="Bundle")
Function = Callable[..., None]
UsageError: Any = typer.BadParameter.__mro__[1]
"""Typer has no public name for it."""


class OutputFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def _set_debug(value: bool) -> bool:
    Settings.is_debug = Settings.is_debug or value
    return value


def _set_output(value: OutputFormat) -> OutputFormat:
    Settings.is_json = value is OutputFormat.JSON
    return value


DebugOption = Annotated[
    bool,
    typer.Option("--debug", envvar="CUTWATER_DEBUG", callback=_set_debug, help="Show where an error comes from."),
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        "--output", "-o", envvar="CUTWATER_OUTPUT", callback=_set_output, is_eager=True, help="For people or programs."
    ),
]


def under(heading: str) -> Callable[..., Any]:
    """Return ``typer.Option`` for options that help lists under this heading."""
    return partial(typer.Option, rich_help_panel=heading)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Options that belong together. Each field is an option, as the parameter of a command would be, or a bundle."""

    left_out: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not options of this bundle, though they are options of its base class."""


class Command(TyperCommand):
    """A command whose help shows no value for flags, and lists environment variables below the options, where their
    names have room.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {parameter.name for parameter in self.params}
        is_path = any(arg == "--path" or arg.startswith("--path=") for arg in args)
        if is_path and "directory" in names and "path" not in names:
            raise typer.BadParameter(
                "it names an embedded log, which has no cluster for this command to be about. `cutwater doctor --path "
                "DIR` says how it is; the commands about records and topics take --path, too",
                param_hint="--path",
                ctx=ctx,
            )
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            _say_what_was_given(ctx, error)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = _without_type(super().get_params(ctx))
        for parameter in parameters:
            parameter.show_envvar = False
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        options = [parameter for parameter in self.params if parameter.param_type_name == "option"]
        variables = {_variable(ctx, option): option for option in options}
        width = max(map(len, variables))
        typer.echo(" In the environment:")
        for variable, option in variables.items():
            typer.echo(f" {variable:{width}}  {max(option.opts, key=len)}")
        typer.echo()


class CommandGroup(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


def _variable(ctx: Any, parameter: Any) -> str:
    return parameter.envvar or f"{ctx.auto_envvar_prefix}_{parameter.name.upper()}"


def _say_what_was_given(ctx: Any, error: Any) -> None:
    """Add the given value where Typer says only what is wanted, and the environment variable that it comes from."""
    errors = getattr(error.__cause__, "errors", None)
    given = repr(errors()[0]["input"]) if errors is not None else ""
    if given not in error.message:
        error.message = f"{given}: {error.message}"
    source = ctx.get_parameter_source(error.param.name) if error.param is not None else None
    if source is not None and source.name == "ENVIRONMENT":
        error.param_hint = _variable(ctx, error.param)


def asks_for_json(args: Sequence[str]) -> bool:
    """Return whether errors are for programs, as far as that is known before the arguments are parsed."""
    said = os.environ.get("CUTWATER_OUTPUT", "")
    for before, word in pairwise(["", *args]):
        if before in ("-o", "--output"):
            said = word
        elif word.startswith("--output="):
            said = word.removeprefix("--output=")
        elif word.startswith("-o"):
            said = word.removeprefix("-o")
    return said == OutputFormat.JSON


@contextmanager
def usage_told() -> Iterator[None]:
    """Report wrong usage to programs like any other error."""
    try:
        yield
    except UsageError as error:
        error.message = hidden(error.message)
        if not Settings.is_json:
            raise
        raise typer.Exit(show(InvalidArgument(error.format_message()))) from None


def _without_type(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def noun(help_text: str) -> typer.Typer:
    """Make a group of commands about the same thing."""
    app = typer.Typer(cls=CommandGroup, help=help_text, no_args_is_help=True)
    # With a callback, a group with a single command keeps that command's name.
    app.callback(help=help_text)(lambda: None)
    return app


def verbs() -> typer.Typer:
    """Make a group for commands of the root."""
    return noun("")


def command(
    app: typer.Typer, name: str | None = None, *, timeout: float | None = None, has_output: bool = True
) -> Callable[[Function], Function]:
    """Add a function to a group as a command. ``timeout``: the default of that option, if it differs from the
    bundle's."""

    def decorate(function: Function) -> Function:
        given = inspect.signature(function).parameters
        hints = get_type_hints(function, include_extras=True)
        bundles = {p: hints[p] for p in given if _is_bundle(hints[p])}
        parameters: list[inspect.Parameter] = []
        for parameter in given.values():
            if parameter.name in bundles:
                parameters += _options(bundles[parameter.name])
            else:
                parameters.append(_option(parameter.name, hints[parameter.name], parameter.default))
        if has_output and "output" not in given:
            parameters.append(_option("output", OutputOption, OutputFormat.TEXT))
        parameters.append(_option("debug", DebugOption, False))
        if timeout is not None:
            parameters = [p.replace(default=timeout) if p.name == "timeout" else p for p in parameters]

        @wraps(function)
        def run(**values: Any) -> None:
            made = {p: _made(bundle, values) for p, bundle in bundles.items()}
            own = {p: values[p] for p in given if p not in bundles}
            ended_well(lambda: function(**own, **made))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, cls=Command)(run)
        return function

    return decorate


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _fields(bundle: type[Bundle]) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(bundle, include_extras=True)
    for field in dataclasses.fields(bundle):
        if field.name not in bundle.left_out:
            is_required = field.default is dataclasses.MISSING
            yield field.name, hints[field.name], inspect.Parameter.empty if is_required else field.default


def _is_bundle(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Bundle)


def _options(bundle: type[Bundle]) -> Iterator[inspect.Parameter]:
    for name, annotation, default in _fields(bundle):
        if _is_bundle(annotation):
            yield from _options(annotation)
        else:
            yield _option(name, annotation, default)


def _made(bundle: type[B], values: dict[str, Any]) -> B:
    return bundle(
        **{
            name: _made(annotation, values) if _is_bundle(annotation) else values[name]
            for name, annotation, _ in _fields(bundle)
        }
    )
