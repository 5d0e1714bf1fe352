"""The simulation in short: many seeds keep every promise, and every planted bug is found.

``DIBS_SEEDS=100000`` makes the first test as long as one likes; ``python -m tests.simulation`` hunts on all cores.
"""

import os

import pytest

from tests.simulation.bugs import BUGS, Bug
from tests.simulation.planted import PLANTED, Worlds
from tests.simulation.scenario import simulate
from tests.simulation.world import BrokenPromise

SEEDS = int(os.environ.get("DIBS_SEEDS", "1000"))
# Each kind of world is several tests, so that none takes minutes where many share a processor.
PARTS = 5
# Worlds that take so many times as long as the others.
SLOWER = {
    "tasks": 2,
    "task-permits": 3,
    "task-multilocks": 3,
    "task-once": 3,
    "task-elections": 3,
    "task-claims": 3,
    "task-queues": 3,
    "workers": 5,
    "locks-switched": 20,
    "permits-switched": 20,
    "multilocks-switched": 30,
    "queues-switched": 30,
    "tasks-switched": 30,
    "shared": 3,
    "shared-permits": 3,
    "shared-multilocks": 5,
    "shared-once": 5,
    "shared-elections": 5,
    "shared-claims": 5,
    "shared-queues": 3,
    "shared-switched": 20,
    "shared-claims-switched": 30,
}
# Worlds with planted bugs, and some in which nothing is planted.
WORLDS = (
    *dict.fromkeys(PLANTED.values()),
    *(Worlds(f"shared-{what}") for what in ("permits", "multilocks", "once", "elections", "claims")),
    *(Worlds(kind, switches=True) for kind in ("permits", "multilocks", "queues", "tasks", "shared")),
)

every_kind = pytest.mark.parametrize("worlds", WORLDS, ids=lambda worlds: worlds.name)


@pytest.mark.timeout(0 if SEEDS > 10_000 else 300)
@pytest.mark.parametrize("part", range(PARTS))
@every_kind
def test_no_seed_breaks_a_promise(worlds: Worlds, part: int) -> None:
    """Whatever is lost, late, paused, crashed or interrupted, and in some clocks are set, or threads switched."""
    with worlds.prepared():
        for seed in range(part, SEEDS // SLOWER.get(worlds.name, 1), PARTS):
            worlds.simulate(seed)


def test_by_default_a_step_of_the_stores_clock_breaks_them() -> None:
    """The control: of 2,000 such worlds 444 had two holders."""
    broken = []
    for seed in range(100):
        try:
            simulate(seed, steps="expiry")
        except BrokenPromise as error:
            broken.append(error.what.split()[0])
    assert set(broken) <= {"P1", "P5"}
    assert len(broken) >= 10


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug) -> None:
    """A simulation that does not find a known mistake within the stated number of seeds is blind."""
    said = []
    with PLANTED[bug].prepared(), bug.planted():
        for seed in range(bug.seeds):
            try:
                PLANTED[bug].simulate(seed)
            except BrokenPromise as broken:
                if broken.what.startswith(bug.breaks):
                    return
                said.append(broken.what)
    pytest.fail(f"not found in {bug.seeds} seeds; what was said instead: {said[:5]}")


@every_kind
def test_a_seed_is_a_run(worlds: Worlds) -> None:
    """The same seed gives the same run, step for step, so that a failure can be looked at again."""
    with worlds.prepared():
        for seed in range(6 if worlds.switches else 20):
            assert worlds.simulate(seed) == worlds.simulate(seed)


def test_a_broken_promise_tells_its_story() -> None:
    """The failure names the seed and shows what happened, to the end."""
    bug = next(bug for bug in BUGS if bug.name == "the token not raised at a takeover")
    story = ""
    with bug.planted():
        for seed in range(bug.seeds):
            try:
                simulate(seed)
            except BrokenPromise as broken:
                story = str(broken)
                break
    assert story.startswith("seed ")
    assert " P2 token " in story.partition("\n")[0]
    assert "Granted(" in story
    assert any(line.split()[1:2] == ["!"] for line in story.splitlines()[-5:])
