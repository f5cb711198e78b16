"""Handles checkpoints and savepoints on Spark: what a checkpoint holds, how savepoints are taken, how pipelines start.

Not here: the format of savepoints, which needs no Spark (``savepoints``).
"""
