"""Runs a pipeline in one thread, for ``Pipeline.test``, and has the checks that it shares with runs on Spark.

``spark_import`` imports modules above this package when they are needed.
"""
