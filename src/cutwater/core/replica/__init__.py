"""One replica of a log stream: it gives out LLSNs, stores, commits, seals, unseals and learns from peers.

``replica`` is the state machine; ``chain_head`` and ``learner`` are its two special roles. ``recovery`` and ``opening``
interpret the files of a replica after a restart. Not here: files (``storage``) and threads, connections and timers
(``storagenode``).
"""
