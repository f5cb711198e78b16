"""Stores of decisions: one interface, kept in SQLite, in etcd or in memory; one conformance suite runs on all.

``open_store`` finds the store that an address names, ``encoding`` says how decisions become bytes.
Not here: what decisions mean (``core.order.state``).
"""
