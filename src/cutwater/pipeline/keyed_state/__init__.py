"""Manages state by key: what functions declare and use, how it is kept in memory, and how it is packed into chunks.

``keys`` defines how keys become bytes and key groups. Not here: where chunks are stored (``spark.pipeline``,
``savepoints``).
"""
