"""Access control at one storage node: its copy of the rules, and the names by which rules know what calls are about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from cutwater.access.access_control import AccessControl
from cutwater.access.access_copy import AccessCopy
from cutwater.access.denial_log import DenialLog
from cutwater.access.token_use import TokenUse
from cutwater.core.access.access_requests import AccessChanged, NoteTokenUseRequest
from cutwater.core.audit.audit_requests import RecordDenialsRequest
from cutwater.core.requests import Done
from cutwater.protocol.access import STORAGE_NODE
from cutwater.protocol.access_copy import AccessAsk, AccessNews
from cutwater.protocol.methods import Received
from cutwater.protocol.needs import UNKNOWN_NAME, RunNames
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.metadata_links import MetadataLinks
from cutwater.storagenode.node import StorageNode
from cutwater.storagenode.publish.part_store import PartStore
from cutwater.storagenode.validation.topic_forms import KnownTopics
from cutwater.types import LogStreamId, Revision, RunId, TopicId
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Peer
from cutwater.wire.identity.server_book import ServerBook

SWEEP_SECONDS = 1.0
TELL_MS_MAX = 5_000


class NodeNames:
    """See ``protocol.needs.NameLookup``. A topic that is not known yet raises ``Unavailable``: the catalog is fetched,
    and the client tries again."""

    def __init__(self, topics: KnownTopics, staging: PartStore) -> None:
        self._topics, self._staging = topics, staging

    def topic_of_stream(self, stream: LogStreamId) -> str | None:
        return self._topics.name_of_stream(stream)

    def topic_of_number(self, topic: TopicId) -> str | None:
        return self._topics.name_of_topic(topic)

    def topic_of_part(self, part: str) -> str | None:
        topic = self._staging.topic_of(part)
        return None if topic is None else self._topics.name_of_topic(topic) or UNKNOWN_NAME

    def run(self, which: RunId | str) -> RunNames | None:
        return None

    def job_of_operation(self, operation: str) -> str | None:
        return None

    def principal_of_token(self, token: str) -> str | None:
        return None

    def conceal_stream(self, stream: LogStreamId) -> None:
        self._topics.miss_stream(stream)

    def conceal_number(self, topic: TopicId) -> None:
        self._topics.miss_topic(topic)


class StorageAccess:
    """See the module. That access control is on is stored with the identity of the node: after a start, a node of a
    secured cluster serves no client before it knows the rules."""

    def __init__(
        self,
        node: StorageNode,
        volumes: NodeVolumes,
        links: MetadataLinks,
        book: ServerBook,
        names: NodeNames,
        connections: Callable[[], Iterable[Connection]],
    ) -> None:
        self._node, self._volumes, self._links = node, volumes, links
        self.copy = AccessCopy(was_secured=bool(volumes.identity.secured), keep=self._keep)
        links.on_secured = self.copy.expect_rules
        self.control = AccessControl(self.copy, book, names, connections)
        self.use = TokenUse()
        self.denials = DenialLog(f"{STORAGE_NODE} {node.node}", volumes.spool_file, node.in_thread)
        self.control.denials.on_denial = self.denials.note

    def works(self) -> tuple[Awaitable[None], ...]:
        """Return what has to go on while the node runs."""
        return (
            self.copy.pull_for_ever(self._ask),
            self._sweep_for_ever(),
            self.use.tell_for_ever(self._tell),
            self.denials.deliver_for_ever(self._record),
        )

    def owner_of(self, peer: Peer | None) -> str:
        """Return the principal to which parts that this peer stages are bound; empty while access control is off."""
        return self.control.caller(peer).principal if self.control.is_on else ""

    async def _keep(self, secured: bool) -> None:
        await self._node.in_thread(partial(self._volumes.note_secured, secured))

    async def _ask(self, revision: Revision) -> Received[AccessNews]:
        asked = AccessAsk(STORAGE_NODE, int(self._node.node), revision)
        return await self.control.quotas.ask(partial(self._links.access, asked))

    async def _tell(self, request: NoteTokenUseRequest) -> None:
        await self._links.ask(request, AccessChanged, timeout_ms=TELL_MS_MAX)

    async def _record(self, request: RecordDenialsRequest) -> None:
        await self._links.ask(request, Done, timeout_ms=TELL_MS_MAX)

    async def _sweep_for_ever(self) -> None:
        """End connections whose token expires."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.control.sweep()
