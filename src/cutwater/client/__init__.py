"""The client library: append, subscribe, read, produce; with asyncio (``AsyncClient``) and without (``Client``).

The public names are those of the package ``cutwater`` itself.
"""
