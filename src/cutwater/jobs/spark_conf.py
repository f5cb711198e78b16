"""Parses and checks the settings of Spark that users give with ``--conf`` and ``run(conf=…)``.

A setting goes to Spark as it is: cores, memory, dynamic allocation, file systems. Three kinds are refused, before
anything is started: settings on which the guarantees of pipelines rest, settings that an option of ours decides, and
secrets, because Spark gets settings as arguments of a process, which everybody on the machine can list, and a job
stores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cutwater.errors import InvalidArgument

CONF_MAX: Final = 256
CONF_CHARS_MAX: Final = 16_384
"""Length of one setting, name and value together. Linux takes 131,071 bytes as one argument of a process."""

UI_ENABLED: Final = "spark.ui.enabled"
UI_PORT: Final = "spark.ui.port"
UI_FILTERS: Final = "spark.ui.filters"
ON_THIS_MACHINE: Final = ("spark.driver.host", "spark.driver.bindAddress")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

_ANSWERED: Final[Mapping[str, str]] = {
    "spark.master": "say where Spark runs with --master (in Python: run(spark=cutwater.spark.session(master=…)))",
    "spark.app.name": "an application has the name of its pipeline",
    "spark.submit.deployMode": "the driver runs where the job runs: leave it out",
    "spark.remote": "pipelines need a classic session, not Spark Connect: leave it out",
    "spark.api.mode": "pipelines need a classic session, not Spark Connect: leave it out",
    "spark.sql.shuffle.partitions": "say how many tasks work at once with --parallelism (parallelism=… in Python)",
    "spark.sql.streaming.minBatchesToRetain": "say how many micro-batches are kept with --retain (retain=… in Python)",
    "spark.sql.streaming.checkpointLocation": "name the checkpoint with --checkpoint (checkpoint=… in Python)",
    "spark.pyspark.python": (
        "Spark's Python processes run the interpreter of the pipeline. It has to be at the same path on every machine "
        "that runs tasks: leave the setting out"
    ),
    "spark.pyspark.driver.python": "the driver is the pipeline's own process: leave it out",
}
"""Settings that something else decides, with what to do instead."""

_CHECKPOINT: Final = "checkpoints and savepoints depend on it, and it is tested with this value only: leave it out"
_WORKERS: Final = "Spark's Python processes need the value that Cutwater sets: leave it out"
_OURS: Final[Mapping[str, str]] = {
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT,
    "spark.sql.streaming.stateStore.providerClass": _CHECKPOINT,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": _CHECKPOINT,
    "spark.sql.streaming.stateStore.checkpointFormatVersion": _CHECKPOINT,
    "spark.sql.streaming.stateStore.encodingFormat": _CHECKPOINT,
    "spark.sql.streaming.commitProtocolClass": _CHECKPOINT,
    "spark.sql.session.timeZone": "times of a pipeline are in UTC: leave it out",
    "spark.sql.execution.arrow.pyspark.enabled": _WORKERS,
    "spark.sql.execution.pyspark.python": _WORKERS,
    "spark.python.authenticate.socketTimeout": _WORKERS,
    "spark.python.daemon.module": _WORKERS,
    "spark.python.worker.module": _WORKERS,
    "spark.python.use.daemon": _WORKERS,
    "spark.python.unix.domain.socket.enabled": _WORKERS,
}
"""Settings on which what pipelines promise rests, with the reason."""

# The first expression is the one by which Spark hides values in its pages (spark.redaction.regex).
_SECRET: Final = re.compile(
    r"secret|password|token|access[._]?key|private[._]?key|api[._]?key|passphrase", re.IGNORECASE
)
_NO_SECRET: Final = re.compile(r"(file|path|dir|provider|enabled|class|keyref\..*|\.secrets\..*)$", re.IGNORECASE)
"""Names that only look like those of secrets: they name a file, a class, or a secret of Kubernetes."""
_PLAIN_VALUE: Final = re.compile(r"(true|false|\d+(ms|s|m|min|h|d)?)?", re.IGNORECASE)
_TOKEN: Final = re.compile(r"cwt_[0-9a-f]+_[0-9a-f]+")
_PASSWORD_IN_ADDRESS: Final = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_NAME: Final = re.compile(r"spark\.[A-Za-z0-9_.\-]*[A-Za-z0-9_\-]")


def parse_conf(given: Iterable[str]) -> dict[str, str]:
    """Return settings that were given as ``key=value``, one in each text."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            # The value stays out of messages: it may be a secret.
            raise InvalidArgument(
                f"--conf is key=value, such as --conf spark.executor.memory=4g: there is no {'=' if name else 'key'} "
                f"in what was given{f' for {name!r}' if name and len(name) <= 80 and not _TOKEN.search(name) else ''}"
            )
        if found.get(name, value) != value:
            raise InvalidArgument(f"--conf gives the setting {name!r} twice, with two values: give it once")
        found[name] = value
    return found


