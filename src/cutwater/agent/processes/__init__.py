"""Processes of jobs: how they are started, marked, limited and ended, and the watchdog that ends them in time.

Not here: what runs in them, which ``cutwater.agent.job`` has.
"""
