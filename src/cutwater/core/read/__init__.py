"""Reading, pure: merges log streams by GLSN, finds positions, and computes event time as a function of a position.

Records come in as data. Connections to replicas are in ``client.subscribe`` and ``client.read``.
"""
