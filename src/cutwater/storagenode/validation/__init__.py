"""Checks entries and batches before they get a place in the log, against limits and against the schema of the topic.

Not here: checksums of what is stored already (``storagenode.repair``), staged parts (``storagenode.publish``).
"""
