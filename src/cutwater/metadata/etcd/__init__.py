"""What the metadata store needs of etcd: its messages, and a client that fails over among its members."""
