"""Tools for tests, shipped with the package: the simulator, faulty files and faulty links.

``simulate`` and ``demo`` are programs. ``simulator`` runs a whole cluster in one thread.
Not here: tests (``tests/``), and load on real clusters (``benchmarks/``). No other part of the package imports from
this folder.
"""
