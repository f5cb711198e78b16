"""How a client reaches a cluster: credentials, the catalog, connections to nodes, the metadata repository.

``topics`` and ``cursors`` are calls to the metadata repository; ``holder_file`` finds the process that has an embedded
log open. Not here: connections as such (``wire``).
"""
