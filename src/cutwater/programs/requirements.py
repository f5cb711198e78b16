"""Reads a list of wheels with exact versions and hashes, as ``pip-compile --generate-hashes`` and ``uv`` write it.

A job may name no index, file or address: where packages come from is the operator's choice. The list is stored in one
form, so lists that mean the same have the same SHA-256.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from cutwater.errors import InvalidArgument
from cutwater.programs.packing import sha256_of

LIST_BYTES_MAX = 1024 * 1024
PACKAGES_MAX = 1_000
HASHES_MAX = 1_000
PROVIDED = frozenset(("cutwater", "pyspark", "py4j", "pip"))
"""Packages that come with the agent: another version would not fit the servers, or the workers of Spark."""
_PINNED = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?P<extras>\s*\[[A-Za-z0-9._, -]*\])?\s*==\s*"
    r"(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)\s*(?:;(?P<marker>[^#;]*))?$"
)
_HASH = re.compile(r"--hash[= ]\s*(?P<hash>\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


class Requirements(Struct, frozen=True):
    """A list of wheels. ``sha256`` is that of ``text``, which is what is stored."""

    sha256: str
    text: str
    packages: tuple[str, ...]
    """Names with versions, as ``name==version``."""


def read_requirements(text: str | bytes, what: str = "the list of requirements") -> Requirements:
    """Read a list in pip's format. Errors name the line."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise InvalidArgument(f"{what} is no text in UTF-8: write one package on each line") from None
    if len(text) > LIST_BYTES_MAX:
        raise InvalidArgument(f"{what} has {len(text)} characters, and {LIST_BYTES_MAX} is the most")
    found: dict[str, tuple[str, str]] = {}
    for number, line in _lines(text):
        name, package, written = _package(line, f"{what}, line {number}")
        if name in found and found[name][1] != written:
            raise InvalidArgument(f"{what}, line {number}: {name} is listed twice")
        found[name] = package, written
    if not found:
        raise InvalidArgument(f"{what} lists no package: leave it out")
    if len(found) > PACKAGES_MAX:
        raise InvalidArgument(f"{what} lists {len(found)} packages, and {PACKAGES_MAX} is the most")
    stored = "".join(f"{found[name][1]}\n" for name in sorted(found))
    packages = tuple(found[name][0] for name in sorted(found))
    return Requirements(sha256_of(stored.encode()), stored, packages)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, with their numbers. A line that ends with a backslash goes on in the next one."""
    begun, collected = 0, ""
    for number, written in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", written).rstrip()
        begun = begun or number
        collected += " " + line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        if collected.strip():
            yield begun, collected.strip()
        begun, collected = 0, ""
    if collected.strip():
        yield begun, collected.strip()


def _package(line: str, where: str) -> tuple[str, str, str]:
    """Return the name of a package, the name with its version, and the line in the form that is stored."""
    hashes = sorted({found["hash"] for found in _HASH.finditer(line)})
    rest = _HASH.sub("", line).strip()
    marked = rest.partition(";")[2]
    if rest.startswith("-") or "://" in rest or " @" in rest or " -" in marked or "$" in marked:
        raise InvalidArgument(
            f"{where}: {rest[:120]!r} is no package: options, files and addresses are the operator's choice, on the "
            "agent; list packages as name==version --hash=sha256:…"
        )
    match = _PINNED.match(rest)
    if match is None or "*" in rest:
        raise InvalidArgument(
            f"{where}: {rest[:120]!r} names no exact version: write name==version --hash=sha256:…, as "
            "`pip-compile --generate-hashes` does"
        )
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    package = f"{name}=={match['version']}"
    if name in PROVIDED:
        raise InvalidArgument(f"{where}: {name} comes with the agent: leave it out")
    if not hashes or len(hashes) > HASHES_MAX or not all(_SHA256.fullmatch(found) for found in hashes):
        raise InvalidArgument(
            f"{where}: {package} has no hash, or one that is not sha256: with 64 hexadecimal digits: run "
            "`pip-compile --generate-hashes`"
        )
    extras = re.sub(r"\s+", "", match["extras"] or "")
    marker = f" ; {' '.join(match['marker'].split())}" if (match["marker"] or "").strip() else ""
    written = f"{name}{extras}=={match['version']}{marker} {' '.join(f'--hash={found}' for found in hashes)}"
    return name, package, written
