"""From what an agent says to a pipeline and settings of Spark: entries and arguments of programs, and limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutwater.agent.job.job_setup import LimitsSetup, ProgramSetup
from cutwater.agent.job.program_entry import load_entry, load_job
from cutwater.agent.job.spark_limits import conf_within, tasks_within
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.jobs.messages import PROGRAM_ARCHIVE
from cutwater.jobs.program_arguments import converted

HEAD = "from cutwater.pipeline import Pipeline\n"
MAKER = (
    HEAD
    + "def make(region='eu', limit: int = 3, *, strict=False):\n    return Pipeline(f'{region}-{limit}-{strict}')\n"
)
FILES = {
    "plain.py": HEAD + "import beside\np = Pipeline('a')\n",
    "beside.py": "",
    "made.py": MAKER,
    "jobs/nested.py": HEAD + "import near, beside\np = Pipeline('b')\n",
    "jobs/near.py": "",
    "shop_of_tests/__init__.py": "",
    "shop_of_tests/fraud.py": MAKER + "from shop_of_tests import rules\n",
    "shop_of_tests/rules.py": "",
    "shop_of_tests/broken.py": "x = 1\nx.y\n",
    "broken.py": "x = 1\nx.y\n",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", PROGRAM_ARCHIVE):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def setup(place: Path, entry: str, **arguments: str) -> ProgramSetup:
    return ProgramSetup(str(place), str(place / "program.zip"), entry, arguments)


@pytest.mark.parametrize(
    ("entry", "arguments", "name"),
    [
        ("plain.py", {}, "a"),
        ("plain.py:p", {}, "a"),
        ("jobs/nested.py:p", {}, "b"),
        ("made.py:make", {}, "eu-3-False"),
        ("made.py:make", {"limit": "5", "strict": "yes", "region": "1"}, "1-5-True"),
        ("shop_of_tests.fraud:make", {"region": "us"}, "us-3-False"),
    ],
)
def test_the_pipeline_that_an_entry_names(program: Path, entry: str, arguments: dict[str, str], name: str) -> None:
    assert load_entry(setup(program, entry, **arguments)).name == name
    assert os.environ["PYTHONPATH"].startswith(str(program))
    assert not list(program.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("entry", "arguments", "told"),
    [
        ("none.py:p", {}, r"no file 'none.py', which its entry names: it has beside.py, broken.py, jobs/near.py, "),
        ("../outside.py:p", {}, "no file '../outside.py'"),
        ("/etc/passwd.py", {}, "no file '/etc/passwd.py'"),
        ("a b", {}, r"names neither a file of the program \(fraud.py:p\) nor a module"),
        ("json:dumps", {}, "the module 'json' is not in the program, but in "),
        ("no_such_module:p", {}, "there is no module 'no_such_module'"),
        (
            "plain.py:p",
            {"region": "eu"},
            "'p' in .*plain.py is a pipeline, which takes no arguments, and there are reg",
        ),
        ("plain.py", {"region": "eu"}, "'p' in .*plain.py is a pipeline"),
        ("made.py:make", {"regoin": "eu"}, r"make\(\) in made.py has no argument 'regoin': it has region, limit, str"),
        ("made.py:make", {"limit": "many"}, "the argument 'limit' of .* is an int, not 'many'"),
        ("made.py:make", {"strict": "many"}, "is true or false, not 'many'"),
        ("broken.py:p", {}, "^broken.py, line 2: AttributeError"),
        ("shop_of_tests.broken:p", {}, "^shop_of_tests/broken.py, line 2: AttributeError"),
    ],
)
def test_what_is_wrong_with_an_entry(program: Path, entry: str, arguments: dict[str, str], told: str) -> None:
    with pytest.raises(CutwaterError, match=told):
        load_entry(setup(program, entry, **arguments))


def test_a_job_has_the_name_of_its_pipeline(program: Path) -> None:
    assert load_job("a", setup(program, "plain.py:p")).name == "a"
    with pytest.raises(
        InvalidArgument, match=r"called 'b', and the job 'a': a job has the name of its pipeline\. Submi"
    ):
        load_job("a", setup(program, "jobs/nested.py:p"))


def test_arguments_of_functions() -> None:
    def function(one: str, two: float = 1, three: int | None = None, four: Any = 2) -> None: ...

    def takes_all(**given: Any) -> None: ...

    given = {"one": "1", "two": "2", "three": "3", "four": "4"}
    assert converted("f", function, given) == {"one": "1", "two": 2.0, "three": 3, "four": "4"}
    assert converted("f", takes_all, given) == given
    with pytest.raises(InvalidArgument, match=r"f needs the argument 'one': give it as text \(--arg one=VALUE\)"):
        converted("f", function, {"two": "2"})


def test_spark_keeps_to_the_limits_of_its_processes() -> None:
    conf, gib = {"spark.x": "y"}, 1 << 30
    assert conf_within(conf, LimitsSetup()) == conf
    assert conf_within(conf, LimitsSetup(4 * gib)) == {**conf, "spark.driver.memory": "1638m"}
    assert conf_within(conf, LimitsSetup(gib // 2))["spark.driver.memory"] == "512m"
    given = {"spark.driver.memory": "3g"}
    assert conf_within(given, LimitsSetup(gib)) == given
    assert [tasks_within(LimitsSetup(cpus=cpus)) for cpus in (0, 0.5, 1, 1.5)] == [None, 1, 1, 2]
