"""Cutwater on Apache Spark: ``session``, ``register``, ``start`` and the format ``cutwater``."""

from cutwater.spark.session import register, session, start

__all__ = ["register", "session", "start"]
