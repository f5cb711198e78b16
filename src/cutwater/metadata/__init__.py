"""The metadata repository: the server around the leader, and its connections to storage nodes.

``server`` leads or follows, ``term`` drives one leader, ``start`` makes it a process. ``stores`` keeps the decisions,
``etcd`` has the messages of etcd and a client for them.
Not here: what the leader decides (``core.order``).
"""
