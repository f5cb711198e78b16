"""Appends without a producer: from the arguments of a call to an acknowledgement, an error, or an unknown outcome.

``router`` chooses how an append is sent, ``batcher`` joins small appends, ``sender`` sends each batch at most once.
Not here: appends that are sent again (``client.produce``).
"""
