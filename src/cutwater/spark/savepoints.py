"""Public names of ``cutwater.spark.savepoint.savepoints``, described in docs/savepoints.md."""

from __future__ import annotations

from cutwater.spark.savepoint.savepoints import frame, new_savepoint, open_savepoint, take_savepoint

__all__ = ["frame", "new_savepoint", "open_savepoint", "take_savepoint"]
