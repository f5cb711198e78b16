"""What may be asked of whom: the methods of storage nodes and of the metadata repository, as data.

``methods`` says how a method is described, ``storage_api``, ``scan_api`` and ``metadata_api`` list them,
``method_access`` says which peers may call each, ``errors`` says how errors travel.
Not here: connections and bytes (``wire``), handlers (``storagenode``, ``metadata``).
"""
