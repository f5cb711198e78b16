"""Rights of principals: ``cutwater acl``, ``cutwater group``, ``cutwater principal`` and ``cutwater whoami``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin.access_calls import parse_rights
from cutwater.admin.certificate_rules import parse_certificate_rules
from cutwater.admin.status_text import time_of
from cutwater.cli.commands.token import unconfirmed
from cutwater.cli.framework.command import command, noun, verbs
from cutwater.cli.framework.exit_codes import EXIT_CODES
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.output import show, table
from cutwater.core.text import counted

app = verbs()
acl_app = noun("Rules: which principals and groups may do what.")
group_app = noun("Groups: principals that share rules and quotas.")
principal_app = noun("Principals: the names for which clients act.")
app.add_typer(acl_app, name="acl")
app.add_typer(group_app, name="group")
app.add_typer(principal_app, name="principal")

SubjectArgument = Annotated[str, typer.Argument(metavar="SUBJECT", help="A principal, or group:NAME.")]
RightsArgument = Annotated[
    str, typer.Argument(metavar="RIGHTS", help="One right, or several with commas between: append,describe.")
]
PatternArgument = Annotated[
    str, typer.Argument(metavar="RESOURCE", help="Such as topic:orders, topic:orders* or cluster.")
]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]
PrincipalArgument = Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Name of the principal.")]
MembersArgument = Annotated[list[str], typer.Argument(metavar="PRINCIPAL…", help="Names of principals.")]

# Rules.


@command(acl_app)
def allow(subject: SubjectArgument, rights: RightsArgument, resource: PatternArgument, log: ClusterTarget) -> None:
    """Give rights on resources to a principal or a group. What no rule allows is denied."""
    wanted = parse_rights(rights)
    changed = log.administer(lambda admin: admin.control.allow(subject, wanted, resource))
    told = {"subject": subject, "rights": wanted, "resource": resource, "unconfirmed": changed.unconfirmed}
    show(told, f"{subject} may {', '.join(wanted)} {resource}{unconfirmed(changed.unconfirmed)}")


@command(acl_app)
def remove(
    subject: SubjectArgument,
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="Exactly as the rule has it.")],
    rights: Annotated[
        str, typer.Option(metavar="RIGHTS", help="Only these rights, with commas between; by default all of the rule.")
    ] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Take rights away that a rule gives. Calls that need them end, and so do subscriptions."""
    taken = parse_rights(rights)
    changed = log.administer(lambda admin: admin.control.remove(subject, resource, taken))
    what = f"the rights {', '.join(taken)} of the rule" if taken else "the rule"
    told = {"subject": subject, "resource": resource, "rights": taken, "unconfirmed": changed.unconfirmed}
    show(told, f"{what} for {subject} on {resource} removed{unconfirmed(changed.unconfirmed)}")


