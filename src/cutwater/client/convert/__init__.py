"""From Python values and Arrow data to the bytes of a batch. A value that storing would change is refused.

``schemas`` has what the records of a topic look like. Not here: bytes of stored entries (``format``).
"""
