"""Options of servers that say who may talk to them."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Annotated

import typer

from cutwater.errors import InvalidArgument
from cutwater.wire.tls import TlsFiles, load_tls

_PANEL = "Security"

InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="CUTWATER_INSECURE",
        help="Listen beyond this machine without TLS.",
        rich_help_panel=_PANEL,
    ),
]
TlsCertificateOption = Annotated[
    Path | None,
    typer.Option(envvar="CUTWATER_TLS_CERTIFICATE", help="This node's certificate.", rich_help_panel=_PANEL),
]
TlsKeyOption = Annotated[
    Path | None, typer.Option(envvar="CUTWATER_TLS_KEY", help="Its private key.", rich_help_panel=_PANEL)
]
TlsAuthorityOption = Annotated[
    Path | None,
    typer.Option(envvar="CUTWATER_TLS_CA", help="Whose certificates are believed.", rich_help_panel=_PANEL),
]


def client_tls() -> ssl.SSLContext | None:
    """How commands that talk to a cluster show who they are: the same three files as servers, from the environment."""
    files = tls_files(*(_from_environment(name) for name in ("CERTIFICATE", "KEY", "CA")))
    return None if files is None else load_tls(files).client


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(f"CUTWATER_TLS_{name}")
    return Path(value) if value else None


def tls_files(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise InvalidArgument("TLS needs all of --tls-certificate, --tls-key and --tls-ca")
    return TlsFiles(certificate, key, authority)
