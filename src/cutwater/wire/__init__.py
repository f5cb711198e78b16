"""Transport: connections that carry calls and streams, over TCP, TLS, one event loop or memory.

``messages`` and ``codec`` say what bytes look like, ``connection`` puts everything together on one transport.
``calls`` has requests and streams, ``identity`` says which peer is there, ``listen`` accepts connections.
Not here: which methods exist (``protocol``) and what they do (``storagenode``, ``metadata``).
"""
