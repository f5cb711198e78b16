"""One framed protocol for everything that travels between processes of a cluster and its clients.

From the bottom up; each module imports only those above it:

1. ``errors``: what can go wrong here, and how any error of the tree travels and comes back as itself.
2. ``options``: every limit, with its unit; ``Budget``, the bytes that all connections of a listener share.
3. ``frames``: the kinds of frames and what their headers say. ``codec``: bytes in, frames out, pure.
4. ``credits``: the arithmetic of flow control, pure: nobody sends what the other has no room for.
5. ``methods``: what can be asked (``Method``, ``StreamMethod``, ``Notice``), the table of handlers, ``Reply``.
6. ``outbox``: what waits to be written, in one write per turn of the event loop. ``deadlines``: one timer for many.
   ``keepalive``: whether the peer is still there, pure. ``states``: the life of a connection.
7. ``calling``: calls that this side makes. ``serving``: calls that it answers. ``streams``: both ends of a stream.
8. ``handshake`` and ``auth``: who is there. ``connection``: all of the above on one transport.
9. ``client`` and ``server``: TCP and TLS. ``memory``: the same without sockets, and with faults.
"""
