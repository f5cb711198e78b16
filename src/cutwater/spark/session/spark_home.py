"""Where Spark's processes find Spark: a folder of links that leaves out PySpark's own archive of its sources.

Spark lets its Python processes import PySpark from that archive, and each of them compiles what it imports anew, as an
archive cannot keep the outcome: more than half of what the start of such a process costs. Without the archive they
import the installed package, of which the compiled files are kept.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pyspark

LINKED = ("bin", "conf", "jars")
"""All of an installation that sessions need."""


def provide_home() -> None:
    """Set ``SPARK_HOME``, unless someone has chosen a Spark, or this one cannot be linked to: then it starts slower."""
    installed = Path(pyspark.__file__).resolve().parent
    if "SPARK_HOME" in os.environ or not (installed / "jars").is_dir():
        return
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Several environments of one user may have a PySpark each.
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
    """Others may do the same at the same time."""
    if place.is_symlink() and place.readlink() == target:
        return
    made = place.with_name(f"{place.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(target)
    made.replace(place)
