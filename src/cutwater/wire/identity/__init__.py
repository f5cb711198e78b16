"""Establishes which peer is at the other end: the handshake, tokens, TLS, key pairs of servers, and guards of methods.

``protocol.method_access`` is the table that the guards enforce.
Not here: which connections a listener accepts (``wire.listen.gate``).
"""
