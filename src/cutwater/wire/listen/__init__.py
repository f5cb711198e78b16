"""Accepts connections: the listener, its limits, checks of listen addresses, and the HTTP listener for metrics.

Not here: the connections themselves (``wire.connection``).
"""
