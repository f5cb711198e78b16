"""The example in ``docs/pipelines.md`` prints what it says, and its table names all files."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")


def test_the_example_prints_what_it_says() -> None:
    ((program, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(program, "pipelines.md", "exec"), {"__name__": "example"})
    assert out.getvalue() == printed


def test_every_file_of_the_package_has_a_place() -> None:
    section = TEXT.split("## How it is carried out")[1]
    package = ROOT / "src" / "cutwater" / "pipeline"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`([\w/]+\.py)`", section)) == files
