"""How tests are divided among workers, and how hypothesis runs here: new examples each time, and a failure says how to
have it again.

A failing example is printed with a ``@reproduce_failure`` line that replays it anywhere; on the same machine it also
comes first in the next run, from the example database. ``make test ARGS=--hypothesis-profile=thorough`` tries harder.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.marked_secrets import MarkWatch, marked_files

EXAMPLES = Path(__file__).resolve().parent.parent / ".hypothesis" / "examples"

# No deadline, and no complaint about slow examples: neither says anything about the code on a machine that others use.
settings.register_profile(
    "standard",
    database=DirectoryBasedExampleDatabase(EXAMPLES),
    deadline=None,
    derandomize=False,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("standard"), max_examples=5_000)
settings.load_profile("standard")


LOGGER = logging.getLogger("cutwater")
LOG_LEVEL = LOGGER.level


def _forget_commands() -> None:
    LOGGER.setLevel(LOG_LEVEL)
    if "cutwater.cli.framework.exit_codes" in sys.modules:
        sys.modules["cutwater.cli.framework.exit_codes"].Settings.is_json = False


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """Commands that a test, or a fixture of a module, runs in this process set the level of the log and the form of
    output; every test finds both as they were at the beginning."""
    _forget_commands()
    yield
    _forget_commands()


@pytest.fixture(scope="session", autouse=True)
def no_secret_is_logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """See ``tests/marked_secrets.py``."""
    watch = MarkWatch()
    logging.getLogger().addHandler(watch)
    yield
    logging.getLogger().removeHandler(watch)
    assert watch.found == [], "the secret of a token is in the log"
    assert marked_files(tmp_path_factory.getbasetemp()) == [], "the secret of a token is in a log file"


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """SIGINT, SIGHUP and SIGQUIT do what they do in a terminal, for the test and for processes that it starts. A shell
    ignores them for what runs in the background, and `nohup` ignores SIGHUP; processes inherit that."""
    plain = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in plain.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


LONGEST = (
    "test_drivers_and_executors_are_killed",
    "test_killed_saved_rescaled_and_cancelled",
    "test_a_standalone_cluster",
    "test_local_cluster",
)
"""What a worker should not begin when the others have nothing left to do."""
WITHOUT_SESSION = (
    "test_sink_kill",
    "test_clusters",
    "test_jobs_on_spark",
    "test_planning",
    "test_outgoing",
    "test_pipeline_one_process",
)
"""Modules of ``tests/spark`` whose tests run anywhere; all others share a session, and so a process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.name) if item.name in LONGEST else len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """For ``--dist loadgroup``. The marker ``xdist_group`` has no effect with pytest 9.2, which makes the ids of tests
    anew, without what xdist 3.8 has appended to them."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneSession(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return "spark" if path.parent.name == "spark" and path.stem not in WITHOUT_SESSION else nodeid

    return OneSession(config, log)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where jobs and checkpoints lie that no test names: not in the home of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(home))
        yield home
