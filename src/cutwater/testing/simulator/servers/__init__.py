"""The servers of a simulated cluster: storage nodes, metadata nodes, and the disks and the store below them.

They drive the core as shipped. The network and the clock are in ``world``, clients and checks beside it.
"""
