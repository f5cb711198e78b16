"""What the leader sees of storage nodes, and what it plans for log streams that need repair.

These modules answer questions and propose decisions. ``core.order.leader`` makes the decisions. Nothing here is stored:
a new leader starts with a fresh view.
"""
