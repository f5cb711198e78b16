"""Named producers: records are buffered, numbered, sent again if need be, and stored exactly once.

Not here: the rules of a producer's session, which are pure (``core.producer_session``).
"""
