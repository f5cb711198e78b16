"""Jobs: pipelines that the cluster keeps running on agents, folded from decisions.

``job_spec``, ``agents``, ``job_records`` and ``operations`` are the data; ``job_decisions`` and ``job_registry`` fold
it; ``job_requests`` and ``errands`` say what may be asked and answered. Not here: processes, which ``cutwater.jobs``
has.
"""
