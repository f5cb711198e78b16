"""Users of jobs in a simulated cluster: they call ``JobCalls`` as commands and the REST service do.

A call that may have arrived is repeated under its idempotency key, also by the next life of a user that was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

from msgspec import structs

from cutwater.admin.jobs import JobCalls
from cutwater.client.async_client import AsyncClient
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.operations import OperationKind
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.jobs.agent_machine import REFUSES
from cutwater.testing.virtual.jobs.job_files import LOCAL, SHARED
from cutwater.testing.virtual.jobs.job_process import AT_START, BEFORE_A_BATCH
from cutwater.testing.virtual.workload import AGAIN_SECONDS, VirtualClient

if TYPE_CHECKING:
    from cutwater.testing.virtual.jobs.job_world import JobWorld
    from cutwater.testing.virtual.simulation import ShippedSimulation

PROGRAM = "ab" * 32
LABELS = (("disk", "ssd"), ("disk", "hdd"))
STEP_SECONDS = 3.0
CALL_SECONDS = 4.0
KEY_USED_AGAIN = 0.15
"""Share of calls after which the key is used again, for the same request or another one."""
FOLLOWS = 0.3
"""Share of operations that a user waits for."""
FOLLOW_SECONDS = 3.0

Call = tuple[str, str, Callable[[JobCalls, str], Awaitable[q.OperationAnswer]]]
"""The key of a call, what it asks, and the call."""


class JobUser(VirtualClient):
    def __init__(self, world: ShippedSimulation, jobs: JobWorld, name: str, host: str, random: Random) -> None:
        super().__init__(world, name, host)
        self.random, self._jobs = random, jobs
        self._pending: Call | None = None
        """A call whose outcome is not known."""
        self._keys = 0
        self._asked: list[Call] = []
        self._specs = 0

    async def run(self, log: AsyncClient) -> None:
        calls = JobCalls.of(log, timeout=CALL_SECONDS)
        while not self.world.is_healed or self._pending is not None:
            try:
                await self._act(calls)
            except CutwaterError as error:
                self.world.note(f"{self.name}: {error.code}: {error.message}")
                await asyncio.sleep(AGAIN_SECONDS)
            if not self.world.is_healed:
                await self.pause(self.world.options.job_calls_every)
        await self._leave_room(calls)

    async def _act(self, calls: JobCalls) -> None:
        if self._pending is not None:
            await self._call(calls, self._pending)
            return
        chance = self.random.random()
        if chance < 0.1:
            await self._errand(calls)
        elif chance < 0.15:
            await self._drain(calls)
        elif chance < 0.25:
            await self._look(calls)
        else:
            await self._operate(calls)

    # Operations.

    async def _operate(self, calls: JobCalls) -> None:
        names = [f"job{i}" for i in range(self.world.options.jobs)]
        name = self.random.choice(names)
        made = self._choose(name, await self._known(calls, name))
        if made is None:
            return
        what, call = made
        self._keys += 1
        await self._call(calls, (f"{self.name} {self._keys}".replace(" ", "-"), what, call))
        if self.random.random() < KEY_USED_AGAIN and self._asked:
            await self._use_again(calls)

    async def _known(self, calls: JobCalls, name: str) -> q.JobDescription | None:
        try:
            return await calls.job(name)
        except CutwaterError as error:
            if error.retriable:
                raise
            return None

    def _choose(
        self, name: str, known: q.JobDescription | None
    ) -> tuple[str, Callable[[JobCalls, str], Awaitable[q.OperationAnswer]]] | None:
        random = self.random
        if known is None:
            spec = self._spec(None)
            return f"submit {name} {spec}", lambda calls, key: calls.submit(name, spec, key=key)
        kinds: list[str] = ["upgrade", "upgrade", "rescale", "rollback"]
        if known.job.end is None:
            kinds += ["savepoint", "savepoint", "stop", "restart", "cancel"]
            kinds += ["delete"] if random.random() < 0.2 else []
        else:
            kinds = ["start", "start", "start", *kinds, "delete"]
        kind = random.choice(kinds)
        savepoint = ""
        if known.job.savepoints and random.random() < 0.2:
            savepoint = random.choice(known.job.savepoints).id
        match kind:
            case "upgrade":
                spec = self._spec(known.job.spec)
                savepoint = savepoint if known.job.end is not None else ""
                self._name(savepoint)
                return f"upgrade {name} {spec} {savepoint}", lambda calls, key: calls.upgrade(
                    name, spec, savepoint=savepoint, step_timeout=STEP_SECONDS, key=key
                )
            case "rescale":
                parallelism = random.randint(1, 4)
                return f"rescale {name} {parallelism}", lambda calls, key: calls.rescale(
                    name, parallelism, step_timeout=STEP_SECONDS, key=key
                )
            case "rollback":
                version = random.choice((0, 0, *known.versions))
                return f"rollback {name} {version}", lambda calls, key: calls.roll_back(
                    name, version=version, step_timeout=STEP_SECONDS, key=key
                )
            case "start":
                self._name(savepoint)
                replays = bool(savepoint) and random.random() < 0.3
                return f"start {name} {savepoint} {replays}", lambda calls, key: calls.start(
                    name, savepoint=savepoint, replay_output=replays, key=key
                )
            case _:
                return f"{kind} {name}", lambda calls, key: calls.operate(
                    name, OperationKind(kind), step_timeout=STEP_SECONDS, key=key
                )

    def _name(self, savepoint: str) -> None:
        """Note that a user names a savepoint: the job may then find output that came after it."""
        if savepoint:
            self._jobs.notes.named_savepoints.add(savepoint)

    def _spec(self, before: JobSpec | None) -> JobSpec:
        random = self.random
        self._specs += 1
        arguments: dict[str, str] = {"made": f"{self.name} {self._specs}"}
        restart = "fixed:delay=100ms,attempts=1000"
        chance = random.random()
        if chance < 0.15:
            arguments["breaks"] = random.choice((AT_START, BEFORE_A_BATCH))
            restart = "fixed:delay=100ms,attempts=2"
        elif chance < 0.25:
            arguments["batches"] = str(random.randint(1, 20))
        if random.random() < 0.1:
            arguments[REFUSES] = "yes"
        root = before.checkpoint_root if before is not None else random.choice((SHARED, SHARED, SHARED, LOCAL))
        return JobSpec(
            PROGRAM,
            f"main.py:p{self._specs}",
            arguments,
            parallelism=random.randint(1, 4),
            slots=random.choice((1, 1, 1, 2)),
            labels=dict([random.choice(LABELS)]) if random.random() < 0.15 else {},
            checkpoint_root=root,
            restart=restart,
        )

    async def _call(self, calls: JobCalls, call: Call) -> None:
        key, what, ask = call
        self._pending = call
        try:
            answer = await ask(calls, key)
        except CutwaterError as error:
            if error.retriable:
                raise
            self._pending = None
            self.world.note(f"{self.name}: {what} is refused: {error.code}: {error.message}")
            return
        self._pending = None
        self._answered(key, what, answer)
        self._asked.append(call)
        if self.random.random() < FOLLOWS and not self.world.is_healed:
            async for found in calls.follow_operation(answer.operation.id, timeout=FOLLOW_SECONDS):
                self._jobs.notes.saw(found.operation)

    def _answered(self, key: str, what: str, answer: q.OperationAnswer) -> None:
        self.world.note(f"{self.name}: {what} is operation {answer.operation.id}")
        self._jobs.notes.counts["operation"] += 1
        self._say(lambda: self._jobs.notes.answered(key, what, answer.operation.id))

    def _say(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Violation as violation:
            self.world.violations.append(violation)

    async def _use_again(self, calls: JobCalls) -> None:
        """Use a key again: the same request is the same operation, and another one is refused."""
        key, what, ask = self.random.choice(self._asked[-5:])
        if self.random.random() < 0.5:
            self._answered(key, what, await ask(calls, key))
            return
        try:
            answer = await calls.rescale(f"job{self._keys}", 7, key=key)
        except InvalidArgument:
            return
        text = f"the key {key} was used for {what!r}, and for another request began {answer.operation}"
        self.world.violations.append(Violation("job keys", text))

    # Questions.

    async def _errand(self, calls: JobCalls) -> None:
        found = await calls.jobs()
        if not found:
            return
        job = self.random.choice(found)
        match self.random.choice(("validate", "log", "verify")):
            case "validate":
                spec = structs.replace(self._spec(None), entry=f"main.py:{self.random.getrandbits(32)}", labels={})
                told = await calls.validate(job.name, spec, timeout=CALL_SECONDS)
                if (told.pipeline, told.plan) != (job.name, spec.entry):
                    self._is_wrong(f"validating {spec} for {job.name!r}", told)
            case "log":
                tail = await calls.log_tail(job.name, timeout=CALL_SECONDS)
                if tail.text != f"log of {job.name}":
                    self._is_wrong(f"the log of {job.name!r}", tail)
            case _:
                savepoints = (await calls.job(job.name)).job.savepoints
                if savepoints:
                    await calls.verify_savepoint(job.name, self.random.choice(savepoints).id, timeout=CALL_SECONDS)
        self._jobs.notes.counts["errand"] += 1

    def _is_wrong(self, asked: str, told: object) -> None:
        self.world.violations.append(Violation("job errand", f"{asked} was answered with {told}"))

    async def _look(self, calls: JobCalls) -> None:
        """Look at lists, and at operations that were seen before."""
        await calls.jobs()
        await calls.agents()
        known = sorted(self._jobs.notes.seen)
        if known:
            # Other users may see it further on meanwhile.
            identifier = self.random.choice(known)
            seen = self._jobs.notes.seen[identifier]
            found = (await calls.operation(identifier)).operation
            if self._jobs.notes.seen[identifier] == seen:
                self._say(lambda: self._jobs.notes.saw(found))

    async def _drain(self, calls: JobCalls) -> None:
        found = await calls.agents()
        if found:
            agent = self.random.choice(found).agent
            await calls.drain_agent(agent.name, is_draining=not agent.is_draining and self.random.random() < 0.5)

    async def _leave_room(self, calls: JobCalls) -> None:
        """Let all agents have jobs again, so that jobs that want to run can."""
        while True:
            try:
                for found in await calls.agents():
                    if found.agent.is_draining:
                        await calls.drain_agent(found.agent.name, is_draining=False)
                return
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
