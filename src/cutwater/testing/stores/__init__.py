"""Metadata stores that fail: the shipped stores over a model of etcd, and over SQLite on a fault-injecting file layer.

Delays are sleeps of the running event loop and all chance comes from a given generator, so a run under virtual time can
be repeated. Not here: the stores themselves (``metadata.stores``) and the simulated disk (``testing.fault_files``).
"""
