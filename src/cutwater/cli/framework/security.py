"""Options for TLS and tokens of commands that talk to servers; servers share those for TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cutwater.cli.framework.command import Bundle, under
from cutwater.client.cluster.credentials import Access
from cutwater.errors import InvalidArgument
from cutwater.wire.identity.tls import client_tls

security_option = under("Security")

TlsCertificateOption = Annotated[
    Path | None, security_option(envvar="CUTWATER_TLS_CERTIFICATE", help="A certificate to show to others.")
]
TlsKeyOption = Annotated[Path | None, security_option(envvar="CUTWATER_TLS_KEY", help="Its private key.")]
TlsAuthorityOption = Annotated[
    Path | None, security_option(envvar="CUTWATER_TLS_CA", help="Certificates of the trusted authority.")
]
TokenOption = Annotated[
    str,
    security_option(
        envvar="CUTWATER_TOKEN",
        metavar="TOKEN",
        help="Authenticates instead of a certificate; better set in the environment, where other users do not see it.",
        show_default=False,
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


NO_CREDENTIALS = Security()
