"""Modules of a program in Spark's workers, which other processes than the driver start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutwater.jobs.messages import PROGRAM_ARCHIVE
from cutwater.programs.packing import pack_program
from cutwater.spark.session.program_files import is_in_driver

PROGRAM = """
import sys
import cutwater.spark
from cutwater.spark.session.program_files import send_program

spark = cutwater.spark.session("program", master=sys.argv[1])
send_program(spark, sys.argv[1])

def number(batches):
    # Imported here, so by the worker.
    from rules.limits import MOST
    import more
    for batch in batches:
        batch["id"] = batch["id"] + MOST + more.ONE
        yield batch

print("found", sorted(row.id for row in spark.range(3).mapInPandas(number, "id bigint").collect()), flush=True)
spark.stop()
"""


def test_workers_of_another_master_import_the_modules_of_a_program(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (program / "rules").mkdir(parents=True)
    (program / "rules" / "__init__.py").write_text("")
    (program / "rules" / "limits.py").write_text("MOST = 10\n")
    (program / "more.py").write_text("ONE = 1\n")
    archive = tmp_path / "program.zip"
    archive.write_bytes(pack_program(program).data)
    archive.chmod(0o444)
    script = tmp_path / "run" / "script.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    environment = {**os.environ, PROGRAM_ARCHIVE: str(archive)}
    command = [sys.executable, str(script), "local-cluster[1,1,1024]"]
    told = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert told.returncode == 0, told.stderr
    assert "found [11, 12, 13]" in told.stdout


@pytest.mark.parametrize(
    ("master", "expected"),
    [("", True), ("local", True), ("local[2]", True), ("local-cluster[1,1,1024]", False), ("spark://h:7077", False)],
)
def test_where_tasks_run(master: str, expected: bool) -> None:
    assert is_in_driver(master) is expected
