"""Converts Python values and Arrow data to the bytes of a batch. A value that storing would change is refused.

``schemas`` defines the form of a topic's records. Not here: bytes of stored entries (``format``).
"""
