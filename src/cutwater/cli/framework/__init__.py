"""The parts of commands: options that several share, exit codes, the configuration file, the target cluster.

Not here: commands (``cli.commands``), and formats of input and output (``cli.io``).
"""
