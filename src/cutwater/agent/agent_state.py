"""What an agent does, without I/O: ``handle(event, now)`` returns the effects to carry out, in their order.

1. Jobs run only under a lease that this session holds. When it ends, or another session takes over, every process of
   every job is killed before anything else happens.
2. The agent ends each job of which it has processes and that is not in its orders.
3. It registers anew, as another session, only when no process is left.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from cutwater.agent import agent_events as e
from cutwater.agent.agent_events import AgentEffect, AgentEvent, AgentRequest, JobKey
from cutwater.agent.job_work import JobWork, WorkStage
from cutwater.agent.lease_clock import LeaseClock
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.agents import SESSION_MAX, AgentDescription, JobIsolation
from cutwater.core.jobs.errands import Errand
from cutwater.core.jobs.operations import OperationError
from cutwater.types import Revision

REGISTER_MS = 10_000
RENEW_MS = 2_000
"""How long one try to renew the lease may take."""
LEAVE_MS = 5_000
WATCH_MS = r.WAIT_MS_MAX + 5_000
AGAIN_MS = 500
"""How long to wait before a request is tried again."""
RENEW_AGAIN_MS = 100
"""How long to wait before another try to renew the lease. It is short, because little may be left of the lease."""
ADOPT_MS = 5_000
"""How long an assignment that was refused is left alone if it is still ordered."""


class AgentOptions(Struct, frozen=True):
    description: AgentDescription
    drain_ms: int = 60_000
    """How long giving back all jobs may take when the agent ends."""


class AgentState:
    """See the module."""

    def __init__(self, options: AgentOptions, random: Random) -> None:
        self._options, self._random = options, random
        self.session = self._new_session()
        self.lease = LeaseClock()
        self.works: dict[JobKey, JobWork] = {}
        self.errands: dict[str, int] = {}
        """Errands that are being done, and for which session."""
        self._answered_errands: set[str] = set()
        self._has_left = False
        self.is_draining = False
        """Whether the agent itself gives its jobs back, to end."""
        self.exit: e.ExitAgent | None = None
        """How the agent ends as soon as no process is left."""
        self._is_over = False
        self._drain_until = 0
        self._seen = Revision(0)
        self._left: dict[JobKey, int] = {}
        """Assignments that were refused, and until when they are left alone."""
        self._asked: list[AgentRequest] = []
        """Requests of the agent itself, not about one job, that are under way."""
        self._renew_from = 0
        """Until when the lease is not renewed, since the last try failed."""
        self._again: list[tuple[int, e.Ask]] = []
        """Requests that are tried again, and when."""
        self._is_ready = False
        self._is_looking = False
        """Whether it is being found out who has the name of this agent, before it registers anew."""

    def start(self) -> list[AgentEffect]:
        return self._register()

    def handle(self, event: AgentEvent, now: int) -> list[AgentEffect]:
        if self._is_over:
            return []
        effects = self._check_lease(now)
        match event:
            case e.RequestAnswered():
                effects += self._answered(event, now)
            case e.RequestRefused():
                effects += self._refused(event, now)
            case e.RequestUnanswered(request):
                effects += self._unanswered(request, now)
            case e.JobSpoke(key, message):
                work = self.works.get(key)
                effects += work.spoke(message, now) if work is not None else []
            case e.JobGone(key, reason, error, is_hopeless):
                work = self.works.get(key)
                effects += work.gone(reason, error, is_hopeless, now) if work is not None else []
            case e.JobValidated(key, operation, step, error):
                work = self.works.get(key)
                effects += work.validated(operation, step, error) if work is not None else []
            case e.ErrandDone():
                effects += self._errand_done(event)
            case e.NameFree():
                self._is_looking = False
            case e.NameTaken(host):
                said = f"another process{f' on {host}' if host else ''} runs as agent {self._name!r} now"
                effects += self._kill_all(OperationError("fenced", f"{said}: give each agent a name of its own"))
            case e.DrainWanted():
                effects += self._drain(now)
            case e.KillWanted():
                effects += self._kill_all(None)
            case e.WatchdogLost():
                said = "the watchdog of the agent has ended, and could not be started again"
                effects += self._kill_all(OperationError("unavailable", said))
        effects += self._tick(now)
        return effects + self._after(now)

    @property
    def _name(self) -> str:
        return self._options.description.name

    def _new_session(self) -> int:
        return self._random.randint(1, SESSION_MAX)

    # The lease.

    def _register(self) -> list[AgentEffect]:
        return self._ask(r.RegisterAgentRequest(self._options.description, self.session), REGISTER_MS)

    def _check_lease(self, now: int) -> list[AgentEffect]:
        if self.lease.is_held and now >= self.lease.deadline_ms:
            return self._lose()
        return []

    def _lose(self) -> list[AgentEffect]:
        """The session is over: kill everything, and find out why. ``_after`` registers anew."""
        before, self.session = self.session, self._new_session()
        self.lease.end()
        self._again.clear()
        self._asked.clear()
        self._left.clear()
        self._seen = Revision(0)
        effects: list[AgentEffect] = []
        for work in self.works.values():
            effects += work.abandon()
        effects += [e.GiveUpErrand(errand) for errand in self.errands]
        if self.is_draining and self.exit is None:
            self.exit = e.ExitAgent()
        if self.exit is None:
            self._is_looking = True
            effects.append(e.FindSession(before))
        return effects

    def _is_of_session(self, request: AgentRequest) -> bool:
        return request.session == self.session

    # Answers.

    def _answered(self, event: e.RequestAnswered, now: int) -> list[AgentEffect]:
        request, answer = event.request, event.answer
        self._forget_asked(request)
        if not self._is_of_session(request):
            return []
        match answer:
            case r.AgentLease(lease_ms):
                is_first = not self.lease.is_held
                self.lease.confirm(event.sent_ms, lease_ms)
                effects: list[AgentEffect] = [e.SetDeadline(self.lease.deadline_ms)]
                if is_first:
                    effects += self._watch()
                    if not self._is_ready:
                        self._is_ready = True
                        effects.append(e.AgentReady(lease_ms))
                return effects + self._check_lease(now)
            case r.AgentOrders():
                return [*self._follow(answer, now), *self._watch()]
        if isinstance(request, r.LeaveAgentRequest):
            self.exit = self.exit or e.ExitAgent()
            return []
        work = self._work_of(request)
        if work is None:
            return []
        before = work.assigned
        effects = work.answered(request, answer, now)
        if work.assigned is not before and self._has_other_owner(work):
            return self._fail(work)
        return effects

    def _refused(self, event: e.RequestRefused, now: int) -> list[AgentEffect]:
        request = event.request
        self._forget_asked(request)
        if not self._is_of_session(request):
            return []
        if event.is_session_over:
            return self._lose()
        if isinstance(request, r.RegisterAgentRequest) and not self.lease.is_held:
            return self._kill_all(event.error)
        if isinstance(request, r.LeaveAgentRequest):
            self.exit = self.exit or e.ExitAgent()
            return []
        if isinstance(request, r.AnswerErrandRequest):
            return []
        work = self._work_of(request)
        if work is not None:
            if request in work.reports:
                self._left[work.key] = now + ADOPT_MS
            return work.refused(request, event.error, now)
        # Rights may have been taken away for a moment. Without them, the lease ends.
        return self._unanswered(request, now)

    def _unanswered(self, request: AgentRequest, now: int) -> list[AgentEffect]:
        self._forget_asked(request)
        if not self._is_of_session(request):
            return []
        again = {r.RegisterAgentRequest: REGISTER_MS, r.WatchAgentRequest: WATCH_MS, r.AnswerErrandRequest: REGISTER_MS}
        if isinstance(request, r.LeaveAgentRequest):
            # The lease ends by itself, too.
            self.exit = self.exit or e.ExitAgent()
        elif type(request) in again:
            self._again.append((now + AGAIN_MS, e.Ask(request, again[type(request)])))
        elif isinstance(request, r.RenewAgentRequest):
            # It is sent anew by ``_tick``, with the progress of then.
            self._renew_from = now + RENEW_AGAIN_MS
        else:
            work = self._work_of(request)
            for effect in work.unanswered(request) if work is not None else []:
                assert isinstance(effect, e.Ask)
                self._again.append((now + AGAIN_MS, effect))
        return []

    @property
    def _has_processes(self) -> bool:
        return bool(self.errands) or any(work.has_process for work in self.works.values())

    def _forget_asked(self, request: AgentRequest) -> None:
        self._asked = [asked for asked in self._asked if asked != request]

    def _work_of(self, request: AgentRequest) -> JobWork | None:
        job, epoch = getattr(request, "job", None), getattr(request, "epoch", None)
        return None if job is None or epoch is None else self.works.get((job, epoch))

    # Orders.

    def _watch(self) -> list[AgentEffect]:
        if any(isinstance(request, r.WatchAgentRequest) for request in self._asked):
            return []
        return self._ask(r.WatchAgentRequest(self._name, self.session, self._seen, r.WAIT_MS_MAX), WATCH_MS)

    def _follow(self, orders: r.AgentOrders, now: int) -> list[AgentEffect]:
        self._seen = orders.revision
        self._left = {key: until for key, until in self._left.items() if until > now}
        effects: list[AgentEffect] = []
        ordered = {(order.job, order.epoch): order for order in orders.orders}
        for key, work in self.works.items():
            if key not in ordered:
                effects += work.abandon()
        for key, order in ordered.items():
            known = self.works.get(key)
            if known is not None:
                effects += known.follow(order, now)
            elif self._takes_work and key not in self._left:
                work = self.works[key] = JobWork(self._name, self.session, order, self._random)
                effects += work.begin()
        return effects + self._run_errands(orders.errands)

    @property
    def _takes_work(self) -> bool:
        return self.exit is None and not self.is_draining

    def _run_errands(self, wanted: tuple[Errand, ...]) -> list[AgentEffect]:
        effects: list[AgentEffect] = []
        ids = {errand.id for errand in wanted}
        for known in self.errands:
            if known not in ids:
                effects.append(e.GiveUpErrand(known))
        self._answered_errands &= ids
        for errand in wanted:
            if errand.id not in self.errands and errand.id not in self._answered_errands and self._takes_work:
                self.errands[errand.id] = self.session
                effects.append(e.StartErrand(errand, self.session))
        return effects

    def _errand_done(self, event: e.ErrandDone) -> list[AgentEffect]:
        session = self.errands.pop(event.errand, 0)
        if session != self.session or not (event.body or event.error):
            return []
        self._answered_errands.add(event.errand)
        answer = r.AnswerErrandRequest(self._name, session, event.errand, event.body, event.error)
        return self._ask(answer, REGISTER_MS)

    def _has_other_owner(self, work: JobWork) -> bool:
        """Whether a job of another owner runs here, with which this one must not run."""
        if self._options.description.isolation is not JobIsolation.ONE_OWNER or work.assigned is None:
            return False
        others = (other.assigned for other in self.works.values() if other is not work)
        return any(other is not None and other.owner != work.assigned.owner for other in others)

    def _fail(self, work: JobWork) -> list[AgentEffect]:
        owner = work.assigned.owner if work.assigned is not None else ""
        said = (
            f"agent {self._name!r} runs jobs of another owner, and this one belongs to {owner or 'nobody'}: start the "
            "agent with --shared-user or --job-users, or give each owner an agent"
        )
        return work.fail(OperationError("refused", said))

    # The end of the agent.

    def _drain(self, now: int) -> list[AgentEffect]:
        """Let all jobs stop, then leave: only then they go to other agents, all at once."""
        if self.is_draining or self.exit is not None:
            return []
        self.is_draining, self._drain_until = True, now + self._options.drain_ms
        if not self.lease.is_held:
            return self._kill_all(None)
        effects: list[AgentEffect] = []
        for work in self.works.values():
            effects += work.release(now)
        return [*effects, *(e.GiveUpErrand(errand) for errand in self.errands)]

    def _kill_all(self, error: OperationError | None) -> list[AgentEffect]:
        """Kill everything, and end."""
        if self.exit is None:
            self.exit = e.ExitAgent(error)
        effects: list[AgentEffect] = []
        for work in self.works.values():
            effects += work.abandon()
        return [*effects, *(e.GiveUpErrand(errand) for errand in self.errands)]

    # What is due.

    def _tick(self, now: int) -> list[AgentEffect]:
        effects: list[AgentEffect] = []
        due = [ask for at, ask in self._again if at <= now]
        self._again = [(at, ask) for at, ask in self._again if at > now]
        for ask in due:
            is_own = self._work_of(ask.request) is None
            effects += self._ask(ask.request, ask.timeout_ms) if is_own else [ask]
        for work in self.works.values():
            effects += work.tick(now)
        if self.is_draining and now >= self._drain_until:
            effects += self._kill_all(None)
        return effects + self._renew(now)

    def _renew(self, now: int) -> list[AgentEffect]:
        is_asked = any(isinstance(request, r.RenewAgentRequest) for request in self._asked)
        if not self.lease.is_held or now < self._renew_ms or is_asked or self.exit is not None:
            return []
        progress = tuple(
            work.progress for work in self.works.values() if work.progress is not None and not work.is_lost
        )
        return self._ask(r.RenewAgentRequest(self._name, self.session, progress), RENEW_MS)

    @property
    def _renew_ms(self) -> int:
        return max(self.lease.renew_ms, self._renew_from)

    def _ask(self, request: AgentRequest, timeout_ms: int) -> list[AgentEffect]:
        self._asked.append(request)
        return [e.Ask(request, timeout_ms)]

    def _after(self, now: int) -> list[AgentEffect]:
        """Forget what is over, begin again when everything lost is gone, and say when the next thing is due."""
        over = [key for key, work in self.works.items() if work.stage is WorkStage.OVER]
        for key in over:
            del self.works[key]
        effects: list[AgentEffect] = []
        if self.exit is not None and not self._has_processes:
            self._is_over = True
            return [self.exit]
        if self.is_draining and self.exit is None and not self._has_processes and not self._has_left:
            self._has_left = True
            effects += self._ask(r.LeaveAgentRequest(self._name, self.session), LEAVE_MS)
        is_idle = not self.lease.is_held and not self._asked and not self._again
        if is_idle and not self._is_looking and self.exit is None and not self._has_processes:
            effects += self._register()
        return [*effects, e.WakeAgent(self._next_ms(now))]

    def _next_ms(self, now: int) -> int:
        times = [at for at, _ in self._again]
        times += [at for work in self.works.values() if (at := work.next_ms) is not None]
        if self.lease.is_held:
            times.append(self.lease.deadline_ms)
            is_asked = any(isinstance(request, r.RenewAgentRequest) for request in self._asked)
            times += [] if is_asked else [self._renew_ms]
        if self.is_draining:
            times.append(self._drain_until)
        return max(now + 1, min(times, default=now + 60_000))
