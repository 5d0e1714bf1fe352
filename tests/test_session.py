"""What is promised of a lease while it lives, where one thread is interrupted and another goes on for it."""

from __future__ import annotations

import asyncio
import dis
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import pytest

import dibs
import dibs.waiting
from dibs.clock import RealClock, boot_now
from dibs.errors import LeaseLost, StoreUnavailable
from dibs.hold import HELD, Hold
from dibs.renewing import give_back_some, renew, renewed
from dibs.steps import run
from dibs.store import Acquire, Granted, Held, Release, Renew
from dibs.stores.sqlite_watch import SQLiteWatch
from dibs.testing.case import within
from dibs.trust import local_deadline
from dibs.wishes import AcquireAsk
from tests.anywhere import CtrlC, anywhere
from tests.between import Between, Holdup
from tests.lane_world import Clock as HeldClock
from tests.waits import eventually

if TYPE_CHECKING:
    from dibs.steps import Steps

numbers = itertools.count()
# What only threads of dibs's own do under a mutex, where no signal comes.
OWN_THREADS = {"_run", "_stand_in", "_beat", "_look", "_round"}


class Signal:
    """A ``Watch`` whose hints a test sends; ``tell`` returns when they were read."""

    interval_s: float | None = None

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._told: list[str] = []
        self.looked = threading.Event()
        self._read = threading.Event()

    def tell(self, name: str) -> None:
        self._read.clear()
        self._told.append(name)
        os.write(self._write_fd, b"!")
        assert self._read.wait(10)

    def fileno(self) -> int:
        self.looked.set()
        return self._read_fd

    def changed(self, names: Collection[str]) -> Collection[str]:
        told, self._told = self._told, []
        if told:
            os.read(self._read_fd, 1)
            self._read.set()
        return told

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://session-{next(numbers)}")


def test_a_grant_too_old_to_trust_is_given_out_once(between: Between) -> None:
    """After a Ctrl-C an answer may be given out twice; one that is asked for anew by then is left on its way."""
    with between.client(ttl=5) as client:
        session = client._desk.session()
        ask = session.wish("default:old", client.lock("old")._core.terms, "me", blocking=True)
        first = ask.request.claim_id
        with session.mutex:
            session.waiting.enter(ask)
            session.lane.pending.asks.clear()
            ask.t0 = session.clock.now() - 60
            for _ in range(2):
                ask.in_lane = False
                ask.received(Granted(1, 0.0))
                assert ask.in_lane
        session.lane.start()
        eventually(lambda: ask.settled, "no answer")
        assert isinstance(ask.outcome, Hold)
        assert ask.outcome.state == HELD
        assert ask.outcome.claim_id != first
        session.withdraw(ask)


def test_a_grant_after_one_that_was_too_old_makes_a_hold_of_its_own(between: Between) -> None:
    """An answer given out again after a Ctrl-C, too old by now: the hold it made the first time is not used again."""
    with between.client(ttl=5) as client:
        session = client._desk.session()
        terms = client.lock("old")._core.terms
        ask = session.wish("default:old", terms, "me", blocking=True)
        first = ask.request.claim_id
        with session.mutex:
            session.waiting.enter(ask)
            session.lane.pending.asks.clear()
            ask.t0 = session.clock.now() - 60
            ask.hold = Hold("default:old", first, Granted(1, 0.0), terms, "me", ask.t0)
            ask.in_lane = False
            ask.received(Granted(1, 0.0))
        session.lane.start()
        eventually(lambda: ask.settled, "no answer")
        assert isinstance(ask.outcome, Hold)
        assert ask.outcome.claim_id == ask.request.claim_id != first
        assert ask.outcome.state == HELD
        session.withdraw(ask)
        eventually(lambda: client.holder("old") is None, "it is not given back")


def test_who_left_the_line_before_its_grant_was_too_old_stands_in_it_again(between: Between) -> None:
    """A grant is given out, a Ctrl-C comes, and the second time it is too old: the next in line is asked for, and who
    had it takes the last place."""
    with between.client(ttl=5) as client:
        session = client._desk.session()
        terms = client.lock("old")._core.terms
        ask, following = (session.wish("default:old", terms, who, blocking=True) for who in ("me", "you"))
        with session.mutex:
            session.waiting.enter(ask)
            session.waiting.enter(following)
            session.lane.pending.asks.clear()
            ask.in_lane = False
            session.waiting.leave_line(ask)  # as the grant did when it was given out first …
            session.lane.pending.asks.clear()  # … until Ctrl-C came, just before the next was asked for
            following.in_lane = False
            ask.t0 = session.clock.now() - 60
            ask.received(Granted(1, 0.0))
            assert session.waiting.everybody() == [following, ask]
            assert following in session.lane.pending.asks
            assert ask not in session.lane.pending.asks
        session.lane.start()
        eventually(lambda: following.settled, "the next in line is not asked for")
        session.withdraw(following)
        eventually(lambda: ask.settled, "whoever lost its place is not asked for")
        assert isinstance(ask.outcome, Hold)
        session.withdraw(ask)


def test_several_are_given_out_all_or_none(between: Between) -> None:
    """What a caller is to have together is marked as in its hand only when none of it is over."""
    with between.client(ttl=60) as client:
        session = client._desk.session()
        leases = [client.lock(name).acquire() for name in "abc"]
        holds = [lease._hold for lease in leases if lease is not None]
        for hold in holds:
            hold.given = False  # as before they are handed over
        session.keeper.lose(holds[1], "the test says so")
        assert not session.give(*holds)
        assert [hold.given for hold in holds] == [False] * 3
        assert session.give(holds[0], holds[2])
        assert [hold.given for hold in holds] == [True, False, True]
        for lease in leases[::2]:
            assert lease is not None
            lease.release()


