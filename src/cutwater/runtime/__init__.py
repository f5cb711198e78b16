"""Access to the machine for every shell: clocks, chance, threads, sockets, processes, the event loop, permissions.

``system.py`` is the port through which the log uses the machine, and a simulator replaces it.

Shells are the parts that touch files, sockets or processes: storage, wire, servers, client, admin, jobs, spark, cli.
The pure parts (``core``, ``format``, ``protocol`` and ``pipeline``) import nothing from here: they get time and
results as arguments. Nothing in this folder knows records, log streams or messages.
"""
