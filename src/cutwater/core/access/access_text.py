"""Describes decisions about access control for operators. Hashes of tokens are left out."""

from __future__ import annotations

from cutwater.core.access import access_decisions as a
from cutwater.core.text import counted
from cutwater.types import SECOND


def tell_access(decision: a.AccessDecision) -> str:
    match decision:
        case a.CreateToken():
            scopes = f", limited to {'; '.join(map(str, decision.scopes))}" if decision.scopes else ""
            child = f", as a child of token {decision.parent}" if decision.parent else ""
            return f"token {decision.id} created for {decision.principal}{child}{scopes}"
        case a.RevokeToken():
            return f"token {decision.id} revoked"
        case a.ExpireToken():
            return f"token {decision.id} ends {decision.expires // SECOND} seconds after the beginning of 1970"
        case a.NoteTokenUse():
            return f"{counted(len(decision.days), 'token')} used"
        case a.AllowRights():
            return f"{decision.subject} may {', '.join(decision.rights)} {decision.pattern}"
        case a.RemoveRights():
            return f"{decision.subject} may not {', '.join(decision.rights)} {decision.pattern} by that rule any more"
        case a.SetGroup():
            return f"group {decision.group.name} has {counted(len(decision.group.members), 'member')}"
        case a.DeleteGroup():
            return f"group {decision.name} deleted, with its rules and its quota"
        case a.SetCertificateRules():
            return f"{counted(len(decision.rules), 'rule')} map certificates to principals"
        case a.SetQuota():
            return f"{decision.subject} may use: {decision.limits}"
        case a.RemoveQuota():
            return f"{decision.subject} has no quota any more"
        case a.SetAccessMode():
            return f"access control is {decision.mode}"
