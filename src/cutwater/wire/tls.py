"""TLS among the parts of a cluster: each has a certificate, and believes those of one authority."""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from cutwater.errors import InvalidArgument


class TlsFiles(Struct, frozen=True):
    """Certificate and key of this process, and the authority whose certificates it believes; PEM files."""

    certificate: Path
    key: Path
    authority: Path


class Tls(Struct, frozen=True):
    """How a process shows who it is, and whom it believes: mutual TLS, as listener and as client."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(files: TlsFiles) -> Tls:
    """Both sides show a certificate and want to see one."""
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise InvalidArgument(
            f"--tls-certificate {files.certificate}, --tls-key {files.key} and --tls-ca {files.authority} cannot be "
            f"used together: {error}"
        ) from error
    return Tls(server, client)
