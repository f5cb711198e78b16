"""Reaches a cluster from a client: credentials, the catalog, connections to nodes, the metadata repository.

``topics`` and ``cursors`` are calls to the metadata repository; ``holder_file`` finds the process that has an embedded
log open. Not here: the connections themselves (``wire``).
"""
