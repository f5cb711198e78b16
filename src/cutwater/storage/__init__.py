"""Files of a storage node: its volumes, their replicas (``replica``) and staged parts.

``files`` are the operations that everything here is built on, ``format`` the layouts of bytes.
Not here: the bytes of an entry (``format``), decisions about what to store (``core``), threads (``storagenode``).
"""
