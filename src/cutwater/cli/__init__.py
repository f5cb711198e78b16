"""The command line: parse, call, render. ``main`` is the root and imports a command when it is used.

``commands`` has one file per noun, ``framework`` what makes a function a command, ``io`` what is read and printed.
Not here: what commands do (``client``, ``admin``, ``jobs``, ``savepoints``).
"""
