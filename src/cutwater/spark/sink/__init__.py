"""Writes the format ``cutwater``: tasks stage rows, and the driver publishes them together.

Not here: the sink of a pipeline (``spark.pipeline.sink``).
"""
