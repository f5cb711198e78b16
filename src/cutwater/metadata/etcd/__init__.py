"""The part of etcd that the metadata store needs: its messages, and a client that fails over among its members.

``etcd_pb2`` is generated from ``etcd.proto``, and its descriptors hold the path of this folder.
Not here: decisions in etcd (``metadata.stores.etcd_store``).
"""
