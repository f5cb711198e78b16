"""The files of a replica, and the volumes that hold them: segments, commit contexts, hard state, staged parts.

``interface`` is what a storage node needs; ``replica_storage`` implements it.
Not here: the bytes of an entry (``format``), decisions about what to store (``core``), threads (``storagenode``).
"""
