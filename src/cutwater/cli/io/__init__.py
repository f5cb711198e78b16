"""Reads the input of commands from standard input and files, and prints their results: lines, JSON, tables.

Not here: options (``cli.framework``).
"""
