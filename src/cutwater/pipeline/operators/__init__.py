"""Implements operators without side effects: what happens to records in one slice, level by level.

``executor`` runs a plan; the other modules are kinds of operators. Not here: Spark (``spark.pipeline``).
"""
