"""The claim lane by itself: one thread at a time serves it, whoever comes, leaves, or is interrupted in between."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from dibs.ask import Ask
from dibs.before import Before
from dibs.busy import BUSY_PAUSE_MAX_S, BUSY_PAUSE_MIN_S, BUSY_TRIES
from dibs.clock import RealGate
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.lane import BACKOFF_MAX_S, BACKOFF_MIN_S
from dibs.store import RELEASED, Acquire, Granted, Release, Renew, StoreBusy, TakesNoWrites
from dibs.waiting import Waiting
from tests.lane_world import WAIT_S, World, acquire, interrupt, once
from tests.waits import eventually

if TYPE_CHECKING:
    pass


@pytest.fixture
def world() -> World:
    return World()


# -- what travels together --------------------------------------------------------------------------------------------


def test_a_lone_caller_needs_no_thread(world: World) -> None:
    """Who finds the lane idle takes its ask to the store itself."""
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    assert ask.outcome == Granted(1, 0.0)
    assert world.clock.threads == []
    world.end()


def test_what_is_asked_during_a_call_is_the_next_call(world: World) -> None:
    """While one call is under way the next batch forms, and is served by whoever serves already."""
    later: list[Ask] = []
    world.shop.during = once(lambda: later.extend(world.put(acquire("b"), acquire("c"))))
    (first,) = world.put(acquire("a"))
    world.lane.drive(first)
    assert world.answered(first, *later)
    assert [[request.name for request in call] for call in world.shop.calls] == [["a"], ["b", "c"]]
    world.end()


def test_releases_go_before_the_acquires_beside_them(world: World) -> None:
    """So that whoever is told of one may ask again in time for the call of the others."""
    asks = world.put(acquire("a"), Release("b", "x"), acquire("c"), Release("d", "x"))
    world.lane.start()
    assert world.answered(*asks)
    assert [[request.name for request in call] for call in world.shop.calls] == [["b", "d"], ["a", "c"]]
    world.end()


def test_what_is_released_and_waited_for_goes_in_one_call(world: World) -> None:
    """A hand-over within this process: in two calls, the name would be nobody's in between."""
    asks = world.put(acquire("b"), acquire("a"), Release("a", "x"))
    world.lane.start()
    assert world.answered(*asks)
    assert [[request.name for request in call] for call in world.shop.calls] == [["a", "b", "a"]]
    world.end()


def test_without_a_line_in_the_store_what_is_released_is_nobodys_for_a_moment(world: World) -> None:
    """Else whoever waits in another process, and only looks now and then, would never find it free."""
    world.lane.pending.hands_over = False
    asks = world.put(acquire("a"), Release("a", "x"))
    world.lane.start()
    assert world.answered(*asks)
    assert [[type(request) for request in call] for call in world.shop.calls] == [[Release], [Acquire]]
    world.end()


def test_an_act_goes_alone(world: World) -> None:
    """An operator's act is called by itself, in its turn."""
    asks = world.put(acquire("a"), lambda store, deadline: len(world.shop.calls), acquire("b"))
    world.lane.start()
    assert world.answered(*asks)
    assert asks[1].outcome == 1
    world.end()


def test_who_stands_behind_an_act_serves_both(world: World) -> None:
    """A caller takes to the store what is before its own, and what comes after it is for others."""
    later: list[Ask] = []
    world.shop.during = once(lambda: later.extend(world.put(acquire("b"))))
    act, ask = world.put(lambda store, deadline: threading.current_thread(), acquire("a"))
    world.lane.drive(ask)
    assert (act.outcome, ask.outcome) == (threading.main_thread(), Granted(1, 0.0))
    assert world.answered(*later)
    assert len(world.clock.threads) == 1
    world.end()


def test_a_look_for_work_that_finds_none_leaves_the_store_open(world: World) -> None:
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    world.lane.drive(None)
    assert world.shop.closed == 0
    world.end()


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_a_caller_is_kept_no_longer_than_one_attempt(world: World) -> None:
    """A failed call is repeated by the lane's own thread; its caller waits, or goes."""

    def fail() -> None:
        assert threading.current_thread() is threading.main_thread()
        raise StoreUnavailable("away for a moment")

    world.shop.during = once(lambda: None)
    (first,) = world.put(acquire("first"))
    world.lane.drive(first)  # the store was reached: an outage is not a wrong address from now on
    world.shop.during = once(fail)
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    assert isinstance(ask.trouble, StoreUnavailable)
    assert len(world.clock.threads) == 1
    world.end()


