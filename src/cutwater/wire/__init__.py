"""Transport: connections that carry calls and streams, over TCP, TLS or within one event loop.

``messages`` and ``codec`` define the bytes, ``connection`` puts everything together on one transport.
``calls`` has requests and streams, ``identity`` establishes which peer is connected, ``listen`` accepts connections.
Not here: which methods exist (``protocol``) and what they do (``storagenode``, ``metadata``).
"""
