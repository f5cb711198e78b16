"""What metadata nodes do with internal topics of jobs: they read them, and the leader copies programs and trims.

Not here: the audit (``audit_writer``), and the rule that no trim loses a live program (``core.order.program_trims``).
"""
