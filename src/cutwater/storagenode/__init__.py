"""The storage node: turns the effects of replicas into files and messages.

``node`` holds the replicas and no sockets, ``server`` puts it on the network, ``start`` runs it as a process.
``replica``, ``serving``, ``repair``, ``publish`` and ``validation`` each perform one of its tasks.
Not here: what a replica decides (``core.replica``) and the layout of files (``storage``).
"""
