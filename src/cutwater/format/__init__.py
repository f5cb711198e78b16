"""The meaning of stored and sent bytes: entries, checksums, bodies of batches, and columns picked from them.

Storage nodes, clients and readers on Spark share this code, so bytes mean the same to all of them. ``errors`` has the
faults that can be found in these bytes and in the files around them.
Not here: files and their layout (``storage``), messages and their frames (``wire``).
"""
