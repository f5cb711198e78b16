"""The agent: runs the jobs that the cluster gives to this machine, as processes of their own.

``agent_state`` and ``job_work`` decide, without I/O; ``agent`` carries their effects out. ``processes`` starts, limits
and ends processes, and has the watchdog; ``job`` is what runs in the processes of a job. Not here: supervising a
program, which ``cutwater.jobs`` has. The agent itself never imports a program of a user, and listens nowhere.
"""
