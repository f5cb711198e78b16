"""Operations on a cluster: typed, and without output. The command line, tests and benchmarks use them.

``operations`` changes a cluster, ``verification`` and ``publish_audit`` check it, ``local_cluster`` starts one.
Not here: options and output of commands (``cli``).
"""
