"""What the leader sees of storage nodes, and what it plans for log streams that are not as they should be.

These modules answer questions and propose decisions. ``core.order.leader`` makes the decisions, and nothing here is
stored: a new leader starts with a fresh view.
"""