def test_a_server_that_takes_no_writes_is_wrong_at_first_and_away_later(world: World) -> None:
    """Nothing but reading was done before: SetupRequired, with its words. Afterwards the call is repeated."""

    def fail() -> None:
        raise TakesNoWrites("a replica", maybe_applied=False)

    read, first = world.put(lambda store, deadline: 1, acquire("first"))
    world.shop.during = once(fail)
    world.lane.start()
    assert world.answered(read, first)
    assert (read.outcome, type(first.error), str(first.error)) == (1, SetupRequired, "a replica")
    (second,) = world.put(acquire("second"))
    world.lane.start()
    assert world.answered(second)
    world.shop.during = once(fail)
    (ask,) = world.put(acquire("a"))
    world.lane.start()
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    assert str(ask.trouble) == "a replica"
    world.end()


def test_pauses_after_failed_calls_grow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They double up to a second, before jitter. Each failure is counted: who listens for hints does so anew."""
    failures, pauses = 8, list[float]()
    tries = iter(range(failures))

    def fail() -> None:
        if next(tries, None) is not None:
            raise StoreUnavailable("away for a moment")

    (first,) = world.put(acquire("first"))
    world.lane.drive(first)
    monkeypatch.setattr(world.clock, "sleep", pauses.append)
    monkeypatch.setattr(world.clock, "jitter", lambda: 0.5)
    world.shop.during = fail
    (ask,) = world.put(acquire("a"))
    world.lane.start()
    assert world.answered(ask)
    assert pauses == [min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**number) for number in range(1, failures + 1)]
    assert world.lane.outages == failures
    world.end()


def test_a_bug_is_told_to_all_at_once(world: World) -> None:
    """To repeat what fails for a reason of its own serves nobody; what comes next is served as ever."""

    def fail() -> None:
        raise ZeroDivisionError

    (first,) = world.put(acquire("first"))
    world.lane.drive(first)
    world.shop.during = once(fail)
    asks = world.put(acquire("a"), acquire("b"))
    world.lane.start()
    assert world.answered(*asks)
    assert [type(ask.error) for ask in asks] == [ZeroDivisionError] * 2
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    assert len(world.shop.calls) == 3
    assert ask.outcome == Granted(1, 0.0)
    world.end()


def test_a_caller_begins_no_call_when_its_time_is_over(world: World) -> None:
    """What is asked for anew then (a grant that came too late to be trusted) is for the lane's thread."""

    class Again(Ask):
        """The first answer is of no use."""

        def received(self, outcome: Any) -> None:
            if len(world.shop.calls) == 1:
                world.lane.put(self)
            else:
                self.settle(threading.current_thread())

    world.shop.during = once(lambda: world.clock.sleep(0.1))
    ask = Again(acquire("a"), world.clock.now() + 5.0)
    with world.mutex:
        world.lane.put(ask)
    world.lane.drive(ask, world.clock.now() + 0.05)
    assert world.answered(ask)
    assert [ask.outcome] == world.clock.threads
    world.end()


def test_a_caller_does_not_stay_with_a_busy_store(world: World) -> None:
    """When its time is over, the lane's thread goes on asking."""
    until = world.clock.now() + 0.05

    def busy() -> None:
        if threading.current_thread() is threading.main_thread():
            raise StoreBusy("locked")

    world.shop.during = busy
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask, until)
    assert world.clock.now() < until + WAIT_S / 2
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    world.end()


def test_a_store_that_is_too_busy_is_asked_again(world: World) -> None:
    """That is no trouble that anybody need hear of."""

    def busy() -> None:
        raise StoreBusy

    world.shop.during = once(busy)
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    assert ask.outcome == Granted(1, 0.0)
    world.end()


