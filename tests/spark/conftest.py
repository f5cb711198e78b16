"""One Spark session for all tests here, which run in one process one after the other, and one log per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import cutwater
import cutwater.spark

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("xdist_group") is None:
            # With ``--dist loadgroup``, so that few JVMs run at a time.
            item.add_marker(pytest.mark.xdist_group("spark"))
            # Queries of a loaded machine take their time, and PySpark leaves sockets to the garbage collector.
            item.add_marker(pytest.mark.timeout(400))
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cutwater.Client]:
    with cutwater.open(tmp_path_factory.mktemp("log") / "data") as client:
        yield client


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = cutwater.spark.session("tests", master="local[2]")
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
