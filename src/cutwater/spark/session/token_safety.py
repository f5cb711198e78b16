"""Decides whether tokens may be used in a Spark application, and keeps tokens out of what Spark shows.

A token never travels through Spark: options, plans and tasks name a file, and each process reads it where it runs (ADR
0055). What a token gives access to does travel: records between executors, and code from the driver. On one machine in
one JVM nothing of that leaves the process and its children. With any other master, Spark has to authenticate its
processes and to encrypt what they send and spill.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from cutwater.errors import InvalidArgument, Refused
from cutwater.runtime.local_files import write_secret
from cutwater.spark.options import TOKEN_FILE, TOKEN_FILE_VARIABLE, Where

AUTHENTICATE, IO_ENCRYPTION = "spark.authenticate", "spark.io.encryption.enabled"
ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
"""Either of these encrypts what Spark's processes send each other."""
_IN_ONE_JVM = re.compile(r"local(\[.*\])?")
_ON_ONE_MACHINE = re.compile(r"local(\[.*\]|-cluster\[.*\])?")
_TOKEN = re.compile(r"cwt_[0-9a-f]+_[0-9a-f]+")

_files: dict[str, Path] = {}
"""Files with tokens that this process was given as texts; they are removed when it ends."""


def settings_of(spark: SparkSession) -> dict[str, str]:
    """Return the settings with which Spark was started. They cannot change while it runs."""
    names = ("spark.master", AUTHENTICATE, *ENCRYPTION, IO_ENCRYPTION)
    return {name: str(spark.conf.get(name, "")) for name in names}


def why_no_tokens(settings: Mapping[str, str]) -> str:
    """Return why tokens are refused with these settings of Spark, and what to set; empty if they are not."""
    master = settings.get("spark.master", "")
    if _IN_ONE_JVM.fullmatch(master):
        return ""

    def is_on(name: str) -> bool:
        return settings.get(name, "").lower() == "true"

    missing = [name for name in (AUTHENTICATE, IO_ENCRYPTION) if not is_on(name)]
    if not any(map(is_on, ENCRYPTION)):
        missing.insert(len(missing) - (IO_ENCRYPTION in missing), ENCRYPTION[0])
    if not missing:
        return ""
    wanted = ", ".join(f"{name}=true" for name in missing)
    return (
        f"a token is in use, and Spark runs on {master or 'an unknown master'}, where its processes would exchange "
        f"code and records unprotected: start the session with {wanted}, as with cutwater.spark.session(master=…, "
        "config=…). A standalone cluster also needs one spark.authenticate.secret for its master, its workers and the "
        "driver, in a spark-defaults.conf that only their user can read"
    )


def refuse_unprotected(where: Where, why: str) -> None:
    """Raise if a token would be used although ``why`` speaks against it."""
    if why and where.token():
        raise Refused(why)


def refuse_tokens_in(settings: Mapping[str, str]) -> None:
    """Raise if a setting of Spark contains a token: Spark writes settings into event logs and shows them."""
    for name, value in settings.items():
        if _TOKEN.search(str(value)):
            raise InvalidArgument(
                f"the setting {name!r} of Spark contains a token, and Spark shows settings in its pages and event "
                f"logs: put the token into a file (chmod 600) and name it with option {TOKEN_FILE!r}, or with "
                f"{TOKEN_FILE_VARIABLE} in the environment. If others may have seen it, revoke it"
            )


def file_of(token: str | os.PathLike[str], settings: Mapping[str, str]) -> str:
    """Return the path of a file with this token for Spark's processes. A text is put into a file of this machine, which
    only this user can read; it is removed when this process ends."""
    if not isinstance(token, str):
        return str(Path(os.fspath(token)).absolute())
    if not token:
        return ""
    if not _ON_ONE_MACHINE.fullmatch(settings.get("spark.master", "")):
        raise InvalidArgument(
            f"the token was given as a text, and Spark runs on {settings.get('spark.master')}: put it into a file at "
            "the same path on every machine that runs tasks (chmod 600), and give its path, such as "
            "token=Path('/etc/cutwater/app.token') or --token-file"
        )
    path = _files.get(token)
    if path is None or not path.exists():
        directory = Path(tempfile.mkdtemp(prefix="cutwater-token-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        path = _files[token] = directory / "token"
        write_secret(path, token.encode("ascii", "replace") + b"\n")
    return str(path)
