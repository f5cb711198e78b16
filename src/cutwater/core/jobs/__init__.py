"""Jobs: pipelines that the cluster keeps running on agents, folded from decisions (ADR 0062).

``job_spec``, ``agents``, ``job_records`` and ``operations`` are the data; ``job_decisions`` and ``job_registry`` fold
it; ``job_requests`` says what may be asked and answered. Not here: processes, which ``cutwater.jobs`` has.
"""
