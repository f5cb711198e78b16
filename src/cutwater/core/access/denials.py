"""The words of a denial: who lacks which right on what, and the command with which an administrator gives it."""

from __future__ import annotations

from cutwater.core.access.access_requests import AccessVerdict, Missing
from cutwater.core.access.rights import PROGRAMS_TOPIC, Right
from cutwater.errors import PermissionDenied

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-@/+=:")


def denied(verdict: AccessVerdict) -> PermissionDenied:
    """Return the error for a question that was answered with no."""
    principal, right, resource = verdict.principal, verdict.right, str(verdict.resource)
    match verdict.missing:
        case Missing.CREDENTIALS:
            way_out = "give a token or a client certificate"
        case Missing.TOKEN:
            command = f"cutwater token create {quoted(principal)}"
            way_out = f"{verdict.why}; an administrator makes another one with `{command}`"
        case Missing.SCOPE:
            way_out = f"{verdict.why}; use a token of {principal} with wider scopes"
        case _ if right == Right.CLUSTER_ADMIN:
            # The command would make the caller an administrator, which is seldom what is wanted.
            way_out = "ask an administrator to do it"
        case _ if resource == f"topic:{PROGRAMS_TOPIC}" and right in (Right.APPEND, Right.DESCRIBE):
            # A rule on the topic itself would not be enough: its programs are published, too.
            command = f"cutwater acl allow {quoted(principal)} job-submit job:NAME"
            way_out = f"programs are stored with the right job-submit on a job; an administrator can, with `{command}`"
        case _:
            command = f"cutwater acl allow {quoted(principal)} {right} {quoted(resource)}"
            way_out = f"no rule gives it; an administrator can, with `{command}`"
    subject = principal or "a client without credentials"
    message = f"{subject} lacks the right {right} on {resource}: {way_out}"
    return PermissionDenied(message, principal=principal, right=right, resource=resource)


def quoted(text: str) -> str:
    """Quote a text for the shell, if it needs that."""
    return text if text and _PLAIN.issuperset(text) else "'" + text.replace("'", "'\"'\"'") + "'"
