"""Tools for tests, shipped with the package: the simulator, faulty files and links, load on real clusters.

``simulate`` and ``demo`` are programs. ``simulator`` runs a whole cluster in one thread.
Not here: tests (``tests/``) and benchmarks (``benchmarks/``). No other part of the package imports from this folder.
"""
