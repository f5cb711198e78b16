"""The client library: ``async_client`` for asyncio, ``client`` for programs without it, derived by ``blocking``.

The public names are those of the package ``cutwater`` itself. ``append``, ``produce``, ``subscribe``, ``read`` and
``publish`` each do one thing with records; ``convert`` turns values into stored bytes; ``cluster`` reaches servers.
Not here: operations on clusters (``admin``) and servers in this process (``embedded``).
"""
