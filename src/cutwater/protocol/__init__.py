"""The methods of storage nodes and of the metadata repository, as data.

``methods`` is how a method is described; ``storage_api``, ``scan_api`` and ``metadata_api`` list the methods;
``method_access`` says which peers may call each, and with which rights (``needs``); ``errors`` is how errors travel.
Not here: connections and bytes (``wire``), handlers (``storagenode``, ``metadata``).
"""
