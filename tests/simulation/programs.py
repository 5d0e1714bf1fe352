"""What the simulated processes do.

A program takes a lock as a user would, through the shipped ``LockCore``, or adopts what another exported, works for a
while, looks at its lease, and gives it back, drops it, exports it, or sits on it until it is over. How many there are,
and what befalls them, is the scenario's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dibs.desk import Desk
from dibs.errors import InvalidOption, LeaseLost, NotHeld, StoreUnavailable
from dibs.handover import adopting, read_state
from dibs.hold import HELD
from dibs.lease import Lease
from dibs.lock import LockCore
from dibs.owners import this_thread
from dibs.pauses import Pauses
from dibs.session import Session
from dibs.steps import run
from tests.simulation.checker import Checker
from tests.simulation.process import Mutex
from tests.simulation.remembered import Tenure
from tests.simulation.world import Interrupted, Task, World

if TYPE_CHECKING:
    from dibs.hold import Hold
    from dibs.lockable import Lockable
    from dibs.once import Once
    from dibs.queue import Job
    from dibs.steps import Steps
    from dibs.store import StoreAddress
    from dibs.terms import Terms
    from dibs.wishes import AcquireAsk, TakeOver
    from tests.simulation.claim_books import Work
    from tests.simulation.network import Network
    from tests.simulation.process import Process

T = TypeVar("T")

NAMES = ("red", "blue")
TTLS_S = (1.0, 1.0, 1.0, 2.0, 4.0)
TTL_MAX_S = max(TTLS_S)
MIN_HOLD_MAX_S = 1.5


class SimSession(Session):
    """The shipped session, seen by the checker: who wished for what, and looking on without a mark."""

    world: World
    process: Process
    checker: Checker

    def __init__(self, address: StoreAddress, **options: Any) -> None:
        super().__init__(address, **options)
        shipped = self.keeper.expire
        # The checker asks while no thread of the world runs: nothing may be marked by its looking on.
        self.keeper.expire = lambda hold: self.world.current is None or shipped(hold)  # type: ignore[method-assign]

    def wish(self, key: str, terms: Terms, owner: object, blocking: bool) -> AcquireAsk:
        ask = super().wish(key, terms, owner, blocking)
        self.checker.wished(self._who(owner), ask)
        return ask

    def submit(self, ask: AcquireAsk) -> None:
        super().submit(ask)
        if ask.blocking:
            self.checker.waits(self, ask)

    def wish_for(self, key: str, from_claim: str, slot: int, terms: Terms, owner: object) -> TakeOver:
        ask = super().wish_for(key, from_claim, slot, terms, owner)
        self.checker.wished(self._who(owner), ask)
        return ask

    def _who(self, owner: object) -> object:
        if owner is not this_thread():
            return owner
        assert self.world.current is not None  # the threads of a world are none that Python knows
        return self.world.current.name

    def is_busy_here(self) -> bool:
        """Who closes a stream in a world is in the midst of nothing: it has no garbage collector."""
        return False

    def in_between(self) -> bool:
        """Somebody has the mutex: whoever asks for the truth now would have to wait for it."""
        mutex = self.mutex
        assert isinstance(mutex, Mutex)
        return mutex.locked()


class SimLease(Lease):
    """The shipped lease; the checker hears when it is made."""

    __slots__ = ()

    def __init__(self, session: Any, hold: Hold, name: str) -> None:
        super().__init__(session, hold, name)
        session.checker.made(hold)


class Habits(NamedTuple):
    """How the programs of a world behave; probabilities are parts of 1."""

    names: int = 1
    patience: float = 0.4
    rounds: int = 3
    work_max_s: float = 1.0
    renew: float = 0.8
    min_hold: float = 0.1
    max_hold: float = 0.1
    own_renewal: float = 0.15
    drop: float = 0.1
    sit: float = 0.1
    hand_over: float = 0.0
    interrupt: float = 0.0
    anywhere: float = 0.0


class Host:
    """A simulated process with a client of dibs."""

    def __init__(self, world: World, network: Network, process: Process, timeouts: tuple[float, float]) -> None:
        self.world = world
        self.process = process
        self.checker = network.checker
        #: The states of leases on their way from one program to another.
        self.exported = network.exported
        #: Locks that several threads use, by their names and whether they are reentrant.
        self.locks: dict[tuple[str, bool], Lockable[Lease]] = {}
        #: Works that several threads are to do once, by their names.
        self.onces: dict[str, Once] = {}
        #: Jobs that several threads end.
        self.jobs: list[Job] = []
        #: Items that several threads end.
        self.works: list[Work] = []
        address = network.address(process)
        request_timeout_s, patience_s = timeouts
        self.session = SimSession(
            address,
            request_timeout_s=request_timeout_s,
            patience_s=patience_s,
            clock=process.clock,
            client_id=process.name,
            host="simulated",
            pauses=Pauses("default", permits=True) if network.checker.pauses else None,
        )
        self.session.on_paused = lambda told: world.note(process.name, "%s", told)
        self.session.world, self.session.process = world, process
        self.session.checker = network.checker
        network.checker.lanes.add(process, self.session)
        # The face's own acts (break, purge, close) run through a desk, which would make the session itself.
        self.desk = Desk(
            address,
            namespace="default",
            ttl=TTL_MAX_S,
            info=None,
            request_timeout=request_timeout_s,
            patience=patience_s,
            clock=process.clock,
        )
        self.desk._sessions[os.getpid()] = self.session
        assert self.desk.session() is self.session

    def close(self) -> None:
        """The whole client is closed, whatever its threads are doing."""
        self.world.note(self.process.name, "closes its client")
        since = self.world.now
        try:
            run(self.desk.closing())
        except StoreUnavailable:
            pass
        self.checker.closed(self.session, since)


class Interruptions:
    """The Ctrl-C that reach one program: up to one in each round. Who presses twice interrupts the cleaning up, too."""

    def __init__(self, world: World, wherever_it_waits: float, anywhere: float) -> None:
        self._world = world
        self._parts = wherever_it_waits, wherever_it_waits + anywhere
        self._rounds = 0
        #: In this round one is on its way, or has come.
        self._sent = False

    def maybe(self, task: Task) -> None:
        """Perhaps interrupt the round that begins, or goes on."""
        world = self._world
        chance = world.random()
        waiting, anywhere = self._parts
        if self._sent or chance >= anywhere:
            return
        self._sent = True
        if chance < waiting:
            task.interruptible = True
            world.at(world.now + 2.0 * world.random() ** 2, self._interrupt, task, self._rounds)
        else:
            task.interruptible = True
            world.interrupt_after(task, int(120 * world.random() ** 2) + 1)

    def over(self, task: Task) -> None:
        """The round is over: no interruption reaches this thread from now on."""
        self._rounds += 1
        self._sent = False
        self._world.stop_tracing(task)
        task.interruptible = False
        task.pending = None

    def _interrupt(self, task: Task, rounds: int) -> None:
        if self._rounds == rounds:
            self._world.interrupt(task)


class Program:
    """One thread of a process, which takes locks."""

    #: What an acquire may raise.
    CANNOT: tuple[type[Exception], ...] = (StoreUnavailable,)

    def __init__(self, host: Host, name: str, habits: Habits) -> None:
        self.host = host
        self.world = host.world
        self.process = host.process
        self.checker = host.checker
        self.habits = habits
        self.name = name
        self.task: Task | None = None
        self._interruptions = Interruptions(host.world, habits.interrupt, habits.anywhere)

    def __call__(self) -> None:
        rand = self.world.random
        for _ in range(1 + int(rand() * self.habits.rounds)):
            if self.host.session.closed:
                break
            try:
                self._round()
            except Interrupted:
                self.world.note(self.process.name, "is interrupted")
            self._calm()
            self.process.clock.sleep(rand() * rand())

    def _calm(self) -> None:
        assert self.task is not None
        self._interruptions.over(self.task)

    def _maybe_interrupt(self) -> None:
        assert self.task is not None
        self._interruptions.maybe(self.task)

    def _round(self) -> None:
        world, habits = self.world, self.habits
        rand = world.random
        ttl = TTLS_S[int(rand() * len(TTLS_S))]
        min_hold = MIN_HOLD_MAX_S * rand() if rand() < habits.min_hold else 0.0
        max_hold = max(min_hold, 0.5 + 4.0 * rand()) if rand() < habits.max_hold else None
        chance = rand()
        timeout = None if chance < habits.patience else 0.0 if chance < 0.8 else 3.0 * rand()
        told: list[float] = []
        terms = self.host.desk.terms(
            ttl,
            rand() < habits.renew,
            timeout,
            False,
            min_hold,
            max_hold,
            lambda: told.append(world.now),
            "raise",
            None,
        )
        core = self._core(NAMES[int(rand() * habits.names)], terms)
        self._maybe_interrupt()
        adopts = bool(self.host.exported) and rand() < 0.8
        lease = self._adopt(terms) if adopts else self._acquire(core, timeout)
        if lease is None:
            return
        tenure = self.checker.acquired(self.name, self.host.session, lease._hold, min_hold, told)
        try:
            world.note(self.process.name, "holds %s until %.3f of its clock", lease.claim_id, lease.trusted_until)
            self._use(core, lease, tenure, adopts)
        except StoreUnavailable as error:
            world.note(self.process.name, "does not know: %s", str(error))
        except (InvalidOption, LeaseLost, NotHeld) as error:
            world.note(self.process.name, "is told: %s", str(error))
        finally:
            # From here on nobody has the lease; if it is still held, it was dropped.
            tenure.dropped = tenure.hold.state == HELD
            del core, lease

    def _core(self, name: str, terms: Terms) -> LockCore[Lease]:
        """What the program takes."""
        return LockCore(self.host.desk, name, terms, SimLease)

    def _acquire(self, core: LockCore[Lease], timeout: float | None) -> Lease | None:
        text = "for ever" if timeout is None else f"{timeout:.2f} s"
        self.world.note(self.process.name, "wants %s, waits %s", core.name, text)
        return self._attempt(core.acquire(self.name), timeout)

    def _adopt(self, terms: Terms) -> Lease | None:
        desk = self.host.desk
        state = self.host.exported.pop(int(self.world.random() * len(self.host.exported)))
        self.world.note(self.process.name, "adopts %s", state["claim_id"])
        return self._attempt(adopting(desk, read_state(desk, state), terms, self.name, SimLease), None, LeaseLost)

    def _attempt(
        self, steps: Steps[T | None], timeout: float | None, *also: type[Exception], refused: bool = False
    ) -> T | None:
        """Take steps that acquire something, seen by the checker; what came of them, None when they raised.

        They may raise CANNOT, and what is given ``also``. ``refused``: they may turn it away while it has time.
        """
        world = self.world
        self.checker.attempt(self.name, self.process, timeout)
        had = None
        try:
            had = run(steps)
            if had is None:
                self.checker.refused(self.name, self.host.session)
                if timeout is None and not refused:
                    world.broken("P12 who waits without limit is told that it could not be had in time")
        except (*self.CANNOT, *also) as error:
            self.checker.refused(self.name, self.host.session, error)
            world.note(self.process.name, "cannot have it: %s", str(error))
        finally:
            if had is None:
                self.checker.not_acquired(self.name, self.host.session)
                world.note(self.process.name, "goes without")
        return had

    def _use(self, core: LockCore[Lease], lease: Lease, tenure: Tenure, adopted: bool) -> None:
        world, clock, habits = self.world, self.process.clock, self.habits
        rand = world.random
        for _ in range(int(3 * rand()) + 1):
            clock.sleep(habits.work_max_s * rand())
            if rand() < habits.own_renewal:
                self._meet_renewal(lease)
                lease.renew(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])
            lease.check()
        if habits.hand_over and rand() < habits.hand_over:
            self._meet_renewal(lease)
            self.checker.releasing(tenure)
            state = lease.export()
            self.checker.export_returned(tenure)
            world.note(self.process.name, "has exported %s", lease.claim_id)
            self.host.exported.append(state)
            return
        chance = rand()
        if chance < habits.drop:
            world.note(self.process.name, "drops %s", lease.claim_id)
            return
        if chance < habits.drop + habits.sit:
            lease.lost.wait(3.0 * rand())
        else:
            self._meet_renewal(lease)
        self.checker.releasing(tenure)
        confirmed = lease.release() if adopted or rand() < 0.5 else run(core.release(self.name))
        self.checker.release_returned(tenure, confirmed)
        world.note(self.process.name, "has released %s: %s", lease.claim_id, confirmed)

    def _meet_renewal(self, lease: Lease) -> None:
        """Now and then, wait for the moment at which the renewer is busy with this very lease."""
        wait_s = lease._hold.due - self.process.clock.boot()
        if self.world.random() < 0.5 and 0.0 < wait_s < 2.0:
            self.process.clock.sleep(wait_s + 0.005 * self.world.random() ** 2)


class Operator:
    """Somebody who looks at leases, breaks them and purges the table."""

    def __init__(self, host: Host, acts: int, until: float, name: str) -> None:
        self.host = host
        self.name = name
        self.acts = acts
        self.until = until

    def __call__(self) -> None:
        world, desk, clock = self.host.world, self.host.desk, self.host.process.clock
        rand = world.random
        for _ in range(self.acts):
            clock.sleep(self.until * rand() / self.acts)
            try:
                if rand() < 0.4:
                    run(desk.purging(2.0 * rand() ** 2))
                    continue
                record = run(desk.holder(self.name))
                if record is not None and rand() < 0.7:
                    run(desk.breaking(self.name, record.fencing_token, rand() < 0.3))
            except StoreUnavailable as error:
                world.note(self.host.process.name, "does not know: %s", str(error))
