"""Calls and streams on one connection: the ones that this side makes, and the ones that it answers.

``credits`` is the arithmetic of flow control; ``outbox`` collects the writes of one turn of the event loop.
Not here: the transport below (``wire.connection``) and the methods above (``protocol``).
"""
