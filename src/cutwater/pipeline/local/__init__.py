"""Runs a pipeline in one thread, for ``Pipeline.test``, and the checks that it shares with runs on Spark.

``elsewhere`` and ``spark_import`` look up modules above this package when they are needed.
"""
