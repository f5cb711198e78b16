"""``cutwater completion``: prints what a shell needs to complete commands."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from typer.completion import show_callback

from cutwater.cli.framework.command import command, verbs

app = verbs()


class Shell(enum.StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@command(app, has_output=False)
def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="The shell that is to complete commands.")],
) -> None:
    """Print a script that lets a shell complete commands.

    For bash, add this to ~/.bashrc: eval "$(cutwater completion bash)". For zsh, the same to ~/.zshrc after compinit.
    For fish, write it to ~/.config/fish/completions/cutwater.fish.
    """
    show_callback(context, context.command.params[0], shell.value)
