"""Makes a Spark session and provides what its processes need: Java, Spark itself, connections to logs, and the holder
process of an embedded log.

Not here: what queries read and write (``spark.source``, ``spark.sink``). The public name ``cutwater.spark.session`` is
the function of module ``session``.
"""
