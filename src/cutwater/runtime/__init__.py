"""Access to the machine for every shell: processes, the event loop, threads, deadlines, permissions of files.

Shells are the parts that touch files, sockets or processes: storage, wire, servers, client, admin, jobs, spark, cli.
The pure parts (``core``, ``format``, ``protocol`` and ``pipeline``) import nothing from here: they get time and
results as arguments. Nothing in this folder knows records, log streams or messages.
"""
