"""The protocol, pure: no clock, no randomness, no files, no sockets, no logging. Data in, data out.

``order`` holds the leader of the metadata repository, ``replica`` one replica of a log stream, ``publish`` runs and
groups, ``read`` merging and watermarks. Modules at this level are shared: messages, requests, the session of a
producer. Drivers carry out the effects: ``storagenode``, ``metadata`` and ``client``.
"""
