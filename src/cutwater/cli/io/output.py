"""Prints results on standard output: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cutwater.cli.framework.exit_codes import Settings
from cutwater.client.convert.json_values import encode

if TYPE_CHECKING:
    from rich.console import RenderableType


LIMITED_VIEW = (
    "note: what you may not describe is left out; an administrator, or a principal with the right "
    "cluster-operate, sees all"
)


def show(value: object, render: RenderableType) -> None:
    """Print the value for programs, or its rendering for people, as ``--output`` demands."""
    if Settings.is_json:
        print(encode(value).decode())
        return
    if isinstance(render, str):
        print(render)
        return
    # Imported only when there is a table to draw.
    from rich.console import Console  # noqa: PLC0415

    # In a file or a pipe, lines are not folded to the width of a screen.
    Console(width=None if sys.stdout.isatty() else 200).print(render)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> RenderableType:
    """Make a table. ``title`` stands above it and may be wider than the table."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        # Plain text: brackets, as in an IPv6 address, must not be taken as markup.
        made.add_row(*(Text(text(cell)) for cell in row))
    return Group(Text(title), made) if title else made


def text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, (tuple, list)):
        return ", ".join(map(str, cell)) or "-"
    return str(cell)
