"""The rules of access control at one server, kept current by asking the leader, under a lease (ADR 0052).

A server asks about once a second, and at once when it is told of a new revision. An answer that the leader has
confirmed makes the rules valid for the time of the lease, counted from when the question was sent. So a server that is
cut off from the leader acts by old rules for that long, and no longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.access.access_view import AccessView
from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.access_copy import AccessNews, decode_rules
from cutwater.protocol.methods import Received
from cutwater.runtime import system
from cutwater.types import Revision

_log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
ASK_AGAIN_SECONDS = 0.1
"""Interval of questions while the rules are known to be old."""

Ask = Callable[[Revision], Awaitable[Received[AccessNews]]]
"""Asks the leader. The argument is the revision by which this server acts now."""


class AccessCopy:
    """See the module. ``was_secured``: access control was on when this server ran last, so it refuses clients until it
    knows the rules. ``keep`` makes durable that access control is on or off, before the revision counts as applied.
    ``on_change`` is called with the view before, after each change, and when the rules become valid."""

    def __init__(
        self,
        *,
        was_secured: bool = False,
        keep: Callable[[bool], Awaitable[None]] | None = None,
        on_change: Callable[[AccessView], None] | None = None,
    ) -> None:
        start = AccessRules(mode=AccessMode.ENFORCED) if was_secured else AccessRules()
        self.view = AccessView(start)
        self.on_change = on_change
        self._keep = keep
        self._is_kept = was_secured
        self.lease_until = -inf
        """The time of ``system.monotonic`` until which the rules are valid."""
        self._applied = Revision(-1) if was_secured else Revision(0)
        self._heard = Revision(0)
        self._nudged = asyncio.Event()

    @property
    def applied(self) -> Revision:
        """The revision by which this server acts, durably where that matters."""
        return self._applied

    @property
    def is_on(self) -> bool:
        return self.view.mode is not AccessMode.OFF

    @property
    def is_valid(self) -> bool:
        """Whether clients may be served by the rules. Without the rules in force, only enforcing mode refuses them."""
        return self.view.mode is not AccessMode.ENFORCED or system.monotonic() < self.lease_until

    def stale(self) -> Unavailable:
        return Unavailable(
            "this server has no contact to the leader of the metadata repository, so it does not know whether the "
            "rights that it knows still hold: nothing was done, try again or ask another server"
        )

    def take(self, rules: AccessRules) -> None:
        """Act by these rules from now on, unless newer ones are known. The lease stays as it is."""
        before = self.view
        if rules.revision < before.revision or (rules.revision == before.revision and rules.mode is before.mode):
            return
        self.view = AccessView(rules)
        if self._keep is None:
            self._applied = rules.revision
        if rules.mode is not before.mode:
            _log.warning("access control is %s, by revision %s", rules.mode, rules.revision)
        if self.on_change is not None:
            self.on_change(before)

    def expect_rules(self) -> None:
        """The leader says that access control is on: serve no client before the rules are here."""
        if not self.is_on:
            before = self.view
            self.view = AccessView(AccessRules(before.revision, AccessMode.ENFORCED))
            self._applied, self.lease_until = Revision(-1), -inf
            if self.on_change is not None:
                self.on_change(before)

    def nudge(self, revision: Revision) -> None:
        """Note that there is a newer revision."""
        if revision > self.view.revision:
            self._heard = max(self._heard, revision)
            self._nudged.set()

    def ask_soon(self) -> None:
        """The leader can be asked again, or it is another one."""
        self._nudged.set()

    async def pull(self, ask: Ask) -> None:
        """Ask once. Raises if there is no answer, or an answer older than what is known here."""
        sent = system.monotonic()
        answer = await ask(self._applied)
        if len(answer.body):
            rules = decode_rules(answer.body)
            if rules.revision < self.view.revision:
                raise Unavailable(
                    f"the answer has revision {rules.revision} of the access rules, and revision {self.view.revision} "
                    "is known here: it comes from a leader that has been replaced"
                )
            self.take(rules)
        if self._keep is not None and self._is_kept is not self.is_on:
            await self._keep(self.is_on)
            self._is_kept = self.is_on
        self._applied = self.view.revision
        was_valid = self.is_valid
        self.lease_until = max(self.lease_until, sent + answer.value.lease_ms / 1_000)
        if self.is_valid and not was_valid and self.on_change is not None:
            # Credentials that were shown meanwhile can be judged now.
            self.on_change(self.view)

    async def pull_for_ever(self, ask: Ask, *, every_seconds: float = ASK_SECONDS) -> None:
        is_silent = False
        while True:
            self._nudged.clear()
            before = self._applied
            try:
                await self.pull(ask)
                is_silent = False
                if self._applied != before:
                    # The next question confirms the new revision.
                    continue
            except CutwaterError as error:
                if self.is_on and not is_silent:
                    _log.warning("the rules of access control cannot be confirmed now: %s", error.message)
                is_silent = True
            except Exception:
                # A bug here must not leave this server with old rules for good.
                if not is_silent:
                    _log.exception("the rules of access control cannot be asked for, and are asked for again")
                is_silent = True
            is_behind = self._applied < self._heard or (is_silent and self.is_on)
            wait = min(every_seconds, ASK_AGAIN_SECONDS) if is_behind else every_seconds
            try:
                async with asyncio.timeout(wait):
                    await self._nudged.wait()
            except TimeoutError:
                continue
