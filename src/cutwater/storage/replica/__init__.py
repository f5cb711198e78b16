"""The files of one replica: segments of entries, commit contexts, hard state.

``replica_storage`` is what a storage node uses; the other modules are its parts.
Not here: layouts of bytes (``storage/format``), operations on files (``storage/files``), volumes (``storage/volume``).
"""
