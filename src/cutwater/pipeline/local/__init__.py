"""Runs a pipeline in one thread, for ``Pipeline.test``, and has the checks that it shares with runs on Spark.

``elsewhere`` and ``spark_import`` import modules above this package when they are needed.
"""
