"""Stores of decisions: one interface, implemented in SQLite, etcd and memory; one conformance suite runs on all.

``open_store`` opens the store that an address names; ``encoding`` defines how decisions become bytes.
Not here: what decisions mean (``core.order.state``).
"""
