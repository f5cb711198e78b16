"""``python -m tests.spark.take_and_wait CHECKPOINT TARGET``: takes a savepoint up to its last step, and waits there."""

from __future__ import annotations

import sys
import time
from typing import Any

from cutwater.spark.savepoint import savepoints


def wait(*_: Any) -> Any:
    print("about to finish", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    savepoints.finish = wait
    savepoints.take_savepoint(sys.argv[1], sys.argv[2], spark=savepoints.session("half", master="local[1]"))