def check_conf(conf: Mapping[str, str], master: str = "") -> None:
    """Raise if these settings cannot be given to Spark. ``master`` is where Spark runs, empty for this machine."""
    if len(conf) > CONF_MAX:
        raise InvalidArgument(f"there are {len(conf)} settings of Spark, and {CONF_MAX} is the most: leave some out")
    for name, value in conf.items():
        _check_form(name, value)
        _check_secret(name, value)
        reason = _ANSWERED.get(name) or _OURS.get(name)
        if reason is not None:
            raise InvalidArgument(f"the setting {name!r} of Spark cannot be given: {reason}")
        if name in ON_THIS_MACHINE and is_on_this_machine(master) and value not in LOOPBACK:
            raise InvalidArgument(
                f"the setting {name!r} of Spark is {value!r}, and Spark runs on this machine alone, where it listens "
                "on loopback only: leave it out, or name a cluster with --master"
            )


def is_on_this_machine(master: str) -> bool:
    """Report whether Spark with this master runs on this machine alone."""
    return not master or master.startswith("local")


def _check_form(name: Any, value: Any) -> None:
    if not isinstance(name, str) or not isinstance(value, str):
        raise InvalidArgument(
            f"settings of Spark are texts: {name!r} has {type(value).__name__}, so write 'true', '4' or '2g'"
        )
    if len(name) + len(value) > CONF_CHARS_MAX:
        raise InvalidArgument(
            f"the setting {name[:80]!r} of Spark has {len(name) + len(value)} characters, and {CONF_CHARS_MAX} is the "
            "most: put long values into a spark-defaults.conf (SPARK_CONF_DIR)"
        )
    if not name.startswith("spark."):
        meant = f"spark.{name}"
        raise InvalidArgument(
            f"{name[:80]!r} is no setting of Spark, because its name does not begin with 'spark.'"
            + (f": is {meant!r} meant?" if _NAME.fullmatch(meant) and len(meant) <= 120 else "")
            + " Settings of Hadoop get 'spark.hadoop.' before their names"
        )
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{name[:120]!r} is no name of a setting of Spark: it has letters, digits, '.', '_', '-'")
    if "\0" in value or "\n" in value:
        raise InvalidArgument(f"the value of the setting {name!r} of Spark has a line break or a null character")


def _check_secret(name: str, value: str) -> None:
    is_named = bool(_SECRET.search(name)) and not _NO_SECRET.search(name) and not _PLAIN_VALUE.fullmatch(value)
    if is_named or _TOKEN.search(value) or _PASSWORD_IN_ADDRESS.search(value):
        raise InvalidArgument(
            f"the setting {name!r} of Spark seems to contain a secret, which other users of the machine would see in "
            "the arguments of the process, and which the job would store: put it into a spark-defaults.conf that only "
            "its user can read (chmod 600; SPARK_CONF_DIR names its directory), or into a file or a credential "
            "provider that a setting names. A token of Cutwater belongs into --token-file. If others may have seen the "
            "secret, replace it"
        )


def wants_ui(conf: Mapping[str, str]) -> bool:
    """Report whether Spark's pages are switched on."""
    return conf.get(UI_ENABLED, "").lower() == "true"


def with_ui(conf: Mapping[str, str], port: int | None) -> dict[str, str]:
    """Return the settings with Spark's pages switched on, at this port; 0 takes a free one. None changes nothing."""
    if port is None:
        return dict(conf)
    for name, value in ((UI_ENABLED, "true"), (UI_PORT, str(port))):
        if conf.get(name, value).lower() != value:
            raise InvalidArgument(f"--spark-ui {port} and --conf {name}={conf[name]} contradict each other: give one")
    return {**conf, UI_ENABLED: "true", UI_PORT: str(port)}


def refuse_open_ui(conf: Mapping[str, str]) -> None:
    """Raise if Spark's pages would be served although access control is on: they know no users."""
    if wants_ui(conf) and not conf.get(UI_FILTERS):
        raise InvalidArgument(
            "Spark's pages are switched on (--spark-ui, spark.ui.enabled) and a token is in use: the pages know no "
            "users, so everybody on this machine could read plans and errors of the pipeline, which may contain "
            "records. Leave them off and let Spark write an event log (--conf spark.eventLog.enabled=true --conf "
            f"spark.eventLog.dir=DIR) for its history server, or let {UI_FILTERS} name a servlet filter that "
            "authenticates users"
        )
