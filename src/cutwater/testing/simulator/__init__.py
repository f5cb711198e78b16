"""A simulated cluster: virtual time, a network, disks and processes that fail, and checks of the guarantees.

The core runs as shipped; ``servers`` and ``clients`` drive it instead of the real ones.
One seed gives one run. Not here: planted bugs (``tests/simulation/``).
"""
