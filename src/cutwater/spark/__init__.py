"""Cutwater on Apache Spark: ``session``, ``register``, ``start`` and the format ``cutwater``."""

from cutwater.pipeline.local.spark_import import no_spark

try:
    from cutwater.spark.session.session import register, session, start
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("pyspark", "py4j"):
        raise
    raise ModuleNotFoundError(no_spark("cutwater.spark needs PySpark", error), name=error.name) from error

__all__ = ["register", "session", "start"]
