"""In the place of the process of an errand: see ``agent_job_program``."""

from __future__ import annotations

import sys

from tests.integration.agent_job_program import errand

if __name__ == "__main__":
    errand(int(sys.argv[1]))
