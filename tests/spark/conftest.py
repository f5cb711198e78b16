"""What tests on Spark share: one session for all that need no other, in one process; one embedded log per module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import cutwater
import cutwater.spark
from cutwater.spark.session.spark_home import provide_home

HERE = Path(__file__).parent
FAST_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that lives for a minute compiles more than it ever gains from that."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                # Queries of a loaded machine take their time.
                item.add_marker(pytest.mark.timeout(400))
            # PySpark leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def swift_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For every JVM and every Python process of Spark that tests start, and they start some hundred."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SPARK_HOME", "")
        patch.delenv("SPARK_HOME")
        provide_home()
        patch.setenv("JDK_JAVA_OPTIONS", f"{FAST_JAVA} {os.environ.get('JDK_JAVA_OPTIONS', '')}".strip())
        yield


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path_factory.mktemp("log") / "data") as client:
        yield client


@pytest.fixture(scope="session")
def spark(swift_start: None) -> Iterator[SparkSession]:
    session = cutwater.spark.session("tests", master="local[2]")
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