def test_a_store_that_stays_busy_is_asked_less_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause doubles after each eight tries in vain, up to 4 ms; what comes next begins with the short one."""
    pauses: list[float] = []
    sleep, tries = world.clock.sleep, iter([*range(40), None, 0, None])

    def slept(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        sleep(seconds)

    def busy() -> None:
        if next(tries) is not None:
            raise StoreBusy

    monkeypatch.setattr(world.clock, "sleep", slept)
    world.shop.during = busy
    for name in "ab":
        (ask,) = world.put(acquire(name))
        world.lane.drive(ask)
        assert ask.outcome is not None
    expected = [BUSY_PAUSE_MIN_S * factor for factor in (1, 2, 4, 8, 8) for _ in range(BUSY_TRIES)] + [BUSY_PAUSE_MIN_S]
    assert expected[-2] == BUSY_PAUSE_MAX_S
    for pause, meant in zip(pauses, expected, strict=True):
        assert 0.5 * meant <= pause <= 1.5 * meant
    world.end()


def test_who_gives_up_on_a_busy_store_hears_why(world: World) -> None:
    """What the store said stands in the error: it tells somebody's transaction from a crowd."""

    def busy() -> None:
        raise StoreBusy("database is locked")

    world.shop.during = busy
    ask = Ask(acquire("a"), world.clock.now() + 0.02)
    with world.mutex:
        world.lane.put(ask)
    world.lane.drive(ask)
    assert world.answered(ask)
    assert isinstance(ask.trouble, StoreUnavailable)
    assert "too busy (database is locked)" in str(ask.trouble)
    world.end()


def test_who_gave_up_is_not_asked_for_again(world: World) -> None:
    """A dropped ask never travels again, and does not keep its neighbours."""

    def fail() -> None:
        gone.dropped = True
        raise StoreUnavailable("away for a moment")

    (first,) = world.put(acquire("first"))
    world.lane.drive(first)
    world.shop.during = once(fail)
    gone, stays = world.put(acquire("gone"), acquire("stays"))
    world.lane.start()
    assert world.answered(stays)
    assert [[request.name for request in call] for call in world.shop.calls[1:]] == [["gone", "stays"], ["stays"]]
    world.end()


def late_behind_a_failure(world: World, request: Any, *, owed: bool = False) -> Ask:
    """One that has waited for its whole patience while a call failed, once it is answered."""
    late = Ask(request, world.clock.now())
    late.owed = owed
    return put_behind_a_failure(world, late)


def put_behind_a_failure(world: World, late: Ask) -> Ask:
    (first,) = world.put(acquire("first"))
    world.lane.drive(first)

    def fail() -> None:
        with world.mutex:
            world.lane.put(late)
        raise StoreUnavailable("away for a moment")

    world.shop.during = once(fail)
    (stays,) = world.put(acquire("stays"))
    world.lane.start()
    assert world.answered(stays, late)
    return late


def test_what_waited_behind_failing_calls_for_its_patience_fails_with_them(world: World) -> None:
    """Its own attempt would keep it for one request's time more."""
    late = late_behind_a_failure(world, Renew("late", "claim-late", 30))
    assert isinstance(late.error, StoreUnavailable)
    assert not late.error.maybe_applied
    assert [[request.name for request in call] for call in world.shop.calls[1:]] == [["stays"], ["stays"]]
    world.end()


def test_a_release_that_has_failed_unsent_is_sent_once_all_the_same(world: World) -> None:
    """Whoever waits for it is told in time; the name is not left to its ttl if the store answers again."""
    late = late_behind_a_failure(world, Release("late", "claim-late"))
    assert isinstance(late.error, StoreUnavailable)
    eventually(lambda: ["late"] in [[request.name for request in call] for call in world.shop.calls])
    assert isinstance(late.error, StoreUnavailable)
    world.end()


def test_a_release_that_waits_for_something_else_fails_with_it(world: World) -> None:
    """What is to be told to the store before a release has waited for the patience of both; the release is sent."""
    release, waiting = Ask(Release("late", "claim-late"), world.clock.now()), create_autospec(Waiting)
    before = Before(Renew("noted before", "claim-note", 30), release, world.lane, waiting)
    put_behind_a_failure(world, before)
    assert isinstance(before.error, StoreUnavailable)
    assert isinstance(release.error, StoreUnavailable)
    eventually(lambda: ["late"] in [[request.name for request in call] for call in world.shop.calls])
    world.end()


def test_what_is_owed_is_sent_once_however_late(world: World) -> None:
    """It gives back a grant that nobody has, which would be left to its ttl."""
    late = late_behind_a_failure(world, Release("late", "claim-late"), owed=True)
    assert late.error is None
    assert ["late"] in [[request.name for request in call] for call in world.shop.calls]
    world.end()


