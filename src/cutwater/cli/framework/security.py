"""Options for TLS and tokens of commands that talk to servers; servers share those for TLS."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cutwater.cli.framework.command import Bundle, under
from cutwater.client.cluster.credentials import Access, read_token_file
from cutwater.core.text import is_token_text
from cutwater.errors import InvalidArgument
from cutwater.wire.identity.tls import client_tls

V = TypeVar("V", str, Path | None)

PROMPT = Path("-")
_PRECEDENCE = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
_said: dict[str, str] = {}
"""Where each of the two options for tokens was set in this process, by Typer's names."""

security_option = under("Security")


def _note(ctx: typer.Context, parameter: typer.CallbackParam, value: V) -> V:
    source = ctx.get_parameter_source(parameter.name or "")
    _said[parameter.name or ""] = source.name if source is not None else ""
    return value


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
        callback=_note,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    security_option(
        envvar="CUTWATER_TOKEN_FILE",
        metavar="FILE",
        help="A file with the token, which others cannot read (0600); - asks for the token on the terminal.",
        callback=_note,
    ),
]


@dataclass(frozen=True)
class Security(Bundle):
    """Credentials of commands that talk to a cluster, and the authority that they trust."""

    tls_ca: TlsAuthorityOption = None
    tls_certificate: TlsCertificateOption = None
    tls_key: TlsKeyOption = None
    token: TokenOption = ""
    token_file: TokenFileOption = None

    def __repr__(self) -> str:
        """Leave out the token."""
        return f"Security(tls_ca={self.tls_ca}, tls_certificate={self.tls_certificate}, token_file={self.token_file})"

    def shown_token(self) -> str:
        """Return the token, from wherever it was given; empty if it was not. The closest place counts."""
        found = self.token_or_file()
        return found.strip() if isinstance(found, str) else read_token_file(found)

    def token_or_file(self) -> str | Path:
        """Return the token, or the file that was given in its place."""
        if self.token_file is None:
            return self.token
        if self.token:
            by_token, by_file = _said.get("token", ""), _said.get("token_file", "")
            if by_token == by_file:
                raise InvalidArgument("--token and --token-file are both given in the same place: leave one out")
            if by_token in _PRECEDENCE[: _PRECEDENCE.index(by_file) if by_file in _PRECEDENCE else None]:
                return self.token
        if is_token_text(str(self.token_file)):
            raise InvalidArgument(
                "--token-file got a token, and the name of a file is wanted: put the token into a file (0600), or into "
                "CUTWATER_TOKEN. Others may have seen it on the command line, so make another one and revoke it"
            )
        return ask_token() if self.token_file == PROMPT else self.token_file

    def access(self) -> Access:
        token = self.shown_token()
        if self.tls_ca is None:
            if self.tls_certificate is not None or self.tls_key is not None:
                raise InvalidArgument("--tls-certificate and --tls-key need --tls-ca: it says which servers to believe")
            return Access(None, token)
        return Access(client_tls(self.tls_ca, self.tls_certificate, self.tls_key), token)


def ask_token() -> str:
    """Ask for a token on the terminal, without showing it."""
    try:
        token = getpass.getpass("token: ").strip()
    except (EOFError, OSError) as error:
        raise InvalidArgument(
            "there is no terminal to ask for the token: set CUTWATER_TOKEN, or give --token-file FILE"
        ) from error
    if not token:
        raise InvalidArgument("no token was given: set CUTWATER_TOKEN, or give --token-file FILE")
    return token


NO_CREDENTIALS = Security()
