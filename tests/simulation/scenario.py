"""How a seed becomes a whole scenario: which processes, which habits, what goes wrong and when."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from tests.simulation.checker import Checker
from tests.simulation.claim_books import RETRY_IN_MAX_S, ClaimChecker
from tests.simulation.claims import ClaimProgram
from tests.simulation.elections import OFFERED_MAX_S, ElectionChecker, ElectionProgram
from tests.simulation.multilocks import MultiChecker, MultiProgram
from tests.simulation.network import LATE_MAX_S, Network
from tests.simulation.onces import KEEPS_S, OnceChecker, OnceProgram
from tests.simulation.pauses import PauseChecker, PauseProgram
from tests.simulation.permits import PermitChecker, PermitProgram
from tests.simulation.process import Process
from tests.simulation.programs import TTL_MAX_S, Habits, Host, Operator, Program
from tests.simulation.residue import look_for_residue
from tests.simulation.shared import SharedChecker, SharedPermitChecker, SharedPermitProgram, SharedProgram
from tests.simulation.shared_claims import SharedClaimChecker, SharedClaimProgram
from tests.simulation.shared_elections import SharedElectionChecker, SharedElectionProgram
from tests.simulation.shared_multilocks import SharedMultiChecker, SharedMultiProgram
from tests.simulation.shared_onces import SharedOnceChecker, SharedOnceProgram
from tests.simulation.steps import STEPS_MAX, StepChecker, Sweeper, set_clock
from tests.simulation.task_claims import ClaimTaskChecker, ClaimTasks
from tests.simulation.task_kinds import (
    ElectionTaskChecker,
    ElectionTasks,
    MultiTaskChecker,
    MultiTasks,
    OnceTaskChecker,
    OnceTasks,
    PermitTaskChecker,
    PermitTasks,
)
from tests.simulation.tasks import TaskChecker, TaskProgram
from tests.simulation.world import Task, World, new_world

# Loaded by who needs them; within a seed that would be so many more instructions, for the first seed that does.
for module in ("dibs.lock_order", "dibs.notes"):
    import_module(module)
#: What programs do in a world of each kind, and what may not happen there.
KINDS: dict[str, tuple[type[Program], type[Checker]]] = {
    "locks": (Program, Checker),
    "permits": (PermitProgram, PermitChecker),
    "once": (OnceProgram, OnceChecker),
    "multilocks": (MultiProgram, MultiChecker),
    "elections": (ElectionProgram, ElectionChecker),
    "claims": (ClaimProgram, ClaimChecker),
    "tasks": (TaskProgram, TaskChecker),
    "task-permits": (PermitTasks, PermitTaskChecker),
    "task-multilocks": (MultiTasks, MultiTaskChecker),
    "task-once": (OnceTasks, OnceTaskChecker),
    "task-elections": (ElectionTasks, ElectionTaskChecker),
    "task-claims": (ClaimTasks, ClaimTaskChecker),
    "pauses": (PauseProgram, PauseChecker),
    "shared": (SharedProgram, SharedChecker),
    "shared-permits": (SharedPermitProgram, SharedPermitChecker),
    "shared-multilocks": (SharedMultiProgram, SharedMultiChecker),
    "shared-once": (SharedOnceProgram, SharedOnceChecker),
    "shared-claims": (SharedClaimProgram, SharedClaimChecker),
    "shared-elections": (SharedElectionProgram, SharedElectionChecker),
}
# What is kept for longer than a ttl there, though nobody holds it.
KEPT_MAX_S = {
    "once": max(KEEPS_S),
    "task-once": max(KEEPS_S),
    "elections": OFFERED_MAX_S,
    "task-elections": OFFERED_MAX_S,
    "claims": RETRY_IN_MAX_S,
    "task-claims": RETRY_IN_MAX_S,
    "shared-claims": RETRY_IN_MAX_S,
    "shared-once": max(KEEPS_S),
    "shared-elections": OFFERED_MAX_S,
}
# Programs more in each process of a world with a crowd.
CROWD = 5
# and where threads are switched anywhere; they may be so much later there.
CROWD_SWITCHED = 3
SWITCHED_S = 3.0
# Leases that nobody has any more are gone after this: a ttl, given by a request that was late.
FREE_AFTER_S = TTL_MAX_S + LATE_MAX_S + 6.0


class Result(NamedTuple):
    """What a run was like."""

    seed: int
    digest: str
    steps: int
    grants: int
    events: int


def simulate(seed: int, kind: str = "locks", *, signals: bool = False, steps: str = "") -> Result:
    """Run one scenario to its end. Raises BrokenPromise.

    kind: what the programs take, one of KINDS.
    signals: programs are also interrupted between any two instructions of dibs, as a signal handler that raises would.
    steps: the store's clock is set now and then, and leases are taken over in this way ("observe", "expiry").
    """
    with new_world(seed) as world:
        return _simulate(world, kind, signals, steps)


def _simulate(world: World, kind: str, signals: bool, steps: str) -> Result:
    rand = world.random
    does, checks = KINDS[kind]
    checker = (StepChecker if steps and checks is Checker else checks)(world)
    network = Network(world, checker)
    network.takeover = steps or "expiry"
    checker.network = network
    horizon = 4.0 + 4.0 * rand()  # faults happen until then; programs may be busy for longer

    world.step_max_s = 0.001 * rand() ** 3
    world.switch_part = (0.02, 0.1, 0.4)[int(rand() * 3)]
    network.latency_max_s = (0.002, 0.03, 0.2)[int(rand() * 3)]
    network.hints = ("signal", "look", "none")[int(rand() * 3)]
    network.hints_lost_part = (0.0, 0.3, 1.0)[int(rand() * 3)]
    request_timeout_s = 0.3 + 3.0 * rand() ** 2
    timeouts = (request_timeout_s, request_timeout_s + 2.0 * rand())
    if steps:  # who asks, looks, too, in the time of one request
        network.latency_max_s = min(network.latency_max_s, request_timeout_s / 8)

    calm = rand() < 0.25
    if calm and world.seed % 2:  # who waits is told in time, or it is seen
        network.hints_lost_part = 0.0
        network.hints = "signal" if network.hints == "none" else network.hints
    if calm and kind in (
        "claims",
        "task-claims",
        "shared-claims",
        "task-elections",
        "pauses",
    ):  # who revives items, or pauses, keeps the lane for many calls; so do candidates who look
        network.latency_max_s = min(network.latency_max_s, 0.03)
    faults = not calm and rand() < 0.6
    pauses = not calm and rand() < 0.4
    crashes = not calm and rand() < 0.3
    closes = not calm and rand() < 0.15
    stalls = not calm and rand() < 0.25
    operator = not calm and rand() < 0.2
    interrupts = rand() < 0.3
    cuts = not calm and rand() < 0.5
    starves = not calm and world.seed % 8 == 5  # the others stay the worlds that they were
    crowd = CROWD_SWITCHED if world.switched else 0
    if kind == "permits" and world.seed % 8 == 6:
        crowd = CROWD  # so that some are asked for along with others
    checker.slack_s += 8 * network.latency_max_s + (SWITCHED_S if world.switched else 0.0)
    checker.calm = calm
    # A poll and its way must fit into the line's grace, which is counted by the store's clock.
    checker.in_order = calm and network.latency_max_s < 0.1 and not (steps or checker.pauses or world.switched)
    checker.prompt = not (stalls or pauses or closes or world.switched)
    checker.interrupts = interrupts or signals
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
        names=1 if rand() < (0.4 if kind.endswith("permits") else 0.7) else 2,
        rounds=3,
        work_max_s=(0.05, 0.4, 1.5, 4.0)[int(rand() * 4)],
        renew=(0.9, 0.9, 0.2)[int(rand() * 3)],
        patience=(0.4, 0.8)[int(rand() * 2)],
        # In every fourth world leases are handed over; the others stay the worlds that they were.
        hand_over=0.4 if world.seed % 4 == 3 else 0.0,
        interrupt=0.3 if interrupts else 0.0,
        anywhere=0.3 if signals else 0.0,
        min_hold=0.0 if steps else 0.1,  # it is kept by the store's clock
    )
    if steps:
        for _ in range(1 + int(STEPS_MAX * rand())):
            world.at(horizon * rand(), set_clock, world, network)
    programs: list[Task] = []
    hosts: list[Host] = []
    for number in range(2 + int(2 * rand())):
        rate = (0.95, 1.05, 0.95 + 0.1 * rand())[int(rand() * 3)]
        process = Process(world, f"p{number}", rate, 1000.0 * rand())
        host = Host(world, network, process, timeouts)
        hosts.append(host)
        for thread in range(1 + int(2.5 * rand()) + crowd):
            program = does(host, f"{process.name}.{thread}", habits)
            program.task = world.start(process, program.name, program)
            programs.append(program.task)
        if pauses and rand() < 0.7:
            for _ in range(2):
                world.at(horizon * rand(), _pause, world, process)
        if cuts and rand() < 0.6:
            start = horizon * rand()
            network.cuts.append((process, start, start + 5.0 * rand(), rand() < 0.5))
            world.at(start, _trouble, world, process, network.cuts[-1][2])
        if starves and rand() < 0.7:
            world.at(horizon * rand() ** 2, process.starve, 0.2 + 3.0 * rand())
        if crashes and rand() < 0.4:
            world.at(horizon * rand(), process.crash)
        if (closes and rand() < 0.5) or (calm and world.seed % 8 == 7):
            world.at(horizon * rand(), close_client, world, host)
    if operator:
        process = Process(world, "op", 1.0, 0.0)
        host = Host(world, network, process, timeouts)
        hosts.append(host)
        programs.append(world.start(process, "operator", Operator(host, 3, horizon, checker.operated)))

    world.run_to_the_end_of(programs)
    if steps:
        world.run_for(horizon + LATE_MAX_S)  # what is still on its way arrives, and nothing goes wrong any more
        process = Process(world, "last", 1.0, 0.0)
        sweeper = Sweeper(Host(world, network, process, timeouts), "sweeper", habits)
        sweeper.task = world.start(process, "sweeper", sweeper)
        task = sweeper.task
        world.run(lambda: task.over)
    return finished(world, checker, FREE_AFTER_S + KEPT_MAX_S.get(kind, 0.0))


def finished(world: World, checker: Checker, free_after_s: float) -> Result:
    """What a run was like, once all that nobody holds any more is free. Raises BrokenPromise."""
    world.run_for(free_after_s)
    checker.finish()
    look_for_residue(world, checker._network())
    world.run(lambda: True)
    digest = f"{world.now:.9f}/{world.random():.9f}"
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


def close_client(world: World, host: Host) -> None:
    """Close the client of a process, if that is still alive."""
    if not host.process.dead:
        world.start(host.process, "closer", host.close)
