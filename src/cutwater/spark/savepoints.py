"""The public name of what ``cutwater.spark.savepoint.savepoints`` offers to users: docs/savepoints.md tells of it."""

from __future__ import annotations

from cutwater.spark.savepoint.savepoints import frame, new_savepoint, open_savepoint, take_savepoint

__all__ = ["frame", "new_savepoint", "open_savepoint", "take_savepoint"]
