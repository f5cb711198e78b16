"""Drives one replica: carries out its effects, and writes to its files in a thread or on the event loop.

Not here: the replica itself, which is pure (``core.replica.replica``), and its files (``storage.replica``).
"""
