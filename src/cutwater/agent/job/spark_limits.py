"""Keeps Spark within the limits under which the agent has put the processes of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cutwater.agent.job.job_setup import LimitsSetup

DRIVER_MEMORY = "spark.driver.memory"
HEAP_SHARE = 0.4
"""Share of the memory that the heap of the JVM may take. The rest is for what the JVM has outside of it, such as the
state store, and for the Python processes: the driver, the planner, and one worker for each task."""
HEAP_MIB_MIN = 512
"""Spark refuses to start with less than 450 MiB."""


def conf_within(conf: Mapping[str, str], limits: LimitsSetup) -> dict[str, str]:
    """Return the settings of Spark. What the user gives stays as it is."""
    if not limits.memory_bytes or DRIVER_MEMORY in conf:
        return dict(conf)
    heap = max(HEAP_MIB_MIN, int(limits.memory_bytes * HEAP_SHARE) >> 20)
    return {**conf, DRIVER_MEMORY: f"{heap}m"}


def tasks_within(limits: LimitsSetup) -> int | None:
    """Return how many tasks may work at once on this machine, or None if any number may."""
    return max(1, math.ceil(limits.cpus)) if limits.cpus else None
