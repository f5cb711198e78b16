"""The command line: parse, call, render. ``main`` is the root and imports a command at its first use.

``commands`` has a file per noun or group of verbs, ``framework`` turns functions into commands, ``io`` reads input and
prints results. Not here: what commands do (``client``, ``admin``, ``jobs``, ``savepoints``).
"""
