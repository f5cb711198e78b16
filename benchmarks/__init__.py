"""Measures Cutwater next to references and writes ``docs/benchmarks.md``: ``make bench`` or ``python -m benchmarks``.

Each module is a section of the report, or a part of one. It runs from a checkout and is not in the wheel.
"""
