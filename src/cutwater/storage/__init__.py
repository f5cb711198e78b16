"""The files of a replica, and the volumes that they lie on: segments, commit contexts, hard state, staged parts.

``interface`` says what a storage node needs; ``replica_storage`` keeps it in files, ``memory`` does not.
Not here: the bytes of an entry (``format``), decisions about what to store (``core``), threads (``storagenode``).
"""
