"""Restores what is missing or damaged: syncs between replicas, repair of damage, the background scrub.

Not here: when a replica has to learn (``core.replica.learner``) and which peer it learns from (``core.order``).
"""
