"""What docstrings, docs/clients.md and docs/publishing.md show is run: the examples say what happens."""

from __future__ import annotations

import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import cutwater
from cutwater.client.async_client import AsyncClient
from cutwater.client.client import Client, Subscription
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.runtime.event_loop import run

ROOT = Path(__file__).resolve().parents[2]
METHODS = [name for name, value in inspect.getmembers(Client, inspect.isfunction) if ">>>" in (value.__doc__ or "")]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with cutwater.open(tmp_path_factory.mktemp("log")) as client:
        yield client


@pytest.fixture
def servers(log: Client) -> str:
    return log.servers


@pytest.fixture(autouse=True)
def clean(log: Client) -> None:
    for topic in log.topics():
        log.delete_topic(topic.name)


def test_most_methods_show_how_they_are_used() -> None:
    assert {"append", "subscribe", "batches", "producer", "read", "trim", "tail", "find", "cursor"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_a_method(log: Client, name: str) -> None:
    log.create_topic("t")
    names = {"log": log, "pa": pa, "datetime": datetime, "timedelta": timedelta, "UTC": UTC}
    example = doctest.DocTestParser().get_doctest(getattr(Client, name).__doc__, names, name, None, 0)
    assert example.examples
    said = StringIO()
    failures = doctest.DocTestRunner(verbose=False).run(example, out=said.write).failed
    assert not failures, said.getvalue()


@pytest.mark.parametrize("cls", [AsyncClient, Client, AsyncSubscription, Subscription])
def test_the_example_of_a_class(log: Client, servers: str, cls: type[Any]) -> None:
    log.create_topic("orders")
    log.append("orders", b"before")
    program = textwrap.dedent(cls.__doc__.split("::\n\n", 1)[1]) if cls.__doc__ else ""
    program = program.replace("cutwater://127.0.0.1:7000", servers)
    out = StringIO()
    with redirect_stdout(out):
        if "await" not in program:
            exec(compile(program, cls.__name__, "exec"), {"cutwater": cutwater, "log": log})
        else:
            names: dict[str, Any] = {"AsyncClient": AsyncClient}
            body = program
            if "connect(" not in program:
                body = f"async with await AsyncClient.connect({servers!r}) as log:\n{textwrap.indent(program, '    ')}"
            exec(compile(f"async def main():\n{textwrap.indent(body, '    ')}", cls.__name__, "exec"), names)
            main: Callable[[], Any] = names["main"]
            run(main())
    assert re.search(r"\d+ b'(hello|before)'", out.getvalue())


def test_the_example_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = textwrap.dedent((cutwater.__doc__ or "").split("::\n\n", 1)[1])
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(program, "cutwater", "exec"), {})
    assert out.getvalue().endswith("b'hello'\n")


@pytest.mark.parametrize("page", ["clients.md", "publishing.md"])
def test_a_page_prints_what_it_says(page: str, servers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == text.count("```python")
    # A second time in the same directory, as whoever tries them out does.
    for program, printed in examples * 2:
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(program, page, "exec"), {"servers": servers})
        assert out.getvalue() == printed
