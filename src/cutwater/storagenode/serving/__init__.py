"""Serves committed records to readers: ranges, pushes as records are committed, scans of large ranges.

Not here: appends (``storagenode.server``) and copies for peers (``storagenode.repair.syncing``).
"""