@command(acl_app, "list")
def list_rules(
    subject: Annotated[str, typer.Argument(metavar="[SUBJECT]", help="Only those of this principal or group.")] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Show rules."""
    found = log.administer(lambda admin: admin.control.rules(subject))
    rows = [(rule.subject, rule.rights, rule.pattern) for rule in found]
    told = [{"subject": r.subject, "rights": r.rights, "resource": str(r.pattern)} for r in found]
    show(told, table(["subject", "rights", "resource"], rows))


@command(acl_app, "test")
def check(
    principal: PrincipalArgument,
    right: Annotated[str, typer.Argument(metavar="RIGHT", help="One right.")],
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="One resource: topic:orders, cluster.")],
    token_id: Annotated[
        str, typer.Option("--token-id", metavar="ID", help="As if it came with this token, which may have scopes.")
    ] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Say whether a principal has a right, and which rule decides. Exit code 0 if it has, 40 if not."""
    found = log.administer(lambda admin: admin.control.check(principal, right, resource, token=token_id))
    rule = str(found.rule) if found.rule is not None else None
    told = {"principal": principal, "right": right, "resource": resource, "allowed": found.is_allowed}
    answer = "yes" if found.is_allowed else "no"
    show(told | {"rule": rule, "why": found.why}, f"{answer}: {found.why}")
    if not found.is_allowed:
        raise typer.Exit(EXIT_CODES["permission_denied"])


# Groups.


@command(group_app)
def create(
    name: GroupArgument,
    members: Annotated[list[str] | None, typer.Argument(metavar="[PRINCIPAL…]", help="Its members.")] = None,
    *,
    log: ClusterTarget,
) -> None:
    """Make a group. Rules name it as group:NAME."""
    changed = log.administer(lambda admin: admin.control.create_group(name, members or ()))
    told = f"group {name} with {counted(len(members or ()), 'member')}{unconfirmed(changed.unconfirmed)}"
    show({"group": name, "members": members or []}, told)


@command(group_app)
def add(name: GroupArgument, members: MembersArgument, log: ClusterTarget) -> None:
    """Add principals to a group."""
    changed = log.administer(lambda admin: admin.control.change_group(name, add=members))
    show({"group": name, "added": members}, f"{', '.join(members)} added{unconfirmed(changed.unconfirmed)}")


@command(group_app, "remove")
def remove_members(name: GroupArgument, members: MembersArgument, log: ClusterTarget) -> None:
    """Remove principals from a group."""
    changed = log.administer(lambda admin: admin.control.change_group(name, remove=members))
    show({"group": name, "removed": members}, f"{', '.join(members)} removed{unconfirmed(changed.unconfirmed)}")


@command(group_app)
def delete(name: GroupArgument, log: ClusterTarget) -> None:
    """Delete a group, and the rules and the quota that name it."""
    changed = log.administer(lambda admin: admin.control.delete_group(name))
    show({"group": name}, f"group {name} deleted, with its rules and its quota{unconfirmed(changed.unconfirmed)}")


@command(group_app, "list")
def list_groups(
    name: Annotated[str, typer.Argument(metavar="[GROUP]", help="Only this one.")] = "", *, log: ClusterTarget
) -> None:
    """Show groups and their members."""
    found = log.administer(lambda admin: admin.control.groups(name))
    show(found, table(["group", "members"], [(group.name, group.members) for group in found]))


# Principals.


@command(principal_app, "list")
def list_principals(log: ClusterTarget) -> None:
    """Show all principals that a token, a rule, a group, a quota or a certificate rule names."""
    found = log.administer(lambda admin: admin.control.principals())
    show(found, "\n".join(found) or "no principal is named anywhere")


@command(principal_app)
def describe(name: PrincipalArgument, log: ClusterTarget) -> None:
    """Show a principal: its groups, the rules and quotas that apply to it, and its tokens."""
    found = log.administer(lambda admin: admin.control.principal(name))
    lines = [f"principal {found.principal}{', an administrator' if found.is_admin else ''}"]
    lines.append(f"  groups: {', '.join(found.groups) or 'none'}")
    lines += [f"  rule:   {rule}" for rule in found.rules]
    lines += [f"  quota:  {quota.subject}: {quota.limits}" for quota in found.quotas]
    lines += [f"  token:  {token.id}" for token in found.tokens]
    if found.more:
        lines.append("  there is more: `cutwater acl list` and `cutwater token list` show all")
    show(found, "\n".join(lines))


@command(principal_app)
def certificates(
    file: Annotated[
        Path | None,
        typer.Option(
            "--set",
            metavar="FILE",
            help="Replace all rules by those in this file: FIELD PATTERN PRINCIPAL in each line, such as "
            "'cn *.apps.example {1}'. FIELD is cn or san.",
        ),
    ] = None,
    *,
    log: ClusterTarget,
) -> None:
    """Show or replace the rules that map client certificates to principals. The first that matches decides."""
    if file is not None:
        rules = parse_certificate_rules(file)
        changed = log.administer(lambda admin: admin.control.set_certificate_rules(rules))
        told = f"{counted(len(rules), 'rule')} for certificates{unconfirmed(changed.unconfirmed)}"
        show({"rules": rules, "unconfirmed": changed.unconfirmed}, told)
        return
    found = log.administer(lambda admin: admin.control.certificate_rules())
    rows = [(rule.field, rule.pattern, rule.principal) for rule in found]
    show(found, table(["field", "pattern", "principal"], rows))


@command(app)
def whoami(log: ClusterTarget) -> None:
    """Say for which principal this command acts.

    That is the principal of the token, or of the certificate, that it shows."""
    found = log.administer(lambda admin: admin.control.who_am_i())
    if found.mode == "off":
        told = "access control is off: every client may do everything, and none has a name"
    elif not found.principal:
        told = f"no principal: no token was shown, and no rule maps a certificate (access control is {found.mode})"
    else:
        told = f"{found.principal}{', an administrator' if found.is_admin else ''}"
        told += (
            f"\n  token:  {found.token or 'none, by its certificate'}\n  groups: {', '.join(found.groups) or 'none'}"
        )
        if found.expires:
            told += f"\n  until:  {time_of(found.expires)} UTC"
        for scope in found.scopes:
            told += f"\n  limited to: {scope}"
        told += f"\n  access control is {found.mode}"
    show(found, told)
