"""Defines and checks the options of the format ``cutwater``. An error names the option, its value and what is
allowed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal, NoReturn

from msgspec import Struct

from cutwater.client.cluster.credentials import Access, tls_context, token_access
from cutwater.client.cluster.holder_file import directory_of
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.client.convert.encoding import COMPRESSIONS, Compression
from cutwater.client.convert.times import time_us
from cutwater.client.subscribe.stream_readers import Selection
from cutwater.core.read.watermark import IDLE_AFTER_US_DEFAULT, BoundedOutOfOrderness, Punctuated, Strategy
from cutwater.errors import InvalidArgument
from cutwater.types import GLSN, MILLISECOND, SECOND, CutTime

MIB = 1024 * 1024
PARTITION_BYTES_DEFAULT = 96 * MIB
TIMEOUT_US_DEFAULT = 120 * SECOND
_UNITS_US = {
    "us": 1,
    "ms": MILLISECOND,
    "s": SECOND,
    "m": 60 * SECOND,
    "h": 3_600 * SECOND,
    "d": 86_400 * SECOND,
}
_UNIT_NAMES = {
    "microsecond": "us",
    "millisecond": "ms",
    "second": "s",
    "minute": "m",
    "hour": "h",
    "day": "d",
}
_SIZES = {"": 1, "b": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}

End = Literal["earliest", "latest"]

TLS = ("tls.certificate", "tls.key", "tls.ca")
TOKEN_FILE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE = "token.file", "CUTWATER_TOKEN_FILE", "CUTWATER_TOKEN"
WHERE = ("servers", "path", "token", TOKEN_FILE, *TLS, "insecure", "timeout")
"""Options that name the log and the way to reach it, for reading and for writing."""
WHAT = ("subscribe", "subscribePattern", "columns", "includeHeaders")
FROM_TO = ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp", "failOnDataLoss")
HOW = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "maxPartitionBytes", "minPartitions", "onMalformed")
EVENT_TIME = ("watermark.bound", "watermark.idleAfter", "watermark.punctuated")
READING = (*WHERE, *WHAT, *FROM_TO, *HOW, *EVENT_TIME)
WRITING = (*WHERE, "topic", "name", "positionColumn", "compression", "replayOutput")
SPARKS_OWN = ("checkpointLocation", "queryName")
"""Options for writing that Spark itself reads and also passes on."""
TOKEN_IN_OPTIONS = (
    "option 'token' is refused, because Spark keeps options in plans, and shows them in logs and to other programs: "
    "put the token into a file that only its owner can use (chmod 600), on every machine with a task of the query, and "
    "name it with option 'token.file', or with CUTWATER_TOKEN_FILE in the environment of Spark's processes. If others "
    "may have seen the token, revoke it (`cutwater token revoke`) and make another one"
)


class TlsPaths(Struct, frozen=True):
    """PEM files: the authority of the servers, and the certificate of this client with its key, if it has one. Each
    process reads them where it runs."""

    authority: Path
    certificate: Path | None = None
    key: Path | None = None


class Where(Struct, frozen=True):
    """Which log, and how to reach it. Either ``servers`` or ``path`` is not empty. Spark sends this to tasks, so it
    names files with secrets, and has no secret itself."""

    servers: str = ""
    path: str = ""
    token_file: str = ""
    tls: TlsPaths | None = None
    insecure: bool = False
    timeout_us: int = TIMEOUT_US_DEFAULT

    @property
    def timeout(self) -> float:
        """The timeout in seconds."""
        return self.timeout_us / SECOND

    def options(self) -> dict[str, str]:
        """Return Spark options for ``where_of``."""
        found = {"servers": self.servers, "path": self.path, "timeout": f"{self.timeout_us}us"}
        found |= {TOKEN_FILE: self.token_file, "insecure": "true" if self.insecure else ""}
        if self.tls is not None:
            files = (self.tls.certificate, self.tls.key, self.tls.authority)
            found |= {name: "" if file is None else str(file) for name, file in zip(TLS, files, strict=True)}
        return {name: value for name, value in found.items() if value}

    def token(self) -> str | Path:
        """Return the token of this process, or the file that has it; empty if there is none. An embedded log has a
        secret of its own, so the environment does not count for it."""
        if self.token_file:
            return Path(self.token_file)
        if self.path or directory_of(self.servers) is not None:
            return ""
        file = os.environ.get(TOKEN_FILE_VARIABLE)
        return Path(file) if file else os.environ.get(TOKEN_VARIABLE, "")

    def access(self) -> Access:
        """Return the credentials, as the process has them that calls this."""
        tls = self.tls
        context = None if tls is None else tls_context(tls.authority, certificate=tls.certificate, key=tls.key)
        return token_access(context, self.token(), self.insecure)


class LogPoint(Struct, frozen=True):
    """Where to begin or to end: exactly one of an end of the log, an offset, or a time."""

    end: End | None = None
    offset: GLSN | None = None
    time: CutTime | None = None
    option: str = ""


class ReadOptions(Struct, frozen=True):
    where: Where
    topics: tuple[str, ...]
    pattern: str
    columns: tuple[str, ...] | None
    headers: bool
    start: LogPoint
    stop: LogPoint
    fail_on_data_loss: bool
    rows_max: int | None
    bytes_max: int | None
    partition_bytes: int
    partitions_min: int
    strategy: Strategy
    skips_malformed: bool = False

    def selection(self) -> Selection:
        return Selection(re.compile(self.pattern) if self.pattern else self.topics)

    def selects(self, topic: str) -> bool:
        """Report whether a topic of this name is read."""
        return self.selection().selects(topic)


def read_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """Parse options for reading. Names may be in any case. ``streaming`` is None if it is not known yet; then options
    for batch and for streaming are both allowed."""
    options = _known(given, READING)
    if streaming:
        options.refuse(("endingOffsets", "endingTimestamp"), "a streaming query has no end: leave it out")
        options.refuse(("minPartitions",), "it is for batch reads: leave it out")
    elif streaming is not None:
        options.refuse(("maxOffsetsPerTrigger", "maxBytesPerTrigger"), "it is for streaming queries: leave it out")
    options.one_of("subscribe", "subscribePattern", needed=True)
    options.one_of("startingOffsets", "startingTimestamp", needed=False)
    options.one_of("endingOffsets", "endingTimestamp", needed=False)
    return ReadOptions(
        where=where(options),
        topics=options.names("subscribe") or (),
        pattern=options.pattern("subscribePattern"),
        columns=options.names("columns"),
        headers=options.flag("includeHeaders", False),
        start=options.point(
            "starting", "latest" if streaming else "earliest", allowed="earliest" if streaming is False else "both"
        ),
        stop=options.point("ending", "latest", allowed="latest"),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        rows_max=options.number("maxOffsetsPerTrigger", None),
        bytes_max=options.size("maxBytesPerTrigger", None),
        partition_bytes=options.size("maxPartitionBytes", PARTITION_BYTES_DEFAULT) or PARTITION_BYTES_DEFAULT,
        partitions_min=options.number("minPartitions", 1) or 1,
        strategy=_strategy(options),
        skips_malformed=options.choice("onMalformed", ("error", "skip")) == "skip",
    )


class WriteOptions(Struct, frozen=True):
    """Options for writing. ``topic`` is empty if a column names the topic. ``name`` is the name of the run.
    ``position`` names the column by which rows are sorted, if any. ``replay`` allows publishing again what was
    published under the name."""

    where: Where
    topic: str
    name: str
    position: str
    compression: Compression | None
    replay: bool = False


def write_options(given: Mapping[str, str]) -> WriteOptions:
    own = {name.lower() for name in SPARKS_OWN}
    options = _known({name: value for name, value in given.items() if name.lower() not in own}, WRITING)
    for name in ("topic", "name", "positionColumn"):
        if options.get(name) == "":
            options.wrong(name, "a name is wanted: leave the option out if there is none")
    compression = next((known for known in COMPRESSIONS if known == options.get("compression")), None)
    if options.get("compression") not in (None, "none") and compression is None:
        options.wrong("compression", f"{', '.join(COMPRESSIONS)} or none is wanted")
    return WriteOptions(
        where=where(options),
        topic=options.get("topic") or "",
        name=options.get("name") or "",
        position=options.get("positionColumn") or "",
        compression=compression,
        replay=options.flag("replayOutput", False),
    )


def _known(given: Mapping[str, str], names: tuple[str, ...]) -> _Given:
    """Return the options under their proper names. Refuses unknown options."""
    known = {name.lower(): name for name in names}
    for name in given:
        if name.lower() not in known:
            # The value stays out of logs: the name may be a mistyped 'token'.
            raise InvalidArgument(f"there is no option {name!r}; options are {', '.join(names)}")
    return _Given({known[name.lower()]: value for name, value in given.items()})


def where_of(given: Mapping[str, str]) -> Where:
    """Return the log that these options name. Other options are ignored."""
    own = {name.lower() for name in WHERE}
    return where(_known({name: value for name, value in given.items() if name.lower() in own}, WHERE))


def where(options: _Given) -> Where:
    options.one_of("servers", "path", needed=True)
    if options.get("token") is not None:
        raise InvalidArgument(TOKEN_IN_OPTIONS)
    servers = options.get("servers") or ""
    if servers:
        parse_servers(servers)
    path = options.get("path") or ""
    return Where(
        servers,
        str(Path(path).absolute()) if path else "",
        options.file(TOKEN_FILE),
        options.tls(),
        options.flag("insecure", False),
        options.duration("timeout", TIMEOUT_US_DEFAULT),
    )


def _strategy(options: _Given) -> Strategy:
    idle_after_us = options.duration("watermark.idleAfter", IDLE_AFTER_US_DEFAULT)
    if not options.flag("watermark.punctuated", False):
        return BoundedOutOfOrderness(options.duration("watermark.bound", 0), idle_after_us)
    options.refuse(("watermark.bound",), "what is declared has no bound: leave it out, or watermark.punctuated")
    return Punctuated(idle_after_us)


class _Given:
    """The given options by their proper names."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def wrong(self, name: str, allowed: str) -> NoReturn:
        raise InvalidArgument(f"option {name!r} is {self._values[name]!r}: {allowed}")

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in self._values:
                self.wrong(name, why)

    def one_of(self, first: str, second: str, *, needed: bool) -> None:
        if first in self._values and second in self._values:
            raise InvalidArgument(
                f"options {first!r} ({self._values[first]!r}) and {second!r} ({self._values[second]!r}) exclude each "
                "other: give one of them"
            )
        if needed and not (self._values.get(first) or self._values.get(second)):
            raise InvalidArgument(f"option {first!r} or {second!r} is needed, and neither was given")

    def names(self, name: str) -> tuple[str, ...] | None:
        value = self.get(name)
        if value is None:
            return None
        names = tuple(part.strip() for part in value.split(","))
        if not all(names) or len(set(names)) != len(names):
            self.wrong(name, "names are separated by commas, each once")
        return names

    def pattern(self, name: str) -> str:
        value = self.get(name) or ""
        try:
            re.compile(value)
        except re.error as error:
            self.wrong(name, f"it is no regular expression: {error}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            self.wrong(name, "true or false is wanted")
        return value.lower() == "true"

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed words; the first one is the default."""
        value = (self.get(name) or allowed[0]).lower()
        if value not in allowed:
            self.wrong(name, f"{' or '.join(allowed)} is wanted")
        return value

    def number(self, name: str, default: int | None) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        if not value.strip().isdecimal() or int(value) < 1:
            self.wrong(name, "a whole number from 1 on is wanted")
        return int(value)

    def size(self, name: str, default: int | None) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        found = re.fullmatch(r"\s*(\d+)\s*([bkmg]?)b?\s*", value.lower())
        if found is None or int(found[1]) < 1:
            self.wrong(name, "a number of bytes is wanted, such as 1048576, 512k, 64m or 1g")
        return int(found[1]) * _SIZES[found[2]]

    def duration(self, name: str, default: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        found = re.fullmatch(r"\s*(\d+)\s*([a-z]+)\s*", value.lower())
        unit = None if found is None else _UNIT_NAMES.get(found[2].removesuffix("s"), found[2])
        if found is None or unit not in _UNITS_US:
            self.wrong(name, "a time is wanted, such as 500ms, 5s, 5 seconds, 10 minutes or 1h")
        return int(found[1]) * _UNITS_US[unit]

    def file(self, name: str) -> str:
        """Return the absolute path of a file, because executors have other working directories."""
        value = self.get(name)
        return str(Path(value).absolute()) if value else ""

    def tls(self) -> TlsPaths | None:
        files = [self.get(name) for name in TLS]
        if not any(files):
            return None
        certificate, key, authority = (Path(file) if file else None for file in files)
        if authority is None:
            raise InvalidArgument("option 'tls.ca' is missing: TLS needs the PEM file of the servers' authority")
        if (certificate is None) != (key is None):
            missing = "tls.certificate" if certificate is None else "tls.key"
            raise InvalidArgument(
                f"option {missing!r} is missing: a certificate and its private key belong together, PEM files. A "
                "client that has a token needs neither"
            )
        return TlsPaths(authority, certificate, key)

    def point(self, prefix: str, default: End, *, allowed: Literal["earliest", "latest", "both"]) -> LogPoint:
        offsets, timestamp = f"{prefix}Offsets", f"{prefix}Timestamp"
        if self.get(timestamp) is not None:
            return LogPoint(time=self._time(timestamp), option=timestamp)
        value = (self.get(offsets) or default).strip()
        words = ("earliest", "latest") if allowed == "both" else (allowed,)
        for word in words:
            if value.lower() == word:
                return LogPoint(end="earliest" if word == "earliest" else "latest", option=offsets)
        wanted = f'{" or ".join(words)}, a GLSN from 1 on, or an offset as Spark shows it, {{"glsn": n}}, is wanted'
        if value.isdecimal() and int(value) >= 1:
            # A number is a position as clients name it: that of the first record to read, or the one after the last.
            return LogPoint(offset=GLSN(int(value) - 1), option=offsets)
        try:
            found = json.loads(value)
        except ValueError:
            self.wrong(offsets, wanted)
        # Other fields of an offset concern the query that it belongs to.
        glsn = found.get("glsn") if isinstance(found, dict) else None
        if not isinstance(glsn, int) or isinstance(glsn, bool) or glsn < 0:
            self.wrong(offsets, wanted)
        return LogPoint(offset=GLSN(glsn), option=offsets)

    def _time(self, name: str) -> CutTime:
        value = (self.get(name) or "").strip()
        if re.fullmatch(r"\d+", value):
            return CutTime(int(value) * MILLISECOND)
        try:
            return CutTime(time_us(datetime.fromisoformat(value), ""))
        except ValueError:
            pass
        except InvalidArgument as error:
            self.wrong(name, str(error))
        self.wrong(name, "milliseconds since 1970, or a time with its zone such as 2026-01-31T12:00:00Z, is wanted")
