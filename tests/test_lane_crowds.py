"""A crowd of tasks in the claim lane: half of them travel while the others work."""

from __future__ import annotations

from typing import Any

import pytest

from dibs import pending
from dibs.ask import Ask
from dibs.pending import BATCH_MAX, CROWD_MIN, TURN_S
from dibs.store import Renew
from tests.lane_world import WAIT_S, World, acquire


def crowd(world: World, asks: list[Ask]) -> list[list[str]]:
    """Let each of these be asked for by a task, all at once; the names in the calls that carry them."""
    for ask in asks:
        ask.listen(lambda _: None, None)
    with world.mutex:
        for ask in asks:
            world.lane.put(ask)
    begun = len(world.shop.calls)
    world.lane.start()
    assert world.answered(*asks)
    return [[request.name for request in call] for call in world.shop.calls[begun:]]


def many(world: World, count: int = 4 * CROWD_MIN) -> list[Ask]:
    return [world.ask(acquire(f"{number:04}")) for number in range(count)]


def lasting(world: World, seconds: float) -> None:
    """From now on each call lasts so long."""

    def last() -> None:
        world.clock.ahead += seconds

    world.shop.during = last


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is, however long the machine keeps it."""
    monkeypatch.setattr(pending, "TURN_S", WAIT_S)


@pytest.mark.usefixtures("quick")
def test_half_of_a_crowd_travels_while_the_others_work() -> None:
    """Once a quick call has told how many there are; in the order in which they came."""
    world = World(served=True)
    names = crowd(world, many(world))
    assert len(names) == 1
    for _ in range(2):
        names = crowd(world, many(world))
        assert max(len(call) for call in names) == 2 * CROWD_MIN
        assert [name for call in names for name in call] == [ask.request.name for ask in many(world)]
    world.end()


def test_a_slow_call_takes_all() -> None:
    """Far away, or on a slow disk, fewer calls are better."""
    world = World(served=True)
    lasting(world, 4 * CROWD_MIN * TURN_S)
    for _ in range(3):
        assert len(crowd(world, many(world))) == 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_a_small_call_of_a_crowd_may_take_as_long_as_a_half() -> None:
    """What counts is what the loop does for the others meanwhile, not how many there were in this one."""
    world = World(served=True)
    crowd(world, many(world))
    lasting(world, 1.2 * CROWD_MIN * WAIT_S)
    assert len(crowd(world, many(world, CROWD_MIN))) == 1
    lasting(world, 0.0)
    assert len(crowd(world, many(world))) > 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_what_a_store_does_in_this_process_is_not_divided() -> None:
    world = World()
    for _ in range(3):
        assert len(crowd(world, many(world))) == 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_what_one_caller_asks_for_is_one_call_beside_a_crowd() -> None:
    """A batch of claims is one round trip, whoever else asks."""
    world = World(served=True)
    crowd(world, many(world))
    asks = world.put(*(acquire(f"{number:04}") for number in range(BATCH_MAX)))
    begun = len(world.shop.calls)
    world.lane.start()
    assert world.answered(*asks)
    assert [len(call) for call in world.shop.calls[begun:]] == [BATCH_MAX]
    world.end()


@pytest.mark.usefixtures("quick")
def test_a_crowd_that_renews_lets_others_in() -> None:
    """Renewals go before acquires; however many there are all the time, these have their turn."""
    world = World(served=True)
    crowd(world, many(world))
    renewing = True

    class Again(Ask):
        """One of many that ask to be renewed as soon as they have been."""

        def received(self, outcome: Any) -> None:
            if renewing:
                world.lane.put(self)
            else:
                self.settle(outcome)

    again = [Again(Renew(f"r{number:04}", "c", 5.0), world.clock.now() + 5.0) for number in range(4 * CROWD_MIN)]
    (late,) = many(world, 1)
    for ask in (*again, late):
        ask.listen(lambda _: None, None)
    with world.mutex:
        for ask in (*again, late):
            world.lane.put(ask)
    world.lane.start()
    assert world.answered(late)
    renewing = False
    assert world.answered(*again)
    world.end()
