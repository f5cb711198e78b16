"""Subscriptions: one reader per log stream, merged by GLSN, as records or record batches.

Not here: the merge itself (``core.read.merge_reader``), single records and ranges (``client.read``).
"""
