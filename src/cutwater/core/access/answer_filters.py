"""Leaves out of answers what a principal may not describe.

Events have no structure that tells which topic each is about, so only those that may describe everything see them:
``cluster-operate``. Events about access control itself need ``cluster-admin`` or ``audit-read``.
"""

from __future__ import annotations

import typing

from msgspec import UNSET, structs

from cutwater.core import requests as r
from cutwater.core.access.access_decisions import AccessDecision
from cutwater.core.access.access_view import AccessView
from cutwater.core.access.rights import CLUSTER, Resource, ResourceKind, Right
from cutwater.types import LogStreamId, RunId

_ABOUT_ACCESS = frozenset(kind.__name__ for kind in typing.get_args(AccessDecision))


class AnswerFilter:
    """Shows answers as one principal may see them. ``token`` is the id of the token that it showed, if any."""

    def __init__(self, view: AccessView, principal: str, token: str = "") -> None:
        self._view, self._principal, self._token = view, principal, token

    def shown(self, answer: r.Answer) -> r.Answer:
        if isinstance(answer, r.Catalog):
            return self._catalog(answer)
        if isinstance(answer, r.Description):
            return self._description(answer)
        if isinstance(answer, r.Events):
            return self._events(answer)
        return answer

    def _may(self, right: Right, resource: Resource) -> bool:
        return self._view.decide(self._principal, right, resource, self._token).is_allowed

    def _sees(self, kind: ResourceKind, name: str) -> bool:
        return self._may(Right.DESCRIBE, Resource(kind, name))

    def _catalog(self, catalog: r.Catalog) -> r.Catalog:
        topics = tuple(info for info in catalog.topics if self._sees(ResourceKind.TOPIC, info.name))
        known = {info.topic for info in topics}
        return structs.replace(
            catalog,
            topics=topics,
            streams=tuple(info for info in catalog.streams if info.topic in known),
            is_limited=not self._may(Right.CLUSTER_OPERATE, CLUSTER) or UNSET,
        )

    def _description(self, description: r.Description) -> r.Description:
        streams = tuple(one for one in description.streams if self._sees(ResourceKind.TOPIC, one.topic))
        known = {one.stream for one in streams}
        runs = tuple(self._run(one, known) for one in description.runs if self._sees(ResourceKind.RUN, one.name))
        sees_cluster, operates = self._may(Right.DESCRIBE, CLUSTER), self._may(Right.CLUSTER_OPERATE, CLUSTER)
        return structs.replace(
            description,
            cluster_key=description.cluster_key if operates else "",
            nodes=description.nodes if sees_cluster else (),
            streams=streams,
            runs=runs,
            last_run=description.last_run if sees_cluster else max((one.run for one in runs), default=RunId(0)),
            unheard=tuple(stream for stream in description.unheard if stream in known),
            outputs=tuple(one for one in description.outputs if self._sees(ResourceKind.RUN, one.name)),
            access=description.access if sees_cluster else UNSET,
            is_limited=not operates or UNSET,
        )

    def _run(self, run: r.RunDescription, streams: set[LogStreamId]) -> r.RunDescription:
        return structs.replace(
            run,
            unpublished=tuple(group for group in run.unpublished if self._sees(ResourceKind.TOPIC, group.topic)),
            published=tuple(group for group in run.published if group.stream in streams),
        )

    def _events(self, events: r.Events) -> r.Events:
        if not self._may(Right.CLUSTER_OPERATE, CLUSTER):
            return structs.replace(events, events=(), is_limited=True)
        if self._may(Right.CLUSTER_ADMIN, CLUSTER) or self._may(Right.AUDIT_READ, CLUSTER):
            return events
        return structs.replace(events, events=tuple(one for one in events.events if one.kind not in _ABOUT_ACCESS))