# -- who serves -------------------------------------------------------------------------------------------------------


def test_an_interrupted_thread_leaves_its_batch_to_the_lane(world: World) -> None:
    """Ctrl-C in the middle of a call ends the caller's service; the lane's thread repeats the batch."""
    world.shop.during = once(interrupt)
    (ask,) = world.put(acquire("a"))
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(ask)
    assert world.answered(ask)
    assert ask.outcome == Granted(1, 0.0)
    assert len(world.shop.calls) == 2
    world.end()


def test_who_is_told_what_became_of_a_repeated_request_hears_that_it_was_repeated(world: World) -> None:
    """Also when the call was interrupted: a release that finds nothing any more may have been carried out then."""
    world.shop.during = once(interrupt)
    mine, another = world.put(acquire("a"), Release("b", "claim-b"))
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(mine)
    assert world.answered(mine, another)
    assert another.maybe_applied
    (later,) = world.put(Release("b", "claim-b"))
    world.lane.drive(later)
    assert not later.maybe_applied
    world.end()


def test_what_an_interrupted_thread_was_about_to_be_told_is_still_in_the_lane(world: World) -> None:
    """Until the lane's thread tells it once more: out of the lane and unanswered, it would be asked for again.

    (Whoever left the line behind it asked so. The grant was then nobody's if it was withdrawn: it was told to an ask
    that seemed never to have been sent, and so was not given back.)
    """
    interruption, in_lane = once(interrupt), []

    class Interrupted(Ask):
        def received(self, outcome: Any) -> None:
            interruption()
            super().received(outcome)

    ask = Interrupted(acquire("a"), world.clock.now() + 5.0)
    with world.mutex:
        world.lane.put(ask)
    world.clock.at_start = lambda: in_lane.append(ask.in_lane)
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(ask)
    assert world.answered(ask)
    assert in_lane == [True]
    assert ask.outcome == Granted(1, 0.0)
    assert len(world.shop.calls) == 1
    world.end()


@pytest.mark.parametrize("how", ["before it is opened", "after it was opened", "before the task is told"])
def test_ctrl_c_while_another_is_told_its_answer_keeps_it_from_nobody(how: str, world: World) -> None:
    """A thread that serves others is interrupted as it wakes one of them: that one is awake all the same."""
    told = threading.Event()
    interruption = once(interrupt)

    class Gate(RealGate):
        def open(self) -> None:
            if how.startswith("before"):
                interruption()
            super().open()
            interruption()

    def listener(_: object) -> None:
        interruption()
        told.set()

    world.clock.gate = Gate
    mine, other = world.put(acquire("a"), acquire("b"))
    if how == "before the task is told":
        other.listen(listener, None)
    else:

        def wait() -> None:
            other.wait(world.clock, None)
            told.set()

        threading.Thread(target=wait, daemon=True).start()
        eventually(lambda: other._gate is not None, "nobody waits")
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(mine)
    assert told.wait(WAIT_S), "it was told nothing"
    assert world.answered(mine)
    world.end()


def test_ctrl_c_ends_nobody_elses_service(world: World) -> None:
    """Two threads drive one ask, and the one that does not serve is interrupted: the other goes on alone.

    (It happens to a waiter that was sent asking again by the waiting thread.)
    """
    (ask,) = world.put(acquire("a"))
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    def overtaken() -> None:
        """Just before this thread takes the mutex, the other begins to serve, and then Ctrl-C arrives."""
        other.start()
        assert reached.wait(WAIT_S)
        world.mutex.before = lambda: None
        raise KeyboardInterrupt

    world.shop.during = once(hold)
    other = threading.Thread(target=world.lane.drive, args=(ask,), daemon=True)
    main = threading.current_thread()
    world.mutex.before = lambda: overtaken() if threading.current_thread() is main else None
    with pytest.raises(KeyboardInterrupt):
        world.lane.drive(ask)
    # If the lane believed that nobody serves, its own thread would be on its way to the store by now.
    assert world.clock.threads == []
    go_on.set()
    other.join(WAIT_S)
    assert ask.outcome == Granted(1, 0.0)
    assert len(world.shop.calls) == 1
    world.end()


