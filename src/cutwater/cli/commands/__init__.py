"""The commands, one file per noun. ``cli.main`` lists them and imports each at its first use.

A command parses, calls and renders. Not here: options that several commands share (``cli.framework``).
"""
