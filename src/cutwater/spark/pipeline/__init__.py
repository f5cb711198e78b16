"""Runs pipelines on Spark: one query with one source, one stateful operator per level, and one sink.

``runner`` starts the query, ``planning`` chooses ranges, ``operator`` and ``state`` run a level in a slice. Not here:
what operators do, which is pure (``pipeline``).
"""
