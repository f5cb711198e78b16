"""Makes the folder in which Spark's processes find Spark: links to everything except PySpark's archive of its sources.

Spark lets its Python processes import PySpark from that archive. Each process compiles what it imports again, because
an archive cannot store compiled files; this takes more than half of the start of a process. Without the archive, the
processes import the installed package, which stores its compiled files.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pyspark

LINKED = ("bin", "conf", "jars")
"""The folders of an installation that sessions need."""


def provide_home() -> None:
    """Set ``SPARK_HOME``, unless the environment already sets it or the links cannot be made. Without it, Spark starts
    slower."""
    installed = Path(pyspark.__file__).resolve().parent
    if "SPARK_HOME" in os.environ or not (installed / "jars").is_dir():
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Several environments of one user may each have a PySpark.
    name = f"spark-{pyspark.__version__}-{zlib.crc32(os.fsencode(installed)):08x}"
    try:
        home = Path(cache).expanduser() / "cutwater" / name
        home.mkdir(parents=True, exist_ok=True)
        for part in LINKED:
            if (installed / part).is_dir():
                _link(home / part, installed / part)
    except (OSError, RuntimeError):
        return
    os.environ["SPARK_HOME"] = str(home)


def _link(place: Path, target: Path) -> None:
    """Make the link. Other processes may make it at the same time."""
    if place.is_symlink() and place.readlink() == target:
        return
    made = place.with_name(f"{place.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(target)
    made.replace(place)
