"""Hides secrets in texts that repeat what a user wrote."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"cwt_([0-9a-fA-F]{16})_[0-9a-zA-Z]{32,}")
_LOGIN = re.compile(r"//[^/\s'\"]*@")
"""An address may name several servers, and any of them may have a login."""
_SETTING = re.compile(r"([?&][\w.]*(?:password|passwd|secret|token)[\w.]*=)[^&\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Hide the secrets of tokens, and logins and passwords in addresses."""
    text = _TOKEN.sub(r"cwt_\1_(secret)", text)
    return _SETTING.sub(r"\1(secret)", _LOGIN.sub("//(login)@", text))
