"""The store behind a faulty network: each call is a request on its way, applied later or never, and a reply.

The store itself is the executable specification (``dibs.stores.memory``) on the world's clock. Here are the faults that
its clients see: requests and replies that are lost, late or cut off, requests that reach the store long after their
client gave up, vectors that are applied in parts, a store that is too busy or not there, and hints that are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dibs.errors import StoreUnavailable
from dibs.jobs import Extend, Finish, Put, Take
from dibs.observing import observing
from dibs.store import (
    Acquire,
    Capabilities,
    Granted,
    Release,
    Renew,
    Store,
    StoreAddress,
    StoreBusy,
    Transfer,
)
from dibs.stores.memory import CAPABILITIES, MemoryStore, Shelf

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dibs.clock import Deadline
    from dibs.jobs import JobOutcome, JobRequest, StoredJob
    from dibs.store import Finding, Outcome, Request, StoredLease
    from tests.simulation.checker import Checker
    from tests.simulation.process import FakeFile, Process
    from tests.simulation.world import World

# What can go wrong with one call.
FAULTS = (
    "request lost",
    "reply lost",
    "late",
    "slow",
    "reset before",
    "reset after",
    "busy",
    "in parts",
    "cut in parts",
)
# A request that its client gave up on can still be on its way for this long.
LATE_MAX_S = 4.0
JOB_KINDS: tuple[type, ...] = (Finish, Extend, Put, Take)
SLOW_MAX_S = 1.2
# How soon threads are told of what reached their process.
TOLD_S = 0.1
# Where changes must be looked for: how often newcomers look, and who has waited for long.
LOOK_EACH_S = 0.02
LOOKED_S = 16 * LOOK_EACH_S / 0.95


class Network:
    def __init__(self, world: World, checker: Checker) -> None:
        self.world = world
        self.checker = checker
        #: How far the store's clock was set, and how leases are taken over.
        self.stepped_s = 0.0
        self.takeover = "expiry"
        self.shelf = Shelf(now=lambda: world.now + self.stepped_s)
        self.memory = MemoryStore(self.shelf)
        #: States of leases that were exported, on their way past the store from one program to another.
        self.exported: list[dict[str, Any]] = []
        #: Seconds a message takes, at most, on a good day.
        self.latency_max_s = 0.005
        #: The part of calls that meet a fault, and until when.
        self.fault_part = 0.0
        self.faults_until = 0.0
        #: When the store cannot be reached: from, until.
        self.outages: list[tuple[float, float]] = []
        #: Links that are cut: whose, from, until, and whether requests still get through.
        self.cuts: list[tuple[Process, float, float, bool]] = []
        #: How likely a process is stopped just as the answer to a call arrives, and for how long at most.
        self.freeze_part = 0.0
        self.freeze_max_s = 4.0
        #: How hints travel: "signal", "look" (a counter that is polled) or "none", and which part of them is lost.
        self.hints = "none"
        self.hints_lost_part = 0.0
        self.listeners: list[Hints] = []

    def address(self, process: Process) -> StoreAddress:
        address = StoreAddress("simulated", CAPABILITIES, lambda: Connection(self, process), together=True)
        return address if self.takeover == "expiry" else observing(address, self.takeover, process.clock.now)

    def latency(self) -> float:
        return self.latency_max_s * self.world.random()

    def down(self) -> bool:
        now = self.world.now
        return any(start <= now < end for start, end in self.outages)

    def fault(self, process: Process, task_name: str) -> str:
        world = self.world
        for cut, start, until, deaf in self.cuts:
            # What a process renews with has a connection of its own, and that is often the one that breaks.
            if cut is process and start <= world.now < until and (deaf or task_name == "dibs-renew"):
                return "reply lost" if deaf else "request lost"
        if not self.fault_part or world.now >= self.faults_until or world.random() >= self.fault_part:
            return ""
        return FAULTS[int(world.random() * len(FAULTS))]

    def holder(self, request: Request) -> str | None:
        """The claim that has the name of a request; of permits its own, if that has some, or who has the slot."""
        permit = self.shelf.permits.get(request.name)
        if permit is not None:
            return permit.claim_id
        pool = self.shelf.pools.get(request.name)
        if pool is not None and isinstance(request, Transfer):
            _, row = pool.holdings.get(request.slot, (None, None))
            return row.claim_id if row is not None and row.expires_at > self.world.now else None
        rows = [] if pool is None else [row for _, row in pool.holdings.values() if row.expires_at > self.world.now]
        return request.claim_id if any(row.claim_id == request.claim_id for row in rows) else None

    @property
    def told_s(self) -> float | None:
        """Who waits is told of what has changed within this, and a message; None where it may be told to nobody."""
        if self.hints == "none" or self.hints_lost_part:
            return None
        return TOLD_S + (LOOKED_S if self.hints == "look" else 0.0)

    def tell(self, names: Collection[str]) -> None:
        """Send the hint that these names may be free."""
        for hints in self.listeners:
            if self.world.random() >= self.hints_lost_part:
                self.world.at(self.world.now + self.latency(), hints.arrive, names)


class Call:
    """One call on its way to the store and back."""

    __slots__ = ("answer", "error", "over", "process", "requests", "task_name")

    def __init__(self, process: Process, task_name: str) -> None:
        self.process = process
        self.task_name = task_name
        self.requests: Sequence[Request] = ()
        self.answer: Any = None
        self.error: Exception | None = None
        #: The client has its answer, or gave up.
        self.over = False


class Connection:
    """A ``Store`` of one lane of one process."""

    capabilities: Capabilities = CAPABILITIES

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._hints: Hints | None = None
        #: The thread that is in a call.
        self._used_by: str | None = None
        self.jobs = JobActs(self)

    # -- the acts -------------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        requests = list(requests)

        def apply(store: MemoryStore, call: Call, first: int, end: int) -> list[Outcome]:
            return [self._apply(store, call, request, deadline) for request in requests[first:end]]

        call = self._sent("sends %s", ", ".join(map(shown, requests)) if requests else "nothing")
        call.requests = requests
        self._network.checker.sent(call, requests)
        answer: list[Outcome] = self._exchange(call, apply, len(requests), deadline)
        return answer

    def _apply(self, store: MemoryStore, call: Call, request: Request, deadline: Deadline) -> Outcome:
        network = self._network
        holder = network.holder(request)
        outcome = store.act((request,), deadline)[0]
        late = ", late" if call.over else ""
        network.world.note("store", "does %s of %s%s: %s", shown(request), self._process.name, late, outcome)
        network.checker.applied(call, request, holder, outcome)
        fewer = type(outcome) is Granted and holder == request.claim_id  # or the same again: a hint may be wrong
        if type(request) is Release or (fewer and type(request) is Acquire and request.permits):
            network.tell((request.name,))
        return outcome

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        return self._one("reads leases", lambda store: store.leases(first, before, deadline), deadline)

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        def apply(store: MemoryStore) -> bool:
            done = store.break_lease(name, fencing_token, now, deadline)
            self._network.world.note("store", "breaks token %d%s: %s", fencing_token, " at once" if now else "", done)
            if done:
                self._network.checker.lease_broken(name, fencing_token, now)
                self._network.tell((name,))
            return done

        return self._one(f"breaks token {fencing_token}", apply, deadline)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        def apply(store: MemoryStore) -> bool:
            done = store.end_unchanged(name, fencing_token, expires_at, deadline)
            self._network.world.note("store", "ends token %d, which was watched: %s", fencing_token, done)
            if done:
                self._network.checker.lease_ended(name, fencing_token)
                self._network.tell((name,))
            return done

        return self._one(f"ends token {fencing_token}", apply, deadline)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        return self._one("purges", lambda store: store.purge(first, before, older_than, deadline), deadline)

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make."""

    def schema(self) -> str:
        return ""

    def check(self, deadline: Deadline) -> list[Finding]:
        return []

    def watch(self, address: str, deadline: Deadline) -> Hints | None:
        network = self._network
        if network.hints == "none":
            return None
        self._one("opens a watch", lambda store: None, deadline)
        self._hints = Hints(network, self._process)
        return self._hints

    def close(self) -> None:
        if self._hints is not None:
            self._hints.close()
        self._process.connections.discard(self)

    # -- the way there and back -----------------------------------------------------------------------------------

    def _sent(self, text: str, *args: object) -> Call:
        world = self._network.world
        self._process.connections.add(self)
        world.note(self._process.name, text, *args)
        task = world.current
        return Call(self._process, "" if task is None else task.name)

    def _one(self, what: str, act: Callable[[MemoryStore], Any], deadline: Deadline) -> Any:
        return self._exchange(self._sent(what), lambda store, call, first, end: [act(store)][first:end], 1, deadline)[0]

    def _exchange(
        self, call: Call, apply: Callable[[MemoryStore, Call, int, int], list[Any]], size: int, deadline: Deadline
    ) -> Any:
        network = self._network
        world = network.world
        task = world.current
        left_s = deadline.remaining() / self._process.rate
        fault = network.fault(self._process, call.task_name)
        there, back = network.latency(), network.latency()

        def answer(result: Any, error: Exception | None = None) -> None:
            if not call.over and not self._process.dead:
                call.over = True
                call.answer, call.error = result, error
                assert task is not None
                world.wake(task)

        def fail(error: Exception) -> None:
            answer(None, error)

        until = world.now + left_s

        def arrive() -> None:
            if network.down():  # swallowed; the client runs into its deadline
                self._trouble(until - world.now, "is not heard")
                return
            if fault in ("in parts", "cut in parts"):
                part = int(world.random() * (size + 1))
                result = apply(network.memory, call, 0, part)
                if fault == "cut in parts":
                    world.at(world.now + back, fail, _reset())
                else:
                    world.at(world.now + there + back, arrive_rest, result, part)
                return
            result = apply(network.memory, call, 0, size)
            if fault == "reset after":
                world.at(world.now + back, fail, _reset())
            elif fault != "reply lost":
                world.at(world.now + back, answer, result)

        def arrive_rest(result: list[Any], part: int) -> None:
            result += apply(network.memory, call, part, size)
            world.at(world.now + back, answer, result)

        if network.down() and world.random() < 0.5:
            self._trouble(0.0, "is refused")
            world.at(world.now + back, fail, StoreUnavailable("the store refuses connections", maybe_applied=False))
        elif fault == "busy":
            self._trouble(0.0, "meets: busy")
            world.at(world.now + back, fail, StoreBusy("too busy"))
        elif fault == "reset before":
            self._trouble(0.0, "meets: %s", fault)
            world.at(world.now + back, fail, _reset())
        else:
            if fault == "late":
                there = left_s + LATE_MAX_S * world.random()
            elif fault == "slow":
                there, back = SLOW_MAX_S * world.random() ** 2, SLOW_MAX_S * world.random() ** 2
            if fault or network.down():
                self._trouble(min(left_s, there + back) if fault == "slow" else left_s, "meets: %s", fault or "outage")
            if fault != "request lost":
                world.at(world.now + there, arrive)
        if world.random() < network.freeze_part and world.now < network.faults_until:
            seconds = network.freeze_max_s * world.random() ** 2
            world.at(world.now + there + back, self._process.pause, seconds, world.random() < 0.4)
        if self._used_by is not None:
            world.broken(f"a connection of {self._process.name} is used by two threads: {self._used_by} is at it")
        self._used_by = call.task_name
        try:
            world.block(left_s)
        finally:
            over, call.over = call.over, True
            self._used_by = None
        if not over:
            world.note(self._process.name, "gives up on the store's answer")
            raise StoreUnavailable("the store did not answer in time")
        network.checker.answered(call)
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # error, traceback and frame would keep each other, and whatever leases the frames know
        return call.answer

    def _trouble(self, seconds: float, text: str, *args: object) -> None:
        world = self._network.world
        world.note(self._process.name, text, *args)
        world.trouble_until = max(world.trouble_until, world.now + seconds)


