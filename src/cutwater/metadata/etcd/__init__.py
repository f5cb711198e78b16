"""What the metadata store needs of etcd: its messages, and a client that fails over among its members.

``etcd_pb2`` is generated from ``etcd.proto``, and its descriptors hold the path of this folder.
Not here: decisions in etcd (``metadata.stores.etcd_store``).
"""
