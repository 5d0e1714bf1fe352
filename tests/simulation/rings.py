"""Callers in several processes who wait for each other in a ring, or nearly: who is told, how soon, who must not be.

Each caller takes a name of its own and then waits for its neighbour's, without limit. In some worlds one of them works
instead of waiting, gives up, or dies, so that no ring closes; in some the network or a process fails meanwhile. What
the callers really did, by the world's one clock, decides what should have been told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dibs.errors import LeaseLost, LockOrderWarning, StoreUnavailable, WouldDeadlock
from dibs.lock import LockCore
from dibs.notes import SOON_S, TOLD_WITHIN_S
from dibs.steps import run
from tests.simulation.checker import Checker
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.programs import Host, SimLease
from tests.simulation.world import Task, World, new_world

if TYPE_CHECKING:
    from dibs.lease import Lease

TTL_S = 4.0
# What spoils a ring, or a look at it.
SPOILS = ("none", "none", "works", "gives up", "dies", "faults", "pauses")
# Clocks run at up to 5 % less than the world's, and a thread of a busy world may come late.
SLACK_S = 0.3


class Outcome(NamedTuple):
    """How a world ended."""

    spoilt_by: str
    closed: bool
    told: int


class Caller:
    """One thread that takes two names, one after the other."""

    def __init__(self, host: Host, number: int, names: tuple[str, str], begins_at: float, works: bool) -> None:
        self.host = host
        self.name = f"{host.process.name}.{number}"
        self.names = names
        self.begins_at = begins_at
        self.works = works
        self.timeout: float | None = None
        self.waiting = False
        self.told_at: float | None = None

    def __call__(self) -> None:
        world, process, checker = self.host.world, self.host.process, self.host.checker
        first = self._acquire(self.names[0], None)
        if first is None:
            return
        tenure = checker.acquired(self.name, self.host.session, first._hold, 0.0, [])
        try:
            process.clock.sleep(max(0.0, self.begins_at - world.now))
            if self.works:
                process.clock.sleep(4.0)
            else:
                self.waiting = True
                try:
                    second = self._acquire(self.names[1], self.timeout)
                finally:
                    self.waiting = False
                if second is not None:
                    other = checker.acquired(self.name, self.host.session, second._hold, 0.0, [])
                    process.clock.sleep(0.1)
                    checker.releasing(other)
                    checker.release_returned(other, second.release())
            checker.releasing(tenure)
            checker.release_returned(tenure, first.release())
        except (LeaseLost, StoreUnavailable) as error:
            world.note(process.name, "is told: %s", str(error))
        finally:
            tenure.dropped = True

    def _acquire(self, name: str, timeout: float | None) -> Lease | None:
        host = self.host
        terms = host.desk.terms(TTL_S, True, timeout, False, 0.0, None, None, "raise", None)
        host.checker.attempt(self.name, host.process, timeout)
        lease = None
        try:
            lease = run(LockCore(host.desk, name, terms, SimLease).acquire(self.name))
        except WouldDeadlock as error:
            self.told_at = host.world.now
            host.world.note(host.process.name, "is told: %s", str(error))
        except StoreUnavailable as error:
            host.world.note(host.process.name, "cannot have it: %s", str(error))
        finally:
            if lease is None:
                host.checker.not_acquired(self.name, host.session)
        return lease


def simulate_ring(seed: int) -> Outcome:
    """Run one world to its end. Raises BrokenPromise."""
    with new_world(seed, LockOrderWarning) as world:
        return _simulate(world)


def _simulate(world: World) -> Outcome:
    rand = world.random
    checker = Checker(world)
    network = Network(world, checker)
    checker.network = network
    world.step_max_s = 0.001 * rand() ** 3
    world.switch_part = (0.02, 0.1, 0.4)[int(rand() * 3)]
    network.latency_max_s = (0.002, 0.03)[int(rand() * 2)]
    network.hints = ("signal", "look", "none")[int(rand() * 3)]
    spoilt_by = SPOILS[int(rand() * len(SPOILS))]
    checker.slack_s += 8 * network.latency_max_s

    count = 2 + int(2 * rand())
    names = [f"ring-{number}" for number in range(count)]
    spoiler = int(rand() * count)
    one_process = rand() < 0.2
    callers: list[Caller] = []
    tasks: list[Task] = []
    host: Host | None = None
    for number in range(count):
        if host is None or not one_process:
            process = Process(world, f"p{number}", (0.95, 1.0, 1.05)[int(rand() * 3)], 1000.0 * rand())
            host = Host(world, network, process, (1.0, 2.0))
        spoils = number == spoiler
        pair = names[number], names[(number + 1) % count]
        caller = Caller(host, number, pair, 1.0 + 3.0 * rand(), spoils and spoilt_by == "works")
        if spoils and spoilt_by == "gives up":
            caller.timeout = SOON_S * (0.2 + 1.5 * rand())
        if spoils and spoilt_by == "dies":
            world.at(5.0 * rand(), host.process.crash)
        if spoils and spoilt_by == "pauses":
            world.at(5.0 * rand(), host.process.pause, 3.0 * rand(), rand() < 0.4)
        callers.append(caller)
        tasks.append(world.start(host.process, caller.name, caller))
    if spoilt_by == "faults":
        network.fault_part = 0.15
        network.faults_until = 8.0

    closed_at: list[float] = []

    def watch() -> None:
        alive = all(not caller.host.process.dead for caller in callers)
        if alive and not closed_at and all(caller.waiting for caller in callers):
            closed_at.append(world.now)

    look = world.observe

    def observe() -> None:
        watch()
        look()

    world.observe = observe
    world.run_to_the_end_of(tasks)
    world.run_for(2 * TTL_S + 6.0)
    checker.finish()
    told = [caller for caller in callers if caller.told_at is not None]
    if told and not closed_at:
        world.broken("a false alarm: somebody is told of a ring that never closed")
    if spoilt_by == "none":
        if len(told) != 1:
            world.broken(f"{len(told)} are told of one ring")
        assert told[0].told_at is not None
        late_s = told[0].told_at - closed_at[0]
        if late_s > TOLD_WITHIN_S + SLACK_S:
            world.broken(f"a ring is told {late_s:.2f} s after it closed")
    world.run(lambda: True)
    return Outcome(spoilt_by, bool(closed_at), len(told))
