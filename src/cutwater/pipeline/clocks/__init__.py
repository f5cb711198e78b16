"""Handles event time in a pipeline: watermark strategies, and the places in a range of the log where clocks step.

Not here: the rule of the watermark itself (``core.read.watermark``).
"""
