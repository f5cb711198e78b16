"""Cutwater on Apache Spark: ``session``, ``register`` and the format ``cutwater``."""

from cutwater.spark.session import register, session

__all__ = ["register", "session"]
