"""One replica of a log stream: it gives out LLSNs, stores, commits, seals, unseals and learns from peers.

``replica`` is the state machine, on top of the positions in ``replica_log``. ``chain_head`` and ``learner`` are its two
special roles: each names what it needs of the replica. ``recovery`` and ``opening`` interpret the files after a
restart. Not here: files (``storage``) and threads, connections and timers (``storagenode``).
"""
