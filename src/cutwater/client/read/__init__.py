"""Reads that are no subscription: single records, large ranges, positions, watermarks.

``records`` has what all readers get. Not here: readers that stay (``client.subscribe``).
"""
