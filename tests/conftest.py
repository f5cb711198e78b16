"""How hypothesis runs here: new examples each time, and a failure says how to have it again.

A failing example is printed with a ``@reproduce_failure`` line that replays it anywhere; on the same machine it also
comes first in the next run, from the example database. ``make test ARGS=--hypothesis-profile=thorough`` tries harder.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

EXAMPLES = Path(__file__).resolve().parent.parent / ".hypothesis" / "examples"

# No deadline, and no complaint about slow examples: neither says anything about the code on a machine that others use.
settings.register_profile(
    "standard",
    database=DirectoryBasedExampleDatabase(EXAMPLES),
    deadline=None,
    derandomize=False,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("standard"), max_examples=5_000)
settings.load_profile("standard")
