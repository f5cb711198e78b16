"""The commands, one file per noun. ``cli.main`` lists them and imports each when it is used.

A command parses, calls and renders. Not here: options that several commands share (``cli.framework``).
"""
