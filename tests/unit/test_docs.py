"""The documentation says what the code does: what can be compared is compared here."""

from __future__ import annotations

import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from datetime import datetime
from io import StringIO
from pathlib import Path

import pytest

import cutwater
from cutwater.core.replica.states import diagram
from cutwater.jobs.program_file import load_pipeline

ROOT = Path(__file__).resolve().parents[2]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_diagram_of_replica_states_is_the_table() -> None:
    """To renew the block, print ``cutwater.core.replica.states.diagram()`` into it."""
    between = r"<!-- replica states: begin -->\n```mermaid\n(.*?)\n```\n<!-- replica states: end -->"
    blocks = re.findall(between, text("docs/protocol.md"), re.DOTALL)
    assert blocks == [diagram()]


def test_the_python_example_of_the_readme_prints_what_it_says() -> None:
    examples = re.findall(r"```python\n([^`]*)```\n\n```text\n(.*?)```", text("README.md"), re.DOTALL)
    assert len(examples) == 1
    for program, printed in examples:
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
        assert out.getvalue() == printed


def test_the_first_pipeline_of_the_readme_gives_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever saves and runs it does, but without Spark, which would give the same."""
    found = re.findall(
        r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```\n\n```\npython (\w+\.py) .*?```\n\n```text\n(.*?)```",
        text("README.md"),
        re.DOTALL,
    )
    ((name, program, run, printed),) = found
    assert (name, text("README.md").count("```python")) == (run, 2)
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(program, encoding="utf-8")
    runpy.run_path(name, run_name="__main__")
    with monkeypatch.context() as modules:
        modules.setattr(sys, "modules", {**sys.modules})
        modules.setattr(sys, "path", [*sys.path])
        pipeline = load_pipeline(name)
    with cutwater.open(pipeline.log) as log:
        rows = [record.row for record in log.subscribe("clicks", follow=False)]
    result = pipeline.test({"clicks": rows}, drain=False)["clicks-per-minute"]
    assert [tuple(row.values()) for row in result] == [
        (row["page"], *(datetime.fromisoformat(row[name]) for name in ("window_start", "window_end")), row["clicks"])
        for row in map(json.loads, printed.splitlines())
    ]


# What is not in the repository cannot be looked up: sections of a paper, a contract that was left elsewhere.
ELSEWHERE = re.compile("\u00a7|" + r"\b" + "DESI" + r"GN\b|" + "DESI" + r"GN\.md|\.\./shared\b")


def test_nothing_cites_a_document_that_is_not_in_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("src", "tests", "docs", "examples")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md", ".toml", ".proto") and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert not found, "name the page in docs/ instead:\n" + "\n".join(found)
    assert ELSEWHERE.search("the sentences of DESI" + "GN \u00a73")


def test_decisions_are_numbered_without_holes_and_listed_in_order() -> None:
    files = sorted(path.name for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [name[:4] for name in files] == [f"{number:04}" for number in range(1, len(files) + 1)]
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\)", text("docs/adr/README.md"), re.MULTILINE)
    assert listed == [(name[:4], name) for name in files]


def test_every_decision_that_is_cited_exists() -> None:
    there = {path.name[:4] for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    cited = {
        (str(path.relative_to(ROOT)), number)
        for folder in ("src", "tests", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
        for many in re.findall(r"ADRs? (\d{4}(?:(?:, | and )\d{4})*)", path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d{4}", many)
    }
    assert {(path, number) for path, number in cited if number not in there} == set()
    assert len(cited) > 5


def test_every_link_between_pages_leads_somewhere() -> None:
    """To a file that exists, and to a heading that it has."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken, count = [], 0
    for page in pages:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            count += 1
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "these links lead nowhere:\n" + "\n".join(broken)
    assert count > 100


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
