"""Appends: from the arguments of a call to an acknowledgement, an error, or an unknown outcome.

``router`` prepares an append, ``batcher`` joins small appends, ``sender`` sends each batch. Not here: what a producer
adds, which numbers its batches and sends them again (``client.produce``).
"""