class JobActs:
    """What a ``Connection`` does with jobs: ``dibs.jobs.Jobs``, as far as anybody here uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        connection = self._connection
        # In the order in which a store carries them out, so that one that is cut off in the middle has done the first.
        order = sorted(range(len(requests)), key=lambda place: JOB_KINDS.index(type(requests[place])))

        def apply(store: MemoryStore, call: Call, first: int, end: int) -> list[JobOutcome]:
            return [self._apply(store, call, requests[place], deadline) for place in order[first:end]]

        call = connection._sent("sends %s", ", ".join(map(shown_of_jobs, requests)))
        answer = connection._exchange(call, apply, len(requests), deadline)
        outcomes = dict(zip(order, answer, strict=True))
        return [outcomes[place] for place in range(len(requests))]

    def _apply(self, store: MemoryStore, call: Call, request: JobRequest, deadline: Deadline) -> JobOutcome:
        network, process = self._connection._network, self._connection._process
        outcome = store.jobs.act((request,), deadline)[0]
        late = ", late" if call.over else ""
        network.world.note("store", "does %s of %s%s: %s", shown_of_jobs(request), process.name, late, outcome)
        network.checker.applied_to_jobs(call, request, outcome)
        # A store with hints is more exact: of what has ended only that of a group leaves room for another.
        if isinstance(request, Put | Finish):
            network.tell((request.name,))
        return outcome

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        found: StoredJob | None = self._connection._one(
            f"looks at job {job}", lambda store: store.jobs.find(name, job, deadline), deadline
        )
        return found

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        network = self._connection._network

        def apply(store: MemoryStore) -> list[int]:
            cancelled = store.jobs.cancel(name, ids, keep, deadline)
            network.world.note("store", "cancels %s", ", ".join(map(str, cancelled)) or "nothing")
            network.checker.applied_cancel(cancelled)
            if cancelled:
                network.tell((name,))
            return cancelled

        done: list[int] = self._connection._one(f"cancels {', '.join(map(str, ids))}", apply, deadline)
        return done


class Hints:
    """A ``Watch``: a signal on a connection, or a counter to be looked at."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self.process = process
        self._names: set[str] = set()
        self._fd: int | None = None
        self._file: FakeFile | None = None
        self.interval_s: float | None = LOOK_EACH_S
        if network.hints == "signal":
            self.interval_s = None
            self._fd, self._file = process.clock.open_fd()
        network.listeners.append(self)

    def arrive(self, names: Collection[str]) -> None:
        self._names.update(names)
        if self._file is not None:
            self._file.arrive()

    def fileno(self) -> int | None:
        return self._fd

    def changed(self, names: Collection[str]) -> list[str]:
        network = self._network
        if network.fault(self.process, "") == "reset after":
            raise ConnectionResetError("the watch broke")
        told, self._names = self._names, set()
        if self._file is not None:
            self._file.ready = False
        # A signal is told whoever waits just now; a counter that has moved, those who are looked for.
        wanted = [name for name in names if name in told] if self._file is None else list(told)
        if self._file is None:
            self._names = told.difference(names)
        if told and network.world.random() < 0.1:
            wanted += [name for name in names if name not in wanted]  # a hint may be wrong
        return wanted

    def close(self) -> None:
        if self in self._network.listeners:
            self._network.listeners.remove(self)


def shown_of_jobs(request: JobRequest) -> str:
    """The same for a request on jobs."""
    if isinstance(request, Put):
        return f"Put({len(request.jobs)} jobs)"
    if isinstance(request, Take):
        return f"Take({request.claim_id}, {request.n}, {request.ttl:.2f} s)"
    ids = ", ".join(map(str, request.ids))
    if isinstance(request, Extend):
        return f"Extend({ids}, token {request.fencing_token}, {request.ttl:.2f} s)"
    return f"Finish({ids}, token {request.fencing_token}, {request.end})"


def shown(request: Request) -> str:
    """A request in few words."""
    if isinstance(request, Acquire):
        ticket = "" if request.ticket is None else f" ticket {request.ticket}"
        return f"Acquire({request.claim_id}, {request.ttl:.2f} s{ticket})"
    if isinstance(request, Renew):
        return f"Renew({request.claim_id}, {request.ttl:.2f} s)"
    if isinstance(request, Transfer):
        return f"Transfer({request.from_claim} to {request.claim_id}, {request.ttl:.2f} s)"
    assert isinstance(request, Release)
    return f"Release({request.claim_id})"


def _reset() -> StoreUnavailable:
    return StoreUnavailable("the connection was reset")


_conforms: type[Store] = Connection