def test_a_thread_that_was_replaced_never_serves(world: World) -> None:
    """Ctrl-C just after the lane's thread was begun begins another; the first ends, whenever it comes to run."""
    late = threading.Event()
    world.clock.at_start = lambda: late.wait(WAIT_S)

    def interrupted() -> None:
        world.clock.at_start = world.clock.after_spawn = lambda: None
        raise KeyboardInterrupt

    world.clock.after_spawn = interrupted
    first_is_over = threading.Event()

    def hold() -> None:
        late.set()
        assert world.clock.bells[0].closed.wait(WAIT_S), "the first thread goes on beside the second"
        first_is_over.set()

    world.shop.during = once(hold)
    (ask,) = world.put(acquire("a"))
    with pytest.raises(KeyboardInterrupt):
        world.lane.start()
    assert world.answered(ask)
    assert first_is_over.is_set()
    assert len(world.clock.threads) == 2
    world.end()


def test_whoever_closes_the_lane_closes_it_alone(world: World) -> None:
    """The lane's thread, waking at that very moment, leaves the store to the one who is closing it."""
    bell = world.idling()
    settled: list[bool] = []

    def meanwhile() -> None:
        bell.ring()
        assert bell.closed.wait(WAIT_S)
        settled.append(world.lane._ended.settled)

    world.shop.closing = meanwhile
    world.end()
    assert settled == [False], "the lane said that its connection was closed before it was"


def test_what_is_put_while_the_store_is_being_closed_is_served_by_one(world: World) -> None:
    """Whoever closes the store goes on as the one who serves: to everybody else the lane is not free meanwhile."""
    late: list[Ask] = []
    serving: list[bool] = []
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    def meanwhile() -> None:
        late.extend(world.put(acquire("b")))
        world.lane.start()
        world.shop.during = lambda: serving.append(world.lane._server is not None)

    world.shop.during = once(hold)
    world.shop.closing = once(meanwhile)
    world.put(acquire("a"))
    world.lane.start()
    assert reached.wait(WAIT_S)
    ended = world.lane.close()
    go_on.set()
    assert ended.wait(world.clock, WAIT_S)
    assert world.answered(*late)
    assert serving == [True]


def test_a_closed_lane_serves_what_was_queued(world: World) -> None:
    """``close`` ends the lane when its work is done, and not before."""
    asks: list[Ask] = []
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    world.shop.during = once(hold)
    asks += world.put(acquire("a"))
    world.lane.start()
    assert reached.wait(WAIT_S)
    asks += world.put(Release("a", "claim-a"))
    ended = world.lane.close()
    assert not ended.settled
    go_on.set()
    assert world.answered(*asks)
    assert ended.wait(world.clock, WAIT_S)
    assert asks[1].outcome == RELEASED
    world.end()


def test_what_was_put_and_not_begun_is_served_before_the_lane_ends(world: World) -> None:
    """Whoever has put it is about to call ``start``."""
    ended: list[bool] = []
    world.shop.during = lambda: ended.append(world.lane._ended.settled)
    asks = world.put(acquire("a"))
    assert world.lane.close().wait(world.clock, WAIT_S)
    assert world.answered(*asks)
    assert ended == [False]
    world.end()


def test_what_is_put_while_a_caller_closes_the_store_is_served(world: World) -> None:
    """It is the last to serve a lane that is being closed, and looks once more when it has closed the store."""
    late: list[Ask] = []

    def meanwhile() -> None:
        late.extend(world.put(acquire("b")))
        world.lane.start()

    world.shop.during = once(world.lane.close)
    world.shop.closing = once(meanwhile)
    (ask,) = world.put(acquire("a"))
    world.lane.drive(ask)
    assert world.answered(ask, *late)
    assert world.lane._ended.wait(world.clock, WAIT_S)
    assert len(late) == 1


def test_closing_does_not_wait_for_what_nobody_waits_for(world: World) -> None:
    """What cleans up after a failure is tried on; whoever closes the client need not wait for it."""
    (first,) = world.put(acquire("first"))
    world.lane.drive(first)

    def fail() -> None:
        raise StoreUnavailable("away")

    world.shop.during = fail
    undo = Ask(Release("a", "claim-a"), world.clock.now() + 60.0)
    undo.afterwards = True
    with world.mutex:
        world.lane.put(undo)
    world.lane.start()
    eventually(lambda: undo.trouble is not None, "no attempt has failed")
    assert world.lane.close().settled
    world.shop.during = lambda: None
    assert world.answered(undo)
    world.end()
