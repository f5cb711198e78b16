"""What a leader does about jobs: it decides requests, assigns jobs to agents, and measures how long agents are silent.

Nothing here is stored. What has to outlive the leader is a decision, which ``core.jobs.job_registry`` folds.
"""
