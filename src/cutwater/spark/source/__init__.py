"""Reading the format ``cutwater``: which range a micro-batch has, which task reads what, and its Arrow batches.

Not here: the source of a pipeline (``spark.pipeline.source``).
"""
