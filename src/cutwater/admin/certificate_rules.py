"""Reads the rules that map client certificates to principals from a file."""

from __future__ import annotations

from pathlib import Path

from cutwater.core.access.principals import CertificateRule, check_certificate_rule
from cutwater.errors import InvalidArgument


def parse_certificate_rules(path: Path) -> tuple[CertificateRule, ...]:
    """Read ``FIELD PATTERN PRINCIPAL`` from each line. Empty lines and lines that begin with # are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as rules for certificates: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3:
            raise InvalidArgument(
                f"{path}, line {number}: a field (cn or san), a pattern and a principal are wanted, with spaces "
                f"between, not {line.strip()!r}"
            )
        rule = CertificateRule(*words)
        try:
            check_certificate_rule(rule)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, line {number}: {error.message}") from error
        found.append(rule)
    return tuple(found)
