"""Publishing whole batches: many tasks write staged parts, one driver publishes them together.

Not here: the decisions about them (``core.publish``).
"""
