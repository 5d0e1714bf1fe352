"""The claim lane by itself: one thread at a time serves it, whoever comes, leaves, or is interrupted in between."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from dibs import pending
from dibs.ask import Act, Ask
from dibs.busy import BUSY_PAUSE_MAX_S, BUSY_PAUSE_MIN_S, BUSY_TRIES
from dibs.clock import Deadline, RealBell, RealClock, RealGate
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.lane import Lane
from dibs.pending import BATCH_MAX, CROWD_MIN, TURN_S
from dibs.store import RELEASED, Acquire, Granted, PartUnavailable, Release, Renew, StoreBusy, TakesNoWrites
from tests.waits import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.store import Outcome, Request

WAIT_S = 10.0


class Shop:
    """A store that is one counter: it notes every call, and strikes when two threads are in it at once."""

    def __init__(self) -> None:
        self.calls: list[list[Request]] = []
        self.inside = 0
        self.crowded = False
        #: Called in each call to the store, and when it is closed.
        self.during: Callable[[], object] = lambda: None
        self.closing: Callable[[], object] = lambda: None
        #: What is answered to a request instead of what was asked for, if anything.
        self.instead: Callable[[Request], Any] = lambda request: None
        self.closed = 0

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        self.calls.append(list(requests))
        self.inside += 1
        self.crowded = self.crowded or self.inside > 1
        try:
            self.during()
        finally:
            self.inside -= 1
        usual = (Granted(1, 0.0) if isinstance(request, Acquire) else RELEASED for request in requests)
        return [self.instead(request) or outcome for request, outcome in zip(requests, usual, strict=True)]

    def close(self) -> None:
        self.closed += 1
        self.closing()


class Mutex:
    """A lock; ``before`` is called by whoever is about to take it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.before: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        self.before()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


class Bell(RealBell):
    """Tells when its thread looked up and went back to sleep, or ended."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = threading.Event()
        self.closed = threading.Event()

    def wait(self, timeout: float | None, fd: int | None = None) -> None:
        self.asleep.set()
        super().wait(timeout, fd)

    def close(self) -> None:
        super().close()
        self.closed.set()


class Clock(RealClock):
    """The real one, whose threads can be held back and whose bells are kept."""

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        #: Seconds by which it is ahead of the real one.
        self.ahead = 0.0
        self.threads: list[threading.Thread] = []
        #: Called by each new thread before it does anything, and by whoever has just begun one.
        self.at_start: Callable[[], object] = lambda: None
        self.after_spawn: Callable[[], object] = lambda: None

    def now(self) -> float:
        return super().now() + self.ahead

    def bell(self) -> Bell:
        self.bells.append(Bell())
        return self.bells[-1]

    def spawn(self, name: str, run: Callable[[], None]) -> None:  # type: ignore[override]
        at_start = self.at_start

        def body() -> None:
            at_start()
            run()

        thread = threading.Thread(target=body, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()
        self.after_spawn()


class World:
    def __init__(self) -> None:
        self.clock, self.mutex, self.shop = Clock(), Mutex(), Shop()
        self.lane = Lane(self.clock, self.mutex, lambda: self.shop, 5.0, "lane")  # type: ignore[arg-type, return-value]

    def put(self, *requests: Any) -> list[Ask]:
        asks = [self.ask(request) for request in requests]
        with self.mutex:
            for ask in asks:
                self.lane.put(ask)
        return asks

    def ask(self, request: Any) -> Ask:
        return (Act if callable(request) else Ask)(request, self.clock.now() + 5.0)

    def answered(self, *asks: Ask) -> bool:
        return all(ask.wait(self.clock, WAIT_S) for ask in asks)

    def end(self) -> None:
        assert self.lane.close().wait(self.clock, WAIT_S)
        for thread in self.clock.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.clock.threads)
        assert not self.shop.crowded, "two threads served at once"
        assert self.shop.closed <= 1


@pytest.fixture
def world() -> World:
    return World()


def acquire(name: str) -> Acquire:
    return Acquire(name, f"claim-{name}", 5.0, "tester")


def once(function: Callable[[], object]) -> Callable[[], None]:
    """The first call counts."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) == 1:
            function()

    return call


def interrupt() -> None:
    raise KeyboardInterrupt


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


def test_an_act_goes_alone(world: World) -> None:
    """An operator's act is called by itself, in its turn."""
    asks = world.put(acquire("a"), lambda store, deadline: len(world.shop.calls), acquire("b"))
    world.lane.start()
    assert world.answered(*asks)
    assert asks[1].outcome == 1
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
    (first,) = world.put(acquire("first"))
    world.lane.drive(first)
    late = Ask(request, world.clock.now())
    late.owed = owed

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
    (ask,) = world.put(acquire("a"))
    world.lane.start()
    assert world.answered(ask)
    bell = world.clock.bells[0]
    assert bell.asleep.wait(WAIT_S)
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


# -- a crowd of tasks -------------------------------------------------------------------------------------------------


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


def served() -> World:
    """The lane of a store that is a server."""
    world = World()
    world.lane = Lane(world.clock, world.mutex, lambda: world.shop, 5.0, "lane", served=True)  # type: ignore[arg-type, return-value]
    return world


def many(world: World, count: int = 4 * CROWD_MIN) -> list[Ask]:
    return [world.ask(acquire(f"{number:04}")) for number in range(count)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is, however long the machine keeps it."""
    monkeypatch.setattr(pending, "TURN_S", WAIT_S)


@pytest.mark.usefixtures("quick")
def test_half_of_a_crowd_travels_while_the_others_work() -> None:
    """Once a quick call has told how many there are; in the order in which they came."""
    world = served()
    names = crowd(world, many(world))
    assert len(names) == 1
    for _ in range(2):
        names = crowd(world, many(world))
        assert max(len(call) for call in names) == 2 * CROWD_MIN
        assert [name for call in names for name in call] == [ask.request.name for ask in many(world)]
    world.end()


def test_a_slow_call_takes_all() -> None:
    """Far away, or on a slow disk, fewer calls are better."""
    world = served()

    def last() -> None:
        world.clock.ahead += 4 * CROWD_MIN * TURN_S

    world.shop.during = last
    for _ in range(3):
        assert len(crowd(world, many(world))) == 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_a_small_call_of_a_crowd_may_take_as_long_as_a_half() -> None:
    """What counts is what the loop does for the others meanwhile, not how many there were in this one."""
    world = served()
    crowd(world, many(world))

    def last() -> None:
        world.clock.ahead += 1.2 * CROWD_MIN * WAIT_S

    world.shop.during = last
    assert len(crowd(world, many(world, CROWD_MIN))) == 1
    world.shop.during = lambda: None
    assert len(crowd(world, many(world))) > 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_what_a_store_does_in_this_process_is_not_divided(world: World) -> None:
    for _ in range(3):
        assert len(crowd(world, many(world))) == 1
    world.end()


@pytest.mark.usefixtures("quick")
def test_what_one_caller_asks_for_is_one_call_beside_a_crowd() -> None:
    """A batch of claims is one round trip, whoever else asks."""
    world = served()
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
    world = served()
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
