"""What stored and sent bytes mean: entries, checksums, bodies of batches, columns cut out of them.

Storage nodes, clients and readers on Spark share this code, so bytes mean the same to all of them. ``errors`` has what
reading such bytes, and the files around them, can find wrong.
Not here: files and their layout (``storage``), messages and their frames (``wire``).
"""
