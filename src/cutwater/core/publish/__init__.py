"""Publishing exactly once: runs, their decided batches, groups in log streams, staged parts.

Everything here is data, or a pure function of the stored decisions. Storage nodes keep staged parts
(``storagenode.publish``), and clients write them (``client.publish``).
"""
