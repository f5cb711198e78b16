"""Writing the format ``cutwater``: tasks stage rows, the driver publishes them together.

Not here: the sink of a pipeline (``spark.pipeline.sink``).
"""
