"""Publishing whole batches: many tasks write staged parts, one driver publishes them together.

Not here: what is decided about them (``core.publish``).
"""
