"""``cutwater completion``: prints what a shell needs to complete commands."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import show_callback

from cutwater.cli.framework.command import command, verbs

app = verbs()


@command(app, has_output=False)
def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell that is to complete commands.")],
) -> None:
    """Print a script that lets a shell complete commands.

    For bash, add this to ~/.bashrc: eval "$(cutwater completion bash)". For zsh, the same to ~/.zshrc after compinit.
    For fish, write it to ~/.config/fish/completions/cutwater.fish.
    """
    show_callback(context, context.command.params[0], shell)
