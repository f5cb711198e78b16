"""The protocol, pure: no clock, no randomness, no files, no sockets, no logging. Data in, data out.

One append, from here to there and back:

1. ``replica.Replica._append`` at the head gives the batch its LLSNs, registers the waiter, writes and forwards it.
   ``dedup.Deduplicator.find`` has looked whether a producer repeats itself.
2. ``Replica._replicate`` does the same at each backup of the chain; ``Replica._entries_durable`` moves the durable end
   once the bytes are on disk; ``Replica.report`` tells of it.
3. ``order.OrderLayer._take_report`` takes the reports in: ``reports.ReportBook`` keeps those that count, ``_examine``
   holds them against what was decided.
4. ``OrderLayer._decide`` makes the next cut with ``cut.make_cut`` and asks for it to be stored; ``order_state`` folds
   it, like every decision, into the state of the cluster.
5. After ``Stored`` the ``herald.Herald`` tells every storage node its part of the cut.
6. ``Replica._apply`` gives the records their GLSNs and acknowledges the append; ``_commit_durable`` notes when the
   commit context is on disk, after which ``history.CommitHistory`` may forget it.
7. ``subscription.Subscription`` hands the records to readers, in GLSN order, once every stream is known up to there;
   ``watermark.WatermarkClock`` says how far event time has come.

What can go wrong on the way: ``repair`` plans what to do with streams that are sealed or lack replicas, ``sync`` and
``learner`` copy what a replica lacks, ``recovery`` judges what a restart finds on disk, ``producer_session`` repeats
and moves a producer's batches.
"""
