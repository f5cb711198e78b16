"""Bugs in access control and its audit, and the profile of the simulator that is made for each."""

from __future__ import annotations

from math import inf
from typing import Any

from msgspec import structs
from planted_bugs import Patch, PlantedBug, plant

from cutwater.access.access_control import AccessControl, Caller
from cutwater.access.access_copy import AccessCopy
from cutwater.access.quota_meter import QuotaMeter
from cutwater.core.access import access_view
from cutwater.core.access.access_decisions import ExpireToken
from cutwater.core.access.access_state import AccessState
from cutwater.core.access.access_view import AccessView
from cutwater.core.access.principals import TokenRecord
from cutwater.core.access.quota_shares import QuotaShares
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


def lease_of_the_rules_never_ends() -> list[Patch]:
    right = AccessCopy.pull

    async def wrong(self, ask):
        await right(self, ask)
        self.lease_until = inf

    return [(AccessCopy, "pull", wrong)]


def expiry_looked_at_in_the_handshake_only() -> list[Patch]:
    def wrong(self, token, now):
        return token in self._tokens

    return [(AccessView, "is_current", wrong)]


def expired_token_opens_connections() -> list[Patch]:
    return [(TokenRecord, "is_expired", lambda self, now: False)]


def token_ends_when_it_was_made_to_and_not_earlier() -> list[Patch]:
    right = AccessState.apply

    def wrong(self, decision, cut_time):
        before = self.tokens.get(decision.id) if isinstance(decision, ExpireToken) else None
        right(self, decision, cut_time)
        if before is not None:
            self.tokens[before.id] = before

    return [(AccessState, "apply", wrong)]


def quota_never_charged() -> list[Patch]:
    def wrong(self, costs, now):
        pass

    return [(QuotaMeter, "pay", wrong)]


def each_server_gets_the_whole_quota() -> list[Patch]:
    def wrong(self, server, key, quota):
        return quota

    return [(QuotaShares, "_share", wrong)]


def share_given_away_before_its_lease_is_over() -> list[Patch]:
    right = QuotaShares.answer

    def wrong(self, server, asked, quotas, servers, now):
        self._askers = {one: it for one, it in self._askers.items() if now < it.at + 0.05}
        return right(self, server, asked, quotas, servers, now)

    return [(QuotaShares, "answer", wrong)]


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
        _plant(
            lease_of_the_rules_never_ends,
            12,
            "a node without contact to the leader serves clients by its old rules for ever",
            storage_nodes=1,
            replication=1,
            seconds=6.0,
            timeout=0.5,
            access_changes_every=0.05,
            access_lease=1.2,
            access_users=1,
            access_appenders=3,
            cut_off_every=1.0,
        ),
        _plant(
            expiry_looked_at_in_the_handshake_only,
            1,
            "an open connection goes on when its token has expired",
            seconds=2.0,
            access_expiry=True,
            access_changes_every=0.05,
        ),
        _plant(
            expired_token_opens_connections,
            1,
            "a token is accepted after its end",
            seconds=2.0,
            access_expiry=True,
            access_changes_every=0.05,
        ),
        _plant(
            token_ends_when_it_was_made_to_and_not_earlier,
            2,
            "an earlier end of a token is answered and not stored",
            seconds=2.0,
            access_expiry=True,
            access_changes_every=0.05,
        ),
        _plant(
            quota_never_charged,
            0,
            "what passes is not paid for",
            access_flood="bytes_in_per_s",
        ),
        _plant(
            each_server_gets_the_whole_quota,
            0,
            "the leader does not divide a quota",
            access_flood="requests_per_s",
        ),
        _plant(
            share_given_away_before_its_lease_is_over,
            19,
            "the leader forgets the share of a server that may still use it",
            seconds=3.0,
            access_flood="bytes_in_per_s",
        ),
    )
)
