"""Options for TLS and tokens: those of servers, and those of commands that talk to servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cutwater.cli.framework.command import Bundle
from cutwater.client.cluster.credentials import Access
from cutwater.errors import InvalidArgument
from cutwater.wire.identity.tls import Tls, TlsFiles, client_tls, load_tls, read_tokens

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
    typer.Option(envvar="CUTWATER_TLS_CERTIFICATE", help="A certificate to show to others.", rich_help_panel=_PANEL),
]
TlsKeyOption = Annotated[
    Path | None, typer.Option(envvar="CUTWATER_TLS_KEY", help="Its private key.", rich_help_panel=_PANEL)
]
TlsAuthorityOption = Annotated[
    Path | None,
    typer.Option(envvar="CUTWATER_TLS_CA", help="Certificates of the trusted authority.", rich_help_panel=_PANEL),
]
TokensOption = Annotated[
    Path | None,
    typer.Option(
        envvar="CUTWATER_TOKENS",
        help="A file with a NAME and a TOKEN in each line: clients that show one need no certificate.",
        rich_help_panel=_PANEL,
    ),
]
TokenOption = Annotated[
    str,
    typer.Option(
        envvar="CUTWATER_TOKEN",
        metavar="TOKEN",
        help="Authenticates instead of a certificate; better set in the environment, where other users do not see it.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class Security(Bundle):
    """Credentials of commands that talk to a cluster, and the authority that they trust."""

    tls_ca: TlsAuthorityOption = None
    tls_certificate: TlsCertificateOption = None
    tls_key: TlsKeyOption = None
    token: TokenOption = ""

    def access(self) -> Access:
        if self.tls_ca is None:
            if self.tls_certificate is not None or self.tls_key is not None:
                raise InvalidArgument("--tls-certificate and --tls-key need --tls-ca: it says which servers to believe")
            return Access(None, self.token)
        return Access(client_tls(self.tls_ca, self.tls_certificate, self.tls_key), self.token)


NOBODY = Security()


@dataclass(frozen=True)
class ServerSecurity(Bundle):
    insecure: InsecureOption = False
    tls_certificate: TlsCertificateOption = None
    tls_key: TlsKeyOption = None
    tls_ca: TlsAuthorityOption = None
    tokens: TokensOption = None

    def tls(self) -> Tls | None:
        if self.tls_certificate is None and self.tls_key is None and self.tls_ca is None:
            if self.tokens is not None:
                raise InvalidArgument(
                    "--tokens needs TLS: give --tls-certificate, --tls-key and --tls-ca, too. Servers know each other "
                    "by their certificates, and a token must not travel in the clear"
                )
            return None
        if self.tls_certificate is None or self.tls_key is None or self.tls_ca is None:
            raise InvalidArgument("TLS needs all of --tls-certificate, --tls-key and --tls-ca")
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca)
        return load_tls(files, None if self.tokens is None else read_tokens(self.tokens))
