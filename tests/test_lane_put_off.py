"""What the claim lane puts off: a row that a transaction has locked, a part of the store that is away."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dibs.ask import Ask
from dibs.errors import StoreUnavailable
from dibs.lane import IDLE_S
from dibs.store import Granted, Held, PartUnavailable, RowBusy
from tests.lane_world import WAIT_S, World, acquire, interrupt, once


@pytest.fixture
def world() -> World:
    return World()


def locked_once(world: World) -> Ask:
    """One whose row a transaction has locked when it is asked for first."""
    answers: Any = iter([RowBusy("a transaction has its row")])
    world.shop.instead = lambda request: next(answers, None)
    (ask,) = world.put(acquire("a"))
    return ask


def away(world: World) -> Ask:
    """One whose part of the store is away."""
    world.shop.instead = lambda request: PartUnavailable("it is away", maybe_applied=False)
    (ask,) = world.put(acquire("a"))
    return ask


def test_what_a_part_of_the_store_did_not_answer_is_asked_again(world: World) -> None:
    """Its neighbours are answered at once; it is asked for again by itself, and trust counts from the first attempt."""
    away, calls = PartUnavailable("one server of three did not answer in time"), world.shop.calls
    world.shop.instead = lambda request: away if len(calls) == 1 and request.name == "b" else None
    first, second, third = world.put(acquire("a"), acquire("b"), acquire("c"))
    world.lane.drive(first)
    assert (first.outcome, third.outcome, second.settled) == (Granted(1, 0.0), Granted(1, 0.0), False)
    assert second.maybe_applied
    t0 = second.t0
    assert world.answered(second)
    assert (second.outcome, second.t0) == (Granted(1, 0.0), t0)
    assert [[request.name for request in call] for call in calls] == [["a", "b", "c"], ["b"]]
    world.end()


def test_who_gives_up_on_a_part_of_the_store_hears_why(world: World) -> None:
    """It is StoreUnavailable, which says whether anything may have been done."""
    world.shop.instead = lambda request: PartUnavailable("it is away", maybe_applied=False)
    ask = Ask(acquire("a"), world.clock.now())
    with world.mutex:
        world.lane.put(ask)
    world.lane.drive(ask)
    assert world.answered(ask)
    assert type(ask.error) is StoreUnavailable
    assert (str(ask.error), ask.error.maybe_applied) == ("it is away", False)
    world.end()


def test_what_a_transaction_has_locked_is_asked_for_again(world: World) -> None:
    ask = locked_once(world)
    world.lane.drive(ask)
    assert not ask.settled
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    assert not ask.maybe_applied
    world.end()


def test_who_is_told_what_is_locked_is_told_at_once(world: World) -> None:
    ask = locked_once(world)
    ask.if_locked = Held(None, 0, 0.0, 1.0)
    world.lane.drive(ask)
    assert ask.outcome == ask.if_locked
    assert len(world.shop.calls) == 1
    world.end()


def test_a_thread_that_idles_sees_to_what_another_has_put_off(world: World) -> None:
    """However long it had nothing to do; there is need for no second one."""
    world.idling()
    world.clock.ahead += IDLE_S
    ask = locked_once(world)
    world.lane.drive(ask)
    assert world.answered(ask)
    assert len(world.clock.threads) == 1
    world.end()


def test_what_is_put_off_and_has_no_thread_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would ask for it again."""

    def refuse(name: str, run: object) -> None:
        raise RuntimeError("can't start new thread")

    ask = away(world)
    with monkeypatch.context() as without_threads:
        without_threads.setattr(world.clock, "spawn", refuse)
        world.lane.drive(ask)
    assert type(ask.error) is StoreUnavailable
    world.end()


def test_ctrl_c_behind_a_call_forgets_nothing_that_was_put_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = locked_once(world)
    monkeypatch.setattr(world.lane, "_look_later", once(interrupt))
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(ask)
    monkeypatch.undo()
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    world.end()


def test_what_is_put_off_is_answered_when_the_lane_is_closed(world: World) -> None:
    """It is asked for once more, and not put off again."""
    go_on = threading.Event()
    world.clock.at_start = lambda: go_on.wait(WAIT_S)
    ask = away(world)
    world.lane.drive(ask)
    ended = world.lane.close()
    go_on.set()
    assert world.answered(ask)
    assert type(ask.error) is StoreUnavailable
    assert len(world.shop.calls) == 2
    assert ended.wait(world.clock, WAIT_S)
    world.end()
