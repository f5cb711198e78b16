"""What commands read from standard input and files, and what they print: lines, JSON, tables.

Not here: options (``cli.framework``).
"""
