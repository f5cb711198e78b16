"""Bugs in access control and its audit, and the profile of the simulator that is made for each."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from planted_bugs import Patch, PlantedBug, plant

from cutwater.access.access_control import AccessControl, Caller
from cutwater.access.access_copy import AccessCopy
from cutwater.core.access import access_view
from cutwater.core.access.access_view import AccessView
from cutwater.core.audit.audit_state import AuditSnapshot, AuditState
from cutwater.metadata import access_leader, audit_writer, request_desk
from cutwater.metadata.access_leader import LeaderAccess
from cutwater.metadata.audit_writer import AuditWriter
from cutwater.protocol.access import METADATA_NODE
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.publish import publishing


def revocation_answered_before_nodes_confirm() -> list[Patch]:
    async def wrong(self, *given):
        return ()

    return [(LeaderAccess, "until_confirmed", wrong)]


def open_subscription_goes_on() -> list[Patch]:
    def wrong(self, peer, method, access, argument, *, is_stream):
        pass

    return [(AccessControl, "judge_again", wrong)]


def relay_executed_as_the_follower() -> list[Patch]:
    def wrong(origin, address, *, is_server=False, is_judged=True):
        return Caller(name=origin.principal, address=address, server=METADATA_NODE)

    return [(request_desk, "relayed", wrong)]


def secret_of_a_token_not_checked() -> list[Patch]:
    return [(access_view, "is_token_of", lambda token, record: record.id != "")]


def prefix_matches_internal_topics() -> list[Patch]:
    return [(access_view, "name_matches", lambda prefix, name: name.startswith(prefix))]


def groups_not_sent_to_servers() -> list[Patch]:
    right = access_leader.encode_rules

    def wrong(rules):
        return right(structs.replace(rules, groups=()))

    return [(access_leader, "encode_rules", wrong)]


def answers_kept_over_revisions() -> list[Patch]:
    right = AccessCopy.take

    def wrong(self, rules):
        before = self.view
        right(self, rules)
        if self.view is not before:
            self.view._answers = before._answers

    return [(AccessCopy, "take", wrong)]


def rules_of_a_group_stay_after_it_is_left() -> list[Patch]:
    right = AccessView.__init__

    def wrong(self, rules):
        right(self, rules)
        for member, groups in seen.items():
            self._groups.setdefault(member, groups)
        seen.update(self._groups)

    seen: dict[str, list[str]] = {}
    return [(AccessView, "__init__", wrong)]


def node_forgets_that_access_control_is_on() -> list[Patch]:
    def wrong(self, secured):
        pass

    return [(NodeVolumes, "note_secured", wrong)]


def staged_part_not_bound_to_its_principal() -> list[Patch]:
    right = publishing.check_binding

    def wrong(part, group, *given):
        right(structs.replace(part, owner=group.publisher), group, *given)

    return [(publishing, "check_binding", wrong)]


def audit_number_reused() -> list[Patch]:
    def wrong(self):
        return AuditSnapshot(self.is_on, self.written)

    return [(AuditState, "snapshot", wrong)]


def audit_appended_without_numbers() -> list[Patch]:
    def wrong(self, record):
        return audit_writer._batch([audit_writer.encode_audit(record)], record.time, None)

    return [(AuditWriter, "_numbered", wrong)]


def _plant(bug: Any, seed: int, what: str, **changes: Any) -> tuple[str, PlantedBug]:
    usual = {"access": "enforced", "access_changes_every": 0.1, "appenders": 1, "access_lease": 1.5}
    return plant(bug, seed, what, **(usual | changes))


ACCESS_BUGS: dict[str, PlantedBug] = dict(
    (
        _plant(
            revocation_answered_before_nodes_confirm,
            1,
            "a change of rights is answered when it is stored, not when servers act by it",
            lag_every=0.2,
            access_changes_every=0.05,
        ),
        _plant(
            open_subscription_goes_on,
            4,
            "streams are not judged again when rights change",
            seconds=3.0,
            access_changes_every=0.05,
        ),
        _plant(
            relay_executed_as_the_follower,
            0,
            "the leader takes a request that a follower passes on for its own",
            metadata_nodes=2,
        ),
        _plant(
            secret_of_a_token_not_checked,
            0,
            "the id of a token suffices",
        ),
        _plant(
            prefix_matches_internal_topics,
            0,
            "a right on all topics includes internal ones",
        ),
        _plant(
            groups_not_sent_to_servers,
            0,
            "servers do not learn who is in which group",
        ),
        _plant(
            answers_kept_over_revisions,
            2,
            "a server remembers its answers when the rules change",
        ),
        _plant(
            rules_of_a_group_stay_after_it_is_left,
            10,
            "a principal keeps the rights of a group that it has left",
            seconds=2.0,
            access_changes_every=0.05,
        ),
        _plant(
            node_forgets_that_access_control_is_on,
            0,
            "a storage node that was restarted serves everybody until it has asked for the rules",
            seconds=4.0,
            kill_every=0.1,
            down_seconds_max=0.1,
            partition_every=0.3,
        ),
        _plant(
            staged_part_not_bound_to_its_principal,
            0,
            "a principal publishes rows that another one has staged",
            seconds=2.0,
        ),
        _plant(
            audit_number_reused,
            2,
            "a snapshot lacks the records that are not in the audit yet, and their numbers are given again",
            is_hasty=True,
            kill_every=0.2,
            metadata_nodes=2,
        ),
        _plant(
            audit_appended_without_numbers,
            8,
            "records of changes are appended without a producer",
            kill_every=0.2,
            metadata_nodes=2,
            half_open_every=0.2,
        ),
    )
)
