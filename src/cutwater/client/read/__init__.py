"""Reads other than subscriptions: single records, large ranges, positions, watermarks.

``records`` defines what all readers return. Not here: readers that follow the log (``client.subscribe``).
"""
