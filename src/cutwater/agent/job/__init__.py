"""What runs in the processes of a job: the supervisor of an attempt, or an errand about a job.

Not here: how such processes are started and ended, which ``cutwater.agent.processes`` has.
"""
