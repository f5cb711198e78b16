"""Calls and streams on one connection: those that this side makes, and those that it answers.

``credits`` is the arithmetic of flow control, ``outbox`` collects what is written in one turn of the event loop.
Not here: the transport below (``wire.connection``) and the methods above (``protocol``).
"""
