"""Reading, pure: merging log streams by GLSN, finding positions, event time as a function of a position.

Records come in as data. Connections to replicas are in ``client.subscribe`` and ``client.read``.
"""
