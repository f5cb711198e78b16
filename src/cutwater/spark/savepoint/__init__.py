"""Checkpoints and savepoints on Spark: what a checkpoint holds, how savepoints are taken, how pipelines start from
them.

Not here: the format of savepoints, which needs no Spark (``savepoints``).
"""
