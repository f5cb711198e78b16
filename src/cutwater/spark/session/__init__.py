"""A Spark session, and what its processes need: Java, Spark itself, connections to logs, the holder of an embedded log.

Not here: what queries read and write (``spark.source``, ``spark.sink``). ``cutwater.spark.session`` as a public name is
the function of module ``session``.
"""
