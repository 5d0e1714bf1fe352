"""What the simulated processes do, and how a seed becomes a whole scenario.

A program takes a lock as a user would, through the shipped ``LockCore``, works for a while, looks at its lease, and
gives it back, drops it, or sits on it until it is over. ``simulate`` builds a world from a seed and runs it to the end.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING, NamedTuple

from dibs.desk import Desk
from dibs.errors import InvalidOption, LeaseLost, NotHeld, StoreUnavailable, WouldDeadlock
from dibs.hold import HELD
from dibs.lease import Lease
from dibs.lock import LockCore
from dibs.session import Session
from dibs.steps import run
from tests.simulation.checker import Checker, Tenure
from tests.simulation.network import LATE_MAX_S, Network
from tests.simulation.world import Interrupted, Process, Task, World

if TYPE_CHECKING:
    from dibs.hold import Hold
    from dibs.terms import Terms
    from dibs.waiting import AcquireAsk

NAMES = ("red", "blue")
TTLS_S = (1.0, 1.0, 1.0, 2.0, 4.0)
TTL_MAX_S = max(TTLS_S)
MIN_HOLD_MAX_S = 1.5
# Leases that nobody has any more are gone after this: a ttl, given by a request that was late.
FREE_AFTER_S = TTL_MAX_S + LATE_MAX_S + 5.0 + 1.0


class SimSession(Session):
    """The shipped session, seen by the checker: who wished for what, and looking on without a mark."""

    world: World
    checker: Checker

    def wish(self, key: str, terms: Terms, owner: object, blocking: bool) -> AcquireAsk:
        ask = super().wish(key, terms, owner, blocking)
        self.checker.wished(owner, ask)
        return ask

    def expire(self, hold: Hold) -> bool:
        if self.world.current is None:
            return True  # the checker asks; is_held has found the trust run out, and expire would say so
        return super().expire(hold)


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
    interrupt: float = 0.0
    anywhere: float = 0.0


class Host:
    """A simulated process with a client of dibs."""

    def __init__(self, world: World, network: Network, process: Process, timeouts: tuple[float, float]) -> None:
        self.world = world
        self.process = process
        self.checker = network.checker
        address = network.address(process)
        request_timeout_s, patience_s = timeouts
        self.session = SimSession(
            address,
            request_timeout_s=request_timeout_s,
            patience_s=patience_s,
            clock=process.clock,
            client_id=process.name,
            host="simulated",
        )
        self.session.world = world
        self.session.checker = network.checker
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
        try:
            run(self.desk.closing())
        except StoreUnavailable:
            pass


class Program:
    """One thread of a process, which takes locks."""

    def __init__(self, host: Host, name: str, habits: Habits) -> None:
        self.host = host
        self.world = host.world
        self.process = host.process
        self.checker = host.checker
        self.habits = habits
        self.name = name
        self.task: Task | None = None
        self._rounds = 0

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
        """No interruption reaches this thread from now on."""
        assert self.task is not None
        self._rounds += 1
        self.world.stop_tracing(self.task)
        self.task.interruptible = False
        self.task.pending = None

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
        core = LockCore(self.host.desk, NAMES[int(rand() * habits.names)], terms, Lease)
        self._maybe_interrupt()
        lease = self._acquire(core, timeout)
        if lease is None:
            return
        tenure = self.checker.acquired(self.name, self.host.session, lease._hold, min_hold, told)
        try:
            world.note(self.process.name, "holds %s until %.3f of its clock", lease.claim_id, lease.trusted_until)
            self._use(core, lease, tenure)
        except StoreUnavailable as error:
            world.note(self.process.name, "does not know: %s", str(error))
        except (InvalidOption, LeaseLost, NotHeld) as error:
            world.note(self.process.name, "is told: %s", str(error))
        finally:
            # From here on nobody has the lease; if it is still held, it was dropped.
            tenure.dropped = tenure.hold.state == HELD
            del core, lease

    def _acquire(self, core: LockCore[Lease], timeout: float | None) -> Lease | None:
        world, session = self.world, self.host.session
        text = "for ever" if timeout is None else f"{timeout:.2f} s"
        world.note(self.process.name, "wants %s, waits %s", core.name, text)
        self.checker.attempt(self.name, self.process, timeout)
        lease = None
        try:
            lease = run(core.acquire(self.name))
        except (StoreUnavailable, WouldDeadlock) as error:
            world.note(self.process.name, "cannot have it: %s", str(error))
        finally:
            if lease is None:
                self.checker.not_acquired(self.name, session)
                world.note(self.process.name, "goes without")
        return lease

    def _use(self, core: LockCore[Lease], lease: Lease, tenure: Tenure) -> None:
        world, clock, habits = self.world, self.process.clock, self.habits
        rand = world.random
        for _ in range(int(3 * rand()) + 1):
            clock.sleep(habits.work_max_s * rand())
            if rand() < habits.own_renewal:
                self._meet_renewal(lease)
                lease.renew(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])
            lease.check()
        chance = rand()
        if chance < habits.drop:
            world.note(self.process.name, "drops %s", lease.claim_id)
            return
        if chance < habits.drop + habits.sit:
            lease.lost.wait(3.0 * rand())
        else:
            self._meet_renewal(lease)
        self.checker.releasing(tenure)
        confirmed = lease.release() if rand() < 0.5 else run(core.release(self.name))
        self.checker.release_returned(tenure, confirmed)
        world.note(self.process.name, "has released %s: %s", lease.claim_id, confirmed)

    def _meet_renewal(self, lease: Lease) -> None:
        """Now and then, wait for the moment at which the renewer is busy with this very lease."""
        wait_s = lease._hold.due - self.process.clock.boot()
        if self.world.random() < 0.3 and 0.0 < wait_s < 2.0:
            self.process.clock.sleep(wait_s + 0.01 * self.world.random())

    def _maybe_interrupt(self) -> None:
        task, world, habits = self.task, self.world, self.habits
        assert task is not None
        chance = world.random()
        if chance < habits.interrupt:
            task.interruptible = True
            world.at(world.now + 2.0 * world.random() ** 2, self._interrupt, self._rounds)
        elif chance < habits.interrupt + habits.anywhere:
            task.interruptible = True
            world.interrupt_after(task, int(120 * world.random() ** 2) + 1)


    def _interrupt(self, rounds: int) -> None:
        # One for each round: who presses Ctrl-C twice interrupts the cleaning up, too.
        if self._rounds == rounds and self.task is not None:
            self.world.interrupt(self.task)


class Operator:
    """Somebody who looks at leases, breaks them and purges the table."""

    def __init__(self, host: Host, acts: int, until: float) -> None:
        self.host = host
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
                record = run(desk.holder(NAMES[0]))
                if record is not None and rand() < 0.7:
                    run(desk.breaking(NAMES[0], record.fencing_token, rand() < 0.3))
            except StoreUnavailable as error:
                world.note(self.host.process.name, "does not know: %s", str(error))


class Result(NamedTuple):
    """What a run was like."""

    seed: int
    digest: str
    steps: int
    grants: int
    events: int


def simulate(seed: int, *, signals: bool = False) -> Result:
    """Run one scenario to its end. Raises BrokenPromise.

    signals: programs are also interrupted between any two instructions of dibs, as a signal handler that raises would.
    """
    world = World(seed)
    # What the garbage collector finds, and when, depends on what ran before; references are counted the same always.
    gc.disable()
    with warnings.catch_warnings():
        # Programs drop leases on purpose; that they are warned is tested elsewhere.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return _simulate(world, signals)
        finally:
            world.close()
            gc.enable()


def _simulate(world: World, signals: bool) -> Result:
    rand = world.random
    checker = Checker(world)
    network = Network(world, checker)
    checker.network = network
    horizon = 4.0 + 4.0 * rand()  # faults happen until then; programs may be busy for longer

    world.step_max_s = 0.001 * rand() ** 3
    world.switch_part = (0.02, 0.1, 0.4)[int(rand() * 3)]
    network.latency_max_s = (0.002, 0.03, 0.2)[int(rand() * 3)]
    network.hints = ("signal", "look", "none")[int(rand() * 3)]
    network.hints_lost_part = (0.0, 0.3, 1.0)[int(rand() * 3)]
    request_timeout_s = 0.3 + 3.0 * rand() ** 2
    timeouts = (request_timeout_s, request_timeout_s + 2.0 * rand())

    calm = rand() < 0.25
    faults = not calm and rand() < 0.6
    pauses = not calm and rand() < 0.4
    crashes = not calm and rand() < 0.3
    closes = not calm and rand() < 0.15
    stalls = not calm and rand() < 0.25
    operator = not calm and rand() < 0.2
    interrupts = rand() < 0.3
    cuts = not calm and rand() < 0.3
    checker.slack_s += 8 * network.latency_max_s
    checker.calm = calm
    checker.in_order = calm and network.latency_max_s < 0.1  # a poll and its way must fit into the line's grace
    checker.prompt = not (stalls or pauses or closes)
    checker.interrupts = interrupts or signals
    checker.anywhere = signals
    if faults:
        network.fault_part = (0.05, 0.15, 0.4)[int(rand() * 3)]
        network.faults_until = horizon
        if rand() < 0.4:
            start = horizon * rand()
            network.outages.append((start, start + 4.0 * rand()))
            world.at(start, _outage, world, network.outages[0][1])
    if pauses and rand() < 0.5:
        network.freeze_part = 0.2
        network.faults_until = horizon
    if stalls:
        world.stall_part = 0.01
        world.stall_max_s = 1.5
        world.at(horizon, _no_more_stalls, world)

    habits = Habits(
        names=1 if rand() < 0.7 else 2,
        rounds=3,
        work_max_s=(0.05, 0.4, 1.5, 4.0)[int(rand() * 4)],
        renew=(0.9, 0.9, 0.2)[int(rand() * 3)],
        patience=(0.4, 0.8)[int(rand() * 2)],
        interrupt=0.3 if interrupts else 0.0,
        anywhere=0.3 if signals else 0.0,
    )
    programs: list[Task] = []
    hosts: list[Host] = []
    for number in range(2 + int(2 * rand())):
        rate = (0.95, 1.05, 0.95 + 0.1 * rand())[int(rand() * 3)]
        process = Process(world, f"p{number}", rate, 1000.0 * rand())
        host = Host(world, network, process, timeouts)
        hosts.append(host)
        for thread in range(1 + int(2.5 * rand())):
            program = Program(host, f"{process.name}.{thread}", habits)
            program.task = world.start(process, program.name, program)
            programs.append(program.task)
        if pauses and rand() < 0.7:
            for _ in range(2):
                world.at(horizon * rand(), _pause, world, process)
        if cuts and rand() < 0.6:
            start = horizon * rand()
            network.cuts.append((process, start, start + 5.0 * rand(), rand() < 0.5))
            world.at(start, _trouble, world, process, network.cuts[-1][2])
        if crashes and rand() < 0.4:
            world.at(horizon * rand(), process.crash)
        if closes and rand() < 0.5:
            world.at(horizon * rand(), _close, world, host)
    if operator:
        process = Process(world, "op", 1.0, 0.0)
        host = Host(world, network, process, timeouts)
        hosts.append(host)
        programs.append(world.start(process, "operator", Operator(host, 3, horizon)))

    world.run(lambda: all(task.over or task.process.dead for task in programs))
    end = world.now + FREE_AFTER_S
    world.at(end, _nothing)
    world.run(lambda: world.now >= end)
    checker.finish()
    world.run(lambda: True)
    digest = f"{world.now:.9f}/{rand():.9f}"
    return Result(world.seed, digest, world.steps, checker.grants, len(world.time_line))


def _pause(world: World, process: Process) -> None:
    process.pause(0.1 + 4.0 * world.random() ** 2, world.random() < 0.4)


def _trouble(world: World, process: Process, until: float) -> None:
    world.note(process.name, "cannot be reached well until %.3f", until)
    world.trouble_until = max(world.trouble_until, until)


def _outage(world: World, until: float) -> None:
    world.note("store", "cannot be reached until %.3f", until)
    world.trouble_until = max(world.trouble_until, until)


def _no_more_stalls(world: World) -> None:
    world.stall_part = 0.0


def _close(world: World, host: Host) -> None:
    if not host.process.dead:
        world.start(host.process, "closer", host.close)


def _nothing() -> None:
    pass