def test_who_cannot_sleep_leaves_no_place_taken(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that can have no thread refuses who waits; whoever comes after it is asked for all the same."""
    with between.client(ttl=5) as client:
        session = client._desk.session()
        terms = client.lock("x")._core.terms
        ask = session.wish("default:x", terms, "me", blocking=True)

        def begin(*_: object) -> Any:
            raise StoreUnavailable("no thread")

        with session.mutex, monkeypatch.context() as patch:
            session.waiting._first[ask.line] = ask
            patch.setattr(dibs.waiting, "begin", begin)
            with pytest.raises(StoreUnavailable):
                session.waiting.fall_asleep(ask, Held("h", 1, 0.0, 60.0))
            ask.failed(StoreUnavailable("no thread"))
            assert session.waiting._asleep == {}


@pytest.mark.parametrize("store", ["sqlite", "postgres", "mysql", "redis", "memcached", "etcd", "zookeeper"])
def test_a_release_is_noticed_before_the_next_poll(
    store: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's waiter, first in line, hears of it or looks for it: of a lock, and of what has permits."""
    monkeypatch.setattr(dibs.waiting, "POLL_MIN_S", 60.0)
    monkeypatch.setattr(dibs.waiting, "POLL_MAX_S", 60.0)
    url = request.getfixturevalue(f"{store}_url")
    with dibs.connect(url) as client, dibs.connect(url) as other, ThreadPoolExecutor(1) as pool:
        kinds = [lambda by: by.lock("noticed"), lambda by: by.semaphore("noticed permits", 1)]
        for describe in kinds[: 1 + client.capabilities.permits]:
            held = describe(client).acquire()
            waits = pool.submit(describe(other).acquire)
            eventually(lambda: other._desk.session().waiting._asleep, "nobody waits")
            held.release()
            waits.result(20).release()


def test_who_leaves_a_long_line_is_not_searched_for_in_it(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who came last leave first, as cancelled tasks may: none is compared with all who stand before it."""
    compared = 0

    def equal(one: object, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    with between.client() as holder, between.client() as client:
        held = holder.lock("long")
        held.acquire()
        session, terms = client._desk.session(), client.lock("long")._core.terms
        asks = [session.wish("default:long", terms, number, blocking=True) for number in range(100)]
        for ask in asks:
            session.submit(ask)
        monkeypatch.setattr(AcquireAsk, "__eq__", equal, raising=False)
        for ask in asks[:0:-1]:
            session.withdraw(ask)
        assert compared < len(asks)
        assert session.waiting.everybody() == asks[:1]
        session.withdraw(asks[0])
        assert session.waiting.everybody() == []
        held.release()


def test_those_who_poll_do_so_together(between: Between) -> None:
    """A client that waits for many names asks for all that are due in one call, not for each by itself."""
    names = [f"polled/{number}" for number in range(40)]
    with ThreadPoolExecutor(len(names)) as pool, between.client() as holder, between.client() as client:
        held = [holder.lock(name).acquire() for name in names]
        waits = [pool.submit(client.lock(name).acquire) for name in names]
        asleep = client._desk.session().waiting._asleep
        eventually(lambda: len(asleep) == len(names), "not all wait")
        at = sorted(ask.wake_at for ask in list(asleep.values()))
        beats = [(later - at[0]) / dibs.waiting.POLL_BEAT_S for later in at]
        assert beats == pytest.approx([round(beat) for beat in beats], abs=1e-3)
        for lease in held:
            assert lease is not None
            lease.release()
        for wait in waits:
            assert wait.result(20) is not None


def test_a_hint_during_a_request_makes_it_ask_again(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that was refused just before the release, and hears of the release before its refusal, asks at once."""
    monkeypatch.setattr(dibs.waiting, "POLL_MIN_S", 30.0)
    monkeypatch.setattr(dibs.waiting, "POLL_MAX_S", 30.0)
    watch = Signal()
    between.watch = lambda: watch
    with between.client(ttl=60) as client, between.client(ttl=60) as other, ThreadPoolExecutor(2) as pool:
        first, second = other.lock("first").acquire(), other.lock("second").acquire()
        assert first is not None
        assert second is not None
        # Somebody waits already, so the watch is open and its thread is not the one that asks for the other name.
        waits = pool.submit(client.lock("first").acquire)
        assert watch.looked.wait(10)
        holdup = Holdup(lambda requests: requests[0].name.endswith(":second"))
        between.after = holdup
        refused = pool.submit(client.lock("second").acquire)
        assert holdup.reached.wait(10)
        second.release()
        watch.tell("default:second")
        holdup.go_on()
        lease = refused.result(10)
        assert lease is not None
        lease.release()
        first.release()
        watch.tell("default:first")
        lease = waits.result(10)
        assert lease is not None
        lease.release()


def kept_busy(
    between: Between, client: dibs.Client, pool: ThreadPoolExecutor
) -> tuple[Holdup, Future[dibs.Lease | None]]:
    """Keep its lane in a call until ``go_on``: that of who asks for the name other, which is the second."""
    holdup = Holdup(lambda requests: requests[0].name.endswith(":other"))
    between.before = holdup
    busy = pool.submit(client.lock("other").acquire)
    assert holdup.reached.wait(10)
    return holdup, busy


def test_a_release_that_travels_with_the_acquire_behind_which_it_was_queued_goes_first(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter may travel in one call with the release it waits for, which came later: it is granted by that call."""
    monkeypatch.setattr(dibs.waiting, "POLL_MIN_S", 30.0)
    monkeypatch.setattr(dibs.waiting, "POLL_MAX_S", 30.0)
    watch = Signal()
    between.watch = lambda: watch
    with between.client(ttl=60) as client, between.client(ttl=60) as other, ThreadPoolExecutor(4) as pool:
        session = client._desk.session()
        taken = other.lock("taken").acquire()
        assert taken is not None
        waits = pool.submit(client.lock("taken").acquire)  # so that the watch is open
        assert watch.looked.wait(10)
        lock = client.lock("short")
        first = lock.acquire()
        assert first is not None
        holdup, busy = kept_busy(between, client, pool)
        second = pool.submit(lock.acquire)
        eventually(lambda: len(session.lane.pending.asks) == 1, "nobody asks")
        released = pool.submit(first.release)
        eventually(lambda: len(session.lane.pending.asks) == 2, "nobody releases")
        session.lane.pending.releases_only = True  # as after a call of releases alone
        holdup.go_on()
        assert released.result(10)
        assert [Release, Acquire] in [[type(request) for request in call] for call in between.calls]
        for granted in (second, busy):
            lease = granted.result(10)
            assert lease is not None
            lease.release()
        taken.release()
        watch.tell("default:taken")
        lease = waits.result(10)
        assert lease is not None
        lease.release()


def test_a_renewal_that_its_holder_asked_for_goes_before_the_release(between: Between) -> None:
    """Also when they travel alone, so that releases could go first: none reaches the store after release() returned."""
    with between.client(ttl=60) as client, ThreadPoolExecutor(3) as pool:
        session = client._desk.session()
        lease = client.lock("x").acquire()
        assert lease is not None
        holdup, busy = kept_busy(between, client, pool)
        renewed = pool.submit(lease.renew)
        eventually(lambda: len(session.lane.pending.asks) == 1, "nobody renews")
        released = pool.submit(lease.release)
        eventually(lambda: len(session.lane.pending.asks) == 2, "nobody releases")
        holdup.go_on()
        assert released.result(10)
        with pytest.raises(LeaseLost):
            renewed.result(10)
        sent = [type(request) for call in between.calls for request in call]
        assert sent.index(Renew) < sent.index(Release)
        other = busy.result(10)
        assert other is not None
        other.release()


def test_nothing_more_is_asked_of_a_lease_that_another_thread_has_released(between: Between) -> None:
    """Also when its holder had looked a moment before whether it was held."""
    with between.client(ttl=60) as client:
        session = client._desk.session()
        lease = client.semaphore("x", 2).acquire()
        assert lease is not None
        lease.release()
        between.calls.clear()
        for ask in renew(session, lease._hold, None), give_back_some(session, lease._hold, 1):
            assert session.wait(ask, 0)
            assert not ask.in_lane
        client.ping()
        assert not [request for call in between.calls for request in call]


def test_who_asks_during_a_look_is_looked_for(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What became free between the store's answer to a waiter and its arrival, when another was looked for, is seen."""
    monkeypatch.setattr("dibs.waiting.POLL_MIN_S", 60.0)
    monkeypatch.setattr("dibs.waiting.POLL_MAX_S", 60.0)
    looks: list[Collection[str]] = []
    real = SQLiteWatch._changed

    def look(watch: SQLiteWatch, names: Collection[str]) -> Collection[str]:
        looks.append(names)
        return real(watch, names)

    monkeypatch.setattr(SQLiteWatch, "_changed", look)
    between = Between(sqlite_url)
    with between.client(ttl=60) as client, dibs.connect(sqlite_url, ttl=60) as other, ThreadPoolExecutor(2) as pool:
        first, second = other.lock("first").acquire(), other.lock("second").acquire()
        assert first is not None
        assert second is not None
        waits = [pool.submit(client.lock("first").acquire, timeout=30)]
        # It has asked once more, too, when it began to look.
        eventually(lambda: looks and client._desk.session().waiting._asleep, "it does not sleep")
        answer = Holdup(lambda requests: any(request.name == "default:second" for request in requests))
        between.after = answer
        waits.append(pool.submit(client.lock("second").acquire, timeout=30))
        assert answer.reached.wait(10)
        second.release()
        other.ping()  # the release is not waited for
        seen = len(looks)
        eventually(lambda: len(looks) > seen + 2, "nobody looks")
        answer.go_on()
        assert waits[1].result(10) is not None
        first.release()
        assert waits[0].result(10) is not None


def test_who_falls_asleep_during_a_look_is_looked_for(between: Between) -> None:
    """A store may tell a change only once, so it must be asked about everybody who waits by then."""
    looked: list[Collection[str]] = []
    ready = threading.Event()

    class Look(Signal):
        interval_s: float | None = 0.001

        def fileno(self) -> int:
            if len(client._desk.session().waiting._asleep) == 1 and not looked:
                super().fileno()
                assert ready.wait(10)
            return super().fileno()

        def changed(self, names: Collection[str]) -> Collection[str]:
            if ready.is_set():
                looked.append(list(names))
            return ()

    watch = Look()
    between.watch = lambda: watch
    with between.client(ttl=60) as client, between.client(ttl=60) as other, ThreadPoolExecutor(2) as pool:
        held = [other.lock(name).acquire() for name in ("first", "second")]
        waits = [pool.submit(client.lock("first").acquire, timeout=5)]
        assert watch.looked.wait(10)
        waits.append(pool.submit(client.lock("second").acquire, timeout=5))
        eventually(lambda: len(client._desk.session().waiting._asleep) == 2, "it does not sleep")
        ready.set()
        eventually(lambda: bool(looked), "nobody looks")
        assert set(looked[0]) == {"default:first", "default:second"}
        for lease in held:
            assert lease is not None
            lease.release()
        for granted in waits:
            assert granted.result(10) is not None


def test_who_has_waited_long_enough_is_told_what_went_wrong(between: Between) -> None:
    """Also when the last attempt is not over yet."""
    hold_up = threading.Event()

    def before(requests: Sequence[object]) -> None:
        if len(between.calls) == 2:
            raise StoreUnavailable("refused")
        hold_up.wait(10)

    with between.client(request_timeout=0.2, patience=0.3) as client, client.lock("a", ttl=60) as lease:
        between.before = before
        try:
            with pytest.raises(StoreUnavailable, match=r"did not answer the renewal.* \(refused\)"):
                lease.renew()
        finally:
            hold_up.set()


@pytest.mark.parametrize("behind", [False, True], ids=["first in line", "behind another"])
def test_an_answer_that_is_old_says_nothing_of_now(
    between: Between, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Who waited in vain while the store was away is told that, not who held the name before."""
    monkeypatch.setattr(dibs.waiting, "FRESH_S", 0.3)
    monkeypatch.setattr(dibs.waiting, "POLL_MIN_S", 0.05)
    monkeypatch.setattr(dibs.waiting, "POLL_MAX_S", 0.1)
    away = threading.Event()

    def before(requests: Sequence[object]) -> None:
        if away.is_set():
            raise StoreUnavailable("away")

    between.before = before
    with (
        dibs.connect(between.address.shown, ttl=60) as other,
        between.client(ttl=60, request_timeout=0.5, patience=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        held = other.lock("held").acquire()
        assert held is not None
        lock = client.lock("held")
        waiting = client._desk.session().waiting
        waits = pool.submit(lock.acquire, timeout=60) if behind else None
        if behind:
            eventually(lambda: bool(waiting._asleep), "it does not sleep")
        threading.Timer(0.0 if behind else 0.5, away.set).start()
        with pytest.raises(StoreUnavailable, match="did not answer"):
            lock.acquire(timeout=1.5)
        away.clear()
        client.ping()  # the store is asked again
        with pytest.raises(dibs.LockTimeout, match="is held by"):
            with client.lock("held", timeout=0.2):
                pass
        held.release()
        if waits is not None:
            assert waits.result(10) is not None


def test_who_looks_again_and_again_for_a_loss_leaves_nothing_behind(between: Between) -> None:
    """A wait that is over is not called any more, however often there was one."""
    with between.client(ttl=60) as client:
        lease = client.lock("watched").acquire()
        assert lease is not None
        for _ in range(3):
            assert not lease.lost.wait(0.01)
            assert not lease.lost.wait(0)
        assert not lease._hold.listeners
        assert lease.release()


def test_a_loss_is_told_while_a_renewal_hangs(between: Between) -> None:
    """``on_lost`` of a lease granted during a call of the renewer does not wait for the end of that call."""
    with between.client(request_timeout=30) as client:
        holdup = Holdup(lambda requests: isinstance(requests[0], Renew))
        between.before = holdup
        renewed = client.lock("renewed", ttl=20).acquire()
        assert renewed is not None
        session = client._desk.session()
        with session.mutex:  # as though its time had come
            session.renewer.forget(renewed._hold)
            session.renewer._push(renewed._hold, session.clock.now())
        assert holdup.reached.wait(10)
        for _ in range(2):
            told = threading.Event()
            lease = client.lock("short", ttl=0.3, renew=False, on_lost=told.set).acquire(timeout=5)
            assert lease is not None
            assert told.wait(10), "nobody is told before the renewal is over"
            assert not lease.held
        assert renewed.held
        holdup.go_on()
        renewed.release()


@pytest.mark.parametrize("next_up", ["long", "short"])
def test_a_call_hangs_no_longer_than_any_lease_is_trusted_that_is_retried(next_up: str) -> None:
    """Of leases whose renewals failed, a call that hangs is over before the first trust ends, whichever is next."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client:
        session = client._desk.session()
        with client.lock("long", ttl=60) as long, client.lock("short", ttl=20) as short:
            due = session.clock.now() + 5
            order = [long, short] if next_up == "long" else [short, long]
            with session.mutex:
                for place, lease in enumerate(order):
                    session.renewer.forget(lease._hold)
                    session.renewer._push(lease._hold, due + place)
                assert session.renewer._earliest_deadline([]) == short.trusted_until


def test_a_call_hangs_no_longer_than_a_lease_is_trusted_that_max_hold_cuts_short() -> None:
    """A renewal that max_hold allows less time than others of this ttl is seen when the length of a call is decided."""
    with dibs.connect(f"memory://session-{next(numbers)}", ttl=30) as client:
        session = client._desk.session()
        with client.lock("goes on"), client.lock("ends", max_hold=40) as lease:
            hold, now = lease._hold, session.clock.now()
            with session.mutex:  # as a renewal leaves it that came 12 s before its end
                session.renewer.forget(hold)
                hold.terms = hold.terms._replace(max_hold=now + 12 - hold.t0)
                hold.trusted_until = local_deadline(now, 12, session.margin_s)
                session.renewer.track(hold, now)
                assert session.renewer._earliest_deadline([]) == hold.trusted_until


def test_a_lease_whose_last_renewal_fails_before_its_max_hold_is_over_by_that() -> None:
    """The last renewals are for less time than a call may take, and what fails then is not why it ends."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client, client.lock("x", ttl=30, max_hold=60) as lease:
        hold = lease._hold
        hold.last_error = StoreUnavailable("away")
        assert "away" in hold.why_over()
        trusted_until, hold.trusted_until = hold.trusted_until, hold.ends_at - 1
        assert hold.why_over() == "its max_hold of 60 s is over"
        hold.trusted_until = trusted_until


def test_a_lease_that_was_renewed_for_less_time_than_it_has_is_renewed_before_that_is_over() -> None:
    """When its own interval is over, a renewal would gain nothing yet; it was left alone then until it was lost."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client, client.lock("x", ttl=60) as lease:
        lease.renew(3)
        session, hold = client._desk.session(), lease._hold
        with session.mutex:
            due = session.renewer._next_due()
            renewed, lost, _ = session.renewer._collect(due)
            hold.in_flight = False
            session.renewer.track(hold, session.clock.now())
        assert (renewed, lost) == ([hold], [])
        assert due == pytest.approx(lease.trusted_until - local_deadline(0.0, 3, session.margin_s) + 1)


def test_what_was_asked_for_long_before_it_was_granted_does_not_stand_behind_what_was_renewed_since() -> None:
    """Its first answer was lost, say: so long was it not trusted, and it is due at once."""
    with dibs.connect(f"memory://session-{next(numbers)}", ttl=60) as client:
        with client.lock("young"), client.lock("old") as old:
            session, hold = client._desk.session(), old._hold
            with session.mutex:
                session.renewer.forget(hold)
                asked_at = session.clock.now() - 30
                hold.trusted_until = local_deadline(asked_at, 60, session.margin_s)
                session.renewer.track(hold, asked_at)
                assert session.renewer._next_due() == asked_at + hold.terms.delay_s
                assert session.renewer._collect(session.clock.now())[0] == [hold]
                hold.in_flight = False
                session.renewer.track(hold, session.clock.now())


def test_a_renewal_that_was_sent_late_does_not_reach_beyond_max_hold() -> None:
    """What is asked for is sent when the store can be reached; so much later does the time begin that it is for."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client, client.lock("x", ttl=30, max_hold=40) as lease:
        session, hold = client._desk.session(), lease._hold
        ask = renew(session, hold, 30)
        assert session.wait(ask, 10)
        assert ask.t0 is not None
        ask.t0 += 20
        assert renewed(session, hold, ask)
        assert hold.trusted_until == hold.ends_at


@pytest.mark.parametrize("by", ["its holder", "itself"])
def test_what_has_reached_its_max_hold_is_renewed_for_no_time_below_none(between: Between, by: str) -> None:
    """A thread was held up after it had seen that the lease is held."""
    with between.client() as client:
        lease = client.lock("x", ttl=30, max_hold=60).acquire()
        assert lease is not None
        session, hold = client._desk.session(), lease._hold
        with session.mutex:
            session.renewer.forget(hold)
            hold.t0 -= 61
            hold.trusted_until = hold.ends_at
        if by == "its holder":
            ask = renew(session, hold, None)
            assert session.wait(ask, 10)
            assert not renewed(session, hold, ask)
            with pytest.raises(LeaseLost, match=r"its max_hold of 60 s is over"):
                lease.check()
        else:
            session.renewer._renew([hold], session.clock.now() + 10)
        renewals = [request for requests in between.calls for request in requests if type(request) is Renew]
        assert [request.ttl > 0 for request in renewals] == ([] if by == "its holder" else [True])
        assert not lease.held


def test_a_lease_given_too_late_is_lost_aloud(between: Between) -> None:
    """A grant found unclaimed at the end of its trust, and taken in hand just then, is a loss that is told."""
    with between.client(ttl=60) as client:
        told = threading.Event()
        lease = client.lock("late", on_lost=told.set).acquire()
        assert lease is not None
        # The renewer has found it not yet given, which it was at the time.
        client._desk.session().keeper.give_back(lease._hold)
        assert told.wait(10)
        assert lease.lost.is_set()
        with pytest.raises(LeaseLost):
            lease.release()


def test_a_close_gives_back_what_the_renewer_is_about_to(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant that nobody took in hand, found by a renewer that is held up before it has given it back."""
    found, go_on = threading.Event(), threading.Event()
    client = between.client()
    client.ping()
    session = client._desk.session()
    give_back = session.renewer._give_back

    def held_up(hold: Hold) -> None:
        found.set()
        assert go_on.wait(10)
        give_back(hold)

    monkeypatch.setattr(session.renewer, "_give_back", held_up)
    ask = session.wish("default:late", client.lock("late", ttl=0.5)._core.terms, "somebody", False)
    session.submit(ask)
    assert session.wait(ask, 10)
    assert found.wait(10)
    closing = threading.Thread(target=client.close)
    closing.start()
    release = Release("default:late", ask.request.claim_id)
    try:
        eventually(lambda: any(release in requests for requests in between.calls), "it is not given back")
    finally:
        go_on.set()
        closing.join(10)
    assert not closing.is_alive()


def test_a_cancellation_beside_a_loss_is_not_swallowed() -> None:
    """A task that waits for the loss, and is cancelled as soon as it was told and has not gone on, is cancelled."""

    async def cancelled_after(turns: int) -> None:
        async with dibs.connect_async(f"memory://session-{next(numbers)}") as client:
            lease = await client.lock("x").acquire()
            assert lease is not None
            waiter = asyncio.create_task(lease.lost.wait())
            for _ in range(3):  # turns of the loop, in which nothing else runs: until it waits
                await asyncio.sleep(0)
            assert lease._hold.listeners
            lease._session.keeper.lose(lease._hold, "a test has it so")
            for _ in range(turns):  # each turn of the loop is a place for the cancellation; no time goes by
                await asyncio.sleep(0)
            if waiter.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await waiter
            else:
                assert waiter.result() is True

    for turns in range(6):
        asyncio.run(cancelled_after(turns))


def test_ctrl_c_anywhere_in_a_renewal_leaves_the_lease_looked_after() -> None:
    """Whoever catches the Ctrl-C that came in renew() holds a lease that is renewed, or told lost, as before."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client:
        for ctrl_c in anywhere():
            with client.lock("x") as lease:
                ctrl_c.during(lambda lease=lease: lease.renew(20))  # type: ignore[misc]
                session = client._desk.session()
                with session.mutex:
                    assert lease._hold in session.renewer.tracked(), ctrl_c.arrived


def test_ctrl_c_anywhere_in_close_leaves_nobody_holding_or_waiting() -> None:
    """A close that is interrupted, wherever, gives back what is held and refuses who waits, as one that is not."""
    for ctrl_c in anywhere():
        _close_during(ctrl_c)


def test_ctrl_c_between_two_steps_leaves_none_to_the_garbage_collector() -> None:
    """What is closed by that takes its session's mutex in whichever thread it comes to, perhaps one that has it."""
    with dibs.connect(f"memory://session-{next(numbers)}") as client:
        session = client._desk.session()

        def steps() -> Steps[None]:
            for _ in range(2):
                ask = session.pause()
                ask.settle(None)
                yield session, ask, None

        for ctrl_c in anywhere():
            taken = steps()
            ctrl_c.during(partial(run, taken))
            assert inspect.getgeneratorstate(taken) in (inspect.GEN_CREATED, inspect.GEN_CLOSED), ctrl_c.arrived


def _jumps_out(code: CodeType) -> Iterator[int | None]:
    """The lines of the jumps back in ``with`` blocks of a function that a signal leaves without their ``__exit__``."""
    steps = list(dis.get_instructions(code))
    handled = getattr(dis.Bytecode(code), "exception_entries", ())  # before Python 3.11, blocks are kept on a stack

    def handler(offset: int) -> int | None:
        return next((entry.target for entry in handled if entry.start <= offset < entry.end), None)

    def exits(target: int | None) -> bool:
        """Whether what is done about an exception there is to leave such a block, sooner or later."""
        for step in steps:
            if target is not None and step.offset >= target:
                if step.opname in ("WITH_EXCEPT_START", "CHECK_EXC_MATCH"):
                    return step.opname == "WITH_EXCEPT_START"
                if step.opname == "RERAISE":
                    return exits(handler(step.offset))
        return False

    for step in steps:
        if step.opname == "JUMP_BACKWARD" and handler(step.offset) is None and exits(handler(step.argval)):
            yield next((line for first, end, line in code.co_lines() if line and first >= step.argval), None)


def _functions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _functions(constant)


def test_no_signal_leaves_a_mutex_behind() -> None:
    """Blocks under a mutex are compiled so that wherever a Ctrl-C comes, they are left as blocks are (gh-130279)."""
    found = {
        f"{path.name}:{line} {code.co_name}"
        for path in Path(dibs.__file__).parent.rglob("*.py")
        if "testing" not in path.parts
        for code in _functions(compile(path.read_text(), path.name, "exec"))
        if not {"mutex", "_mutex", "in_use"}.isdisjoint(code.co_names) and code.co_name not in OWN_THREADS
        for line in _jumps_out(code)
    }
    assert not found


def _close_during(ctrl_c: CtrlC) -> None:
    url = f"memory://session-{next(numbers)}"
    refused: list[BaseException] = []
    with dibs.connect(url) as other, other.lock("busy"):
        client = dibs.connect(url)
        leases = [client.lock(name).acquire() for name in ("a", "b")]

        def wait() -> None:
            with pytest.raises(StoreUnavailable) as told:
                client.lock("busy").acquire()
            refused.append(told.value)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        session = client._desk.session()
        eventually(lambda: session.waiting._asleep, "nobody waits")
        ctrl_c.during(client.close)
        if not session.closed:  # it came before anything was done
            client.close()
        assert not [lease for lease in leases if lease is None or lease.held], ctrl_c.arrived
        waiter.join(10)
        assert refused, ctrl_c.arrived
        eventually(lambda: len(other.leases()) == 1, f"something is held: {ctrl_c.arrived}")
        eventually(lambda: other.leases()[0].waiting == 0, f"somebody is in line: {ctrl_c.arrived}")
        client.close()


@pytest.mark.parametrize("first_is_late", [False, True])
def test_a_renewer_whose_begin_is_interrupted_takes_no_lease_with_it(between: Between, first_is_late: bool) -> None:
    """After a Ctrl-C before its bell was noted the thread notes that itself, or goes if another was begun meanwhile."""
    clock = HeldClock()
    gates = first_goes, others_go = threading.Event(), threading.Event()

    def renewers() -> list[threading.Thread]:
        return [thread for thread in clock.threads if thread.name == "dibs-renew"]

    def held_back() -> None:
        if threading.current_thread().name == "dibs-renew":
            assert gates[threading.current_thread() is not renewers()[0]].wait(10)

    def interrupted() -> None:
        if len(renewers()) == 1:
            clock.after_spawn = lambda: None
            raise KeyboardInterrupt

    clock.at_start, clock.after_spawn = held_back, interrupted
    with between.client(clock=clock, ttl=20) as client:
        with pytest.raises(KeyboardInterrupt):
            client.lock("first").acquire()
        session = client._desk.session()
        if not first_is_late:
            first_goes.set()
            eventually(lambda: session.renewer._bell is not None, "nobody notes a bell")
            others_go.set()
        lease = client.lock("second").acquire()
        assert lease is not None
        with session.mutex:  # as though its time had come
            session.renewer.forget(lease._hold)
            session.renewer._push(lease._hold, session.clock.now())
        if first_is_late:
            first_goes.set()
            renewers()[0].join(1)
            others_go.set()
        with session.mutex:
            session.renewer._wake()
        renewal = Renew("default:second", lease._hold.claim_id, 20)
        eventually(lambda: any(renewal in requests for requests in between.calls), "it is not renewed")
        eventually(lambda: sum(thread.is_alive() for thread in renewers()) == 1, "two renewers, or none")
        assert lease.held
        with within(5, "the release waits for a renewal that nobody makes"):
            assert lease.release()


class Laptop(RealClock):
    """A machine that can sleep: then its clock goes on, and time-outs do not."""

    slept_s = 0.0

    def now(self) -> float:
        return boot_now() + self.slept_s


# Longer than the renewer's thread was to sleep; and nearly as long, so that by the clock it would wake in time.
@pytest.mark.parametrize("slept_s", [150, 99.8])
def test_after_a_sleep_of_the_machine_new_leases_are_renewed_in_time(between: Between, slept_s: float) -> None:
    """The renewer's thread, which would wake for an older one only later, is woken for them."""
    laptop = Laptop()
    with between.client(clock=laptop) as client:
        old = client.lock("old", ttl=300).acquire()
        assert old is not None
        time.sleep(0.1)  # so that the thread has gone to sleep, for 100 seconds
        laptop.slept_s += slept_s
        new = client.lock("new", ttl=0.6).acquire()
        assert new is not None
        between.calls.clear()
        eventually(lambda: len(between.calls) >= 3, "it is not renewed")
        assert new.held
        assert old.held


@pytest.mark.parametrize("ttl", [30, 1])
def test_leases_that_are_over_at_once_wake_nobody(monkeypatch: pytest.MonkeyPatch, ttl: float) -> None:
    """The renewer's thread, which finds nothing as what woke it is over, is not woken by each that follows."""
    rings: list[object] = []
    ring = dibs.clock.RealBell.ring

    def counted(bell: dibs.clock.RealBell) -> None:
        rings.append(bell)
        ring(bell)

    monkeypatch.setattr(dibs.clock.RealBell, "ring", counted)
    with dibs.connect("memory://") as client, client.lock("kept", ttl=300):
        began = time.monotonic()
        for _ in range(40):
            with client.lock("x", ttl=ttl):
                pass
            time.sleep(0.005)  # so that the thread looks, and finds that it is over
        # At the first, and at one after each look that nothing but the time led to.
        assert len(rings) <= 2 + (time.monotonic() - began) / (ttl / 3)


# Longer than the waiting thread was to sleep; and nearly as long, so that by the clock it would wake in time.
@pytest.mark.parametrize("slept_s", [150, 99.6])
def test_after_a_sleep_of_the_machine_waiters_ask_in_time(
    between: Between, monkeypatch: pytest.MonkeyPatch, slept_s: float
) -> None:
    """The waiting thread, which would wake without a reason only later, is woken for them."""
    monkeypatch.setattr(dibs.waiting, "IDLE_S", 100.0)
    between.watch = lambda: None
    laptop = Laptop()
    with between.client(clock=laptop) as client, between.client() as other, ThreadPoolExecutor(1) as pool:
        for _ in range(2):  # of which the first begins the thread
            lease = other.lock("a").acquire()
            assert lease is not None
            waits = pool.submit(client.lock("a").acquire, timeout=30)
            eventually(lambda: client._desk.session().waiting._asleep, "nobody waits")
            lease.release()
            given = waits.result(10)
            assert given is not None
            given.release()
            time.sleep(0.1)  # so that the thread has gone to sleep
            laptop.slept_s += slept_s


# -- what the garbage collector closes, in the middle of anything -----------------------------------------------------


@pytest.mark.parametrize("where", ["in a call", "under the mutex"])
@pytest.mark.parametrize("what", ["jobs", "items", "a block"])
def test_what_is_closed_in_the_midst_of_the_sessions_work_does_not_wait_for_it(
    between: Between, where: str, what: str
) -> None:
    """A generator may be closed by the very thread that serves the lane, or has the mutex: it would wait for itself."""
    with between.client(ttl=60) as client, ThreadPoolExecutor(1) as pool:
        client.queue("work").put_many(range(2))

        def block() -> Iterator[object]:
            with client.lock("block") as lease:
                yield lease

        made: dict[str, Callable[[], Iterator[object]]] = {
            "jobs": lambda: client.queue("work").stream(2),
            "items": lambda: client.claims("items").stream(lambda: [1, 2]),
            "a block": block,
        }
        session = client._desk.session()

        def work() -> None:
            suspended: Any = made[what]()
            next(suspended)
            if where == "under the mutex":
                with session.mutex:
                    suspended.close()
            else:
                closing = iter([suspended.close])
                between.before = lambda _: next(closing, lambda: None)()
                client.ping()

        pool.submit(work).result(10)
        eventually(lambda: not session.renewer.tracked(), "it is not given back")
        eventually(lambda: not client.leases(), "it is not given back")
        assert client.queue("work").depth().claimed == 0


def test_an_acquire_that_is_collected_under_the_mutex_is_withdrawn(between: Between) -> None:
    """The loop of a waiting task may be gone, and its coroutine garbage."""
    holdup = Holdup(lambda requests: requests[0].name.endswith(":wanted"))

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            between.before = holdup
            waits = client.lock("wanted").acquire()
            task = asyncio.ensure_future(waits)
            while not holdup.reached.is_set():  # noqa: ASYNC110 - it is the lane's thread that sets it
                await asyncio.sleep(0.01)
            session = client._desk.session()
            with session.mutex:
                waits.close()
            holdup.go_on()
            while session.waiting._first or session.renewer.tracked():  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            while await client.holder("wanted"):
                pass
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(asyncio.wait_for(main(), 10))


def leave_a_task(worker: Callable[[asyncio.Event], Coroutine[Any, Any, object]]) -> None:
    """Begin it in a loop that is closed when it says that it is inside: nobody has its task any more."""

    async def main() -> None:
        inside = asyncio.Event()
        tasks.append(asyncio.ensure_future(worker(inside)))
        await inside.wait()
        await asyncio.sleep(0)  # what it has begun by then begins

    tasks: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("in_a_block", [False, True])
def test_what_a_task_held_whose_loop_is_gone_ends(between: Between, in_a_block: bool) -> None:
    """Nobody can go on with such a task: it is garbage, and its lease is not renewed for ever."""
    client = between.async_client(ttl=0.6)

    async def worker(inside: asyncio.Event) -> None:
        if in_a_block:
            async with client.lock("left"):
                inside.set()
                await for_ever()
        lease = await client.lock("left").acquire()
        assert lease is not None
        inside.set()
        await for_ever()

    def is_over() -> bool:
        gc.collect()  # again, if the lane's thread has not yet let go of its last call
        return not session.renewer.tracked()

    leave_a_task(worker)
    session = client._desk.session()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        eventually(is_over, "it is renewed for ever")
    with dibs.connect(between.address.shown) as other:
        eventually(lambda: other.holder("left") is None, "it is held for ever")
    asyncio.run(client.close())


def test_the_jobs_of_a_worker_whose_loop_is_gone_are_handed_out_again(between: Between) -> None:
    """Its handler never goes on: the claim of its job ends by the ttl. And signals do what they did before it began."""
    client = between.async_client()
    before = signal.getsignal(signal.SIGTERM)

    async def worker(inside: asyncio.Event) -> None:
        async def handler(job: dibs.AsyncJob) -> None:
            inside.set()
            await for_ever()

        queue = client.queue("left", ttl=0.6)
        await queue.put(1)
        await queue.run(handler, workers=1)

    with dibs.connect(between.address.shown) as other:
        leave_a_task(worker)

        def is_handed_out() -> int:
            gc.collect()
            with other.queue("left").take(timeout=0) as batch:
                return len(batch)

        eventually(is_handed_out, "it is renewed for ever")
    assert signal.getsignal(signal.SIGTERM) is before
    asyncio.run(client.close())


@pytest.mark.parametrize("what", ["a lock", "a once", "a run", "a wait for a loss", "a client"])
def test_what_a_task_left_is_collected_under_the_mutex(between: Between, what: str) -> None:
    """The loop is gone; the garbage collector comes to its task while its thread has the mutex, and does not wait."""
    client = between.async_client(ttl=60)

    async def worker(inside: asyncio.Event) -> None:
        once = client.once("left", keep=60)
        if what == "a wait for a loss":
            lease = await client.lock("left").acquire()
            assert lease is not None
            inside.set()
            await lease.lost.wait()
        blocks: dict[str, Any] = {"a lock": client.lock("left"), "a once": once, "a client": client}
        async with await once.begin() if what == "a run" else blocks[what]:
            inside.set()
            await for_ever()

    def is_over() -> bool:
        with session.mutex:
            gc.collect()  # again, if the lane's thread has not yet let go of its last call
        return all(hold.orphan for hold in session.renewer.tracked())

    leave_a_task(worker)
    session = client._desk.session()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(eventually, is_over, "it is renewed for ever").result(20)
        with dibs.connect(between.address.shown) as other:
            if what != "a wait for a loss":  # (That lease was in nobody's block: it ends by its ttl.)
                eventually(lambda: other.holder("left") is None, "it is held for ever")
    asyncio.run(client.close())


def beside_a_task_that_was_left(
    worker: Callable[[asyncio.Event], Coroutine[Any, Any, object]], main: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    """Leave a task, which is not collected before ``main`` says so."""
    gc.disable()
    try:
        leave_a_task(worker)
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["a lease", "several", "a run", "items", "items, verified", "jobs", "a client"])
def test_the_blocks_around_one_of_a_task_that_is_collected_end(between: Between, what: str) -> None:
    """Whatever it is in, it is not awaited any more: other tasks run meanwhile, and a block around it is to end."""
    client = between.async_client(ttl=60)
    around = client.lock("around")

    async def inner() -> Any:
        if what == "a lease":
            return await client.lock("left").acquire()
        if what == "several":
            return await client.multilock(["left", "right"]).acquire()
        if what == "a run":
            return await client.once("left", keep=60).begin()
        if what == "jobs":
            await client.queue("left").put(1)
            return await client.queue("left").take()
        other = between.async_client(ttl=60)
        await other.ping()
        return other

    async def worker(inside: asyncio.Event) -> None:
        async def verify(items: list[int]) -> list[int]:
            inside.set()
            await for_ever()
            return items

        async with around:
            if what.startswith("items"):
                block: Any = await client.claims("left").take([1], verify=verify if "verified" in what else None)
            else:
                block = await inner()
            async with block:
                inside.set()
                await for_ever()

    async def main() -> None:
        def is_over() -> bool:
            gc.collect()  # again, if the lane's thread has not yet let go of its last call
            return not session.renewer.tracked()

        session = client._desk.session()
        eventually(is_over, "it is renewed for ever")
        with between.client() as other:
            eventually(lambda: not other.leases() and not other.queue("left").depth().claimed, "it is not given back")
        await client.close()

    leave_a_task(worker)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(asyncio.wait_for(main(), 20))


def test_a_task_that_is_collected_takes_nothing_of_the_one_that_runs(between: Between) -> None:
    """Both are in blocks of one semaphore: the permit of the one that is garbage comes back, and no other."""
    client = between.async_client(ttl=60)
    semaphore = client.semaphore("x", 2)

    async def worker(inside: asyncio.Event) -> None:
        async with semaphore:
            inside.set()
            await for_ever()

    async def main() -> None:
        session = client._desk.session()
        async with semaphore as lease:
            assert len(session.renewer.tracked()) == 2
            eventually(lambda: gc.collect() >= 0 and len(session.renewer.tracked()) == 1, "it is renewed for ever")
            assert lease.held
        await client.close()

    beside_a_task_that_was_left(worker, main)


def test_work_of_a_task_that_is_collected_is_not_done(between: Between) -> None:
    """Another task is in a block of the same once when it is collected: what that one leaves is its own run."""
    client = between.async_client(ttl=60)
    once = client.once("left", keep=60, timeout=0, on_busy="skip")

    async def worker(inside: asyncio.Event) -> None:
        async with once as run:
            assert run
            inside.set()
            await for_ever()

    async def main() -> None:
        session = client._desk.session()
        async with once as run:
            assert not run
            eventually(lambda: gc.collect() >= 0 and not session.renewer.tracked(), "it is renewed for ever")
        assert await once.done() is None
        async with once as run:
            assert run
        assert await once.done()
        await client.close()

    beside_a_task_that_was_left(worker, main)


def test_the_work_of_another_client_is_not_waited_for_either(between: Between) -> None:
    """Two clients of one process may share more than each of them knows: a file, a server's connection."""
    with between.client() as client, between.client() as other:
        busy: list[bool] = []
        client.ping()
        session = client._desk.session()
        between.before = lambda _: busy.append(session.is_busy_here())
        with other.lock("x"):
            pass
        assert busy
        assert all(busy)
        eventually(lambda: not session.is_busy_here(), "it takes itself for busy")  # the mutex may be had just then


def test_a_forked_child_takes_none_of_its_threads_for_those_of_dibs(between: Between) -> None:
    """The system gives the numbers of its parent's threads to new ones."""
    program = """
import os, sys, dibs
from dibs import threads
with dibs.connect(sys.argv[1]) as client, client.lock("x", ttl=20):
    assert threads._OWN
    child = os.fork()
    if not child:
        os._exit(len(threads._OWN) + len(threads.SERVING))
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, between.address.shown], check=True, timeout=60)
