"""Appends without a producer: from what a caller gives to an acknowledgement, an error, or an unknown outcome.

``router`` chooses the way, ``batcher`` joins small appends, ``sender`` sends each batch at most once.
Not here: appends that are sent again (``client.produce``).
"""
