"""Reads and writes savepoints: the state of a pipeline at a position of the log, in files that stay readable. Nothing
here needs Spark.

A savepoint is a directory with ``manifest.json``, which describes it and has the checksum of every file, and the state
of each operator as Parquet. ``cutwater.spark.savepoints`` takes savepoints of pipelines, and ``run(from_savepoint=…)``
starts pipelines from them.
"""

from cutwater.savepoints.diffs import Difference, diff
from cutwater.savepoints.files import Files, LocalFiles
from cutwater.savepoints.manifest import FileInfo, Manifest, OperatorState, RunPoint
from cutwater.savepoints.program import OperatorInfo, SourceInfo, StateInfo
from cutwater.savepoints.savepoint import Savepoint, delete_savepoint, list_savepoints, open_savepoint
from cutwater.savepoints.writing import edited_savepoint, new_savepoint, write_savepoint

__all__ = [
    "Difference",
    "FileInfo",
    "Files",
    "LocalFiles",
    "Manifest",
    "OperatorInfo",
    "OperatorState",
    "RunPoint",
    "Savepoint",
    "SourceInfo",
    "StateInfo",
    "delete_savepoint",
    "diff",
    "edited_savepoint",
    "list_savepoints",
    "new_savepoint",
    "open_savepoint",
    "write_savepoint",
]
