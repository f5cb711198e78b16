"""The leader of the metadata repository: reports and requests go in, decisions and messages come out.

``leader`` is the state machine, ``decisions`` and ``state`` are what it stores, ``cut`` is the arithmetic of the order.
``planning`` holds what the leader knows of nodes and what it plans for log streams. Not here: replicas
(``core.replica``), runs and groups (``core.publish``), the store of decisions (``metadata.stores``).
"""
