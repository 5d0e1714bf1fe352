"""All planted bugs, each with the worlds in which it is to be found; and how any world is simulated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.bugs import BUGS, PERMIT_BUGS, STEP_BUGS
from tests.simulation.claim_bugs import CLAIM_BUGS, CLAIM_TASK_BUGS
from tests.simulation.election_bugs import ELECTION_BUGS
from tests.simulation.job_bugs import JOB_BUGS, JOB_SIGNAL_BUGS, JOB_TASK_BUGS
from tests.simulation.jobs import SharedJobProgram, simulate_jobs
from tests.simulation.multilock_bugs import MULTILOCK_BUGS
from tests.simulation.once_bugs import ONCE_BUGS
from tests.simulation.pause_bugs import PAUSE_BUGS
from tests.simulation.scenario import simulate
from tests.simulation.shared_bugs import SHARED_BUGS, SHARED_CLAIM_BUGS, SHARED_JOB_BUGS
from tests.simulation.switch_bugs import SWITCH_BUGS
from tests.simulation.switches import switches
from tests.simulation.task_bugs import (
    ELECTION_TASK_BUGS,
    MULTI_TASK_BUGS,
    ONCE_TASK_BUGS,
    PERMIT_TASK_BUGS,
    TASK_BUGS,
)
from tests.simulation.task_jobs import simulate_job_tasks
from tests.simulation.worker_bugs import WORKER_BUGS
from tests.simulation.workers import simulate_workers

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.simulation.bugs import Bug
    from tests.simulation.scenario import Result


class Worlds(NamedTuple):
    """What there is in a world (a kind of ``scenario.KINDS``, or "queues"), and what happens there besides."""

    kind: str = "locks"
    steps: str = ""
    signals: bool = False
    switches: bool = False

    @property
    def name(self) -> str:
        return f"{self.steps or self.kind}{'-switched' if self.switches else ''}"

    def prepared(self) -> AbstractContextManager[None]:
        """As long as this lasts, such worlds can be simulated."""
        return switches() if self.switches else nullcontext()

    def simulate(self, seed: int) -> Result:
        """Run one of them to its end. Raises BrokenPromise."""
        if self.kind == "queues":
            return simulate_jobs(seed, signals=self.signals)
        if self.kind == "shared-queues":
            return simulate_jobs(seed, SharedJobProgram, signals=self.signals)
        if self.kind == "task-queues":
            return simulate_job_tasks(seed)
        if self.kind == "workers":
            return simulate_workers(seed, signals=self.signals)
        return simulate(seed, self.kind, signals=self.signals, steps=self.steps)


PLANTED: dict[Bug, Worlds] = {
    bug: worlds
    for worlds, bugs in (
        (Worlds(), BUGS),
        (Worlds("permits"), PERMIT_BUGS),
        (Worlds("once"), ONCE_BUGS),
        (Worlds("multilocks"), MULTILOCK_BUGS),
        (Worlds("elections"), ELECTION_BUGS),
        (Worlds("claims"), CLAIM_BUGS),
        (Worlds("tasks"), TASK_BUGS),
        (Worlds("task-permits"), PERMIT_TASK_BUGS),
        (Worlds("task-multilocks"), MULTI_TASK_BUGS),
        (Worlds("task-once"), ONCE_TASK_BUGS),
        (Worlds("task-elections"), ELECTION_TASK_BUGS),
        (Worlds("task-claims"), CLAIM_TASK_BUGS),
        (Worlds("pauses"), PAUSE_BUGS),
        (Worlds("shared"), SHARED_BUGS),
        (Worlds("shared-queues"), SHARED_JOB_BUGS),
        (Worlds("queues"), JOB_BUGS),
        (Worlds("queues", signals=True), JOB_SIGNAL_BUGS),
        (Worlds("task-queues"), JOB_TASK_BUGS),
        (Worlds("workers"), WORKER_BUGS),
        (Worlds(steps="observe"), STEP_BUGS),
        (Worlds(switches=True), SWITCH_BUGS),
        (Worlds("shared-claims", switches=True), SHARED_CLAIM_BUGS),
    )
    for bug in bugs
}
