"""Reads the format ``cutwater``: the range of a micro-batch, the part that each task reads, and its Arrow batches.

Not here: the source of a pipeline (``spark.pipeline.source``).
"""
