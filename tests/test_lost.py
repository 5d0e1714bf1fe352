"""What becomes in the store of a lease that was lost: nothing until its holder lets go of it. Then it is free."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

import dibs
from dibs.errors import LeaseLost, StoreUnavailable
from dibs.owners import this_thread
from dibs.standby import Seats
from dibs.steps import run
from dibs.store import Renew
from tests.between import Between
from tests.waits import eventually

numbers = itertools.count()
# It is renewed in the store until its holder's trust ends, so the store keeps it for nearly a ttl beyond that.
TTL_S = 3.0
AT_ONCE_S = 1.5


@pytest.fixture
def between() -> Between:
    """A memory store of this test whose renewals are carried out, and never answered."""

    def answer(requests: Sequence[Any]) -> None:
        if any(isinstance(request, Renew) for request in requests):
            raise StoreUnavailable("the answer was lost", maybe_applied=True)

    between = Between(f"memory://lost-{next(numbers)}")
    between.after = answer
    return between


def lose(lease: dibs.Lease) -> None:
    assert lease.lost.wait(10)


def entered(lock: dibs.Lock | dibs.MultiLock) -> None:
    lease = lock.acquire(timeout=AT_ONCE_S)
    assert lease is not None
    assert lease.release()


def by_release(lock: dibs.Lock) -> None:
    lease = lock.acquire()
    assert lease is not None
    lose(lease)
    with pytest.raises(LeaseLost):
        lease.release()
    with pytest.raises(LeaseLost):
        lease.release()


def by_the_locks_release(lock: dibs.Lock) -> None:
    lease = lock.acquire()
    assert lease is not None
    lose(lease)
    with pytest.raises(LeaseLost):
        lock.release()


def by_the_end_of_the_block(lock: dibs.Lock) -> None:
    with pytest.raises(LeaseLost), lock as lease:
        lose(lease)


def by_an_error_in_the_block(lock: dibs.Lock) -> None:
    with suppress(ZeroDivisionError), lock as lease:
        lose(lease)
        raise ZeroDivisionError


def by_asking_again(lock: dibs.Lock) -> None:
    lease = lock.acquire()
    assert lease is not None
    lose(lease)
    entered(lock)
    with pytest.raises(LeaseLost):
        lease.check()


@pytest.mark.parametrize(
    "let_go", [by_release, by_the_locks_release, by_the_end_of_the_block, by_an_error_in_the_block, by_asking_again]
)
def test_it_is_free_when_its_holder_has_let_go(between: Between, let_go: Callable[[dibs.Lock], None]) -> None:
    """However that is said; the last renewals, whose answers were lost, would have kept others out for a ttl."""
    with between.client() as ours, between.client() as theirs:
        let_go(ours.lock("a", ttl=TTL_S))
        entered(theirs.lock("a"))


def test_it_keeps_others_out_while_its_holder_may_be_at_work(between: Between) -> None:
    """Who is told of the loss has the rest of the ttl to stop, and nobody is let in by what told it."""
    told = []
    with between.client() as ours, between.client() as theirs:
        lease = ours.lock("a", ttl=TTL_S, on_lost=lambda: told.append(theirs.lock("a").acquire(timeout=0))).acquire()
        assert lease is not None
        lose(lease)
        assert not lease.held
        assert theirs.lock("a").acquire(timeout=0.2) is None
        with pytest.raises(LeaseLost):
            lease.release()
        assert told == [None]


@pytest.mark.parametrize("lost", ["in hand", "before that"])
def test_what_its_caller_has_not_got_is_free_at_once(between: Between, lost: str) -> None:
    """Nobody can be at work under the lease of an acquire that was cut short, whether it was lost first or not."""
    with between.client() as ours, between.client() as theirs:
        lease = ours.lock("a", ttl=60).acquire()
        assert lease is not None
        keeper, hold = lease._session.keeper, lease._hold
        hold.given = lost == "in hand"
        keeper.lose(hold, "the store was away")
        hold.given = False
        keeper.give_back(hold)
        entered(theirs.lock("a"))


def test_a_store_that_does_not_answer_is_the_reason() -> None:
    """Also for who looks before the renewal under way is given up."""
    between = Between(f"memory://lost-{next(numbers)}")
    answers = threading.Event()
    between.before = lambda requests: isinstance(requests[0], Renew) and answers.wait(10)
    with between.client() as client:
        lease = client.lock("a", ttl=1).acquire()
        assert lease is not None
        try:
            eventually(lambda: not lease.held)
            with pytest.raises(LeaseLost, match="in time: the store has not answered"):
                lease.check()
        finally:
            answers.set()


def test_an_item_is_free_when_its_worker_is_done_with_it(between: Between) -> None:
    """Of those that were lost: the others are at the end of their batch."""
    with between.client() as ours, between.client() as theirs:
        with ours.claims("s", ttl=TTL_S, renew=True).take(["a", "b"]) as batch:
            first, second = batch.items
            eventually(lambda: not first.held and not second.held)
            with pytest.raises(LeaseLost):
                first.done()
            entered(theirs.lock("s/a"))
            assert theirs.lock("s/b").acquire(timeout=0) is None
        assert batch.lost == ["a", "b"]
        entered(theirs.lock("s/b"))


def test_a_once_is_free_when_its_work_ends_too_late(between: Between) -> None:
    """Whoever comes next may do it."""
    with between.client() as ours, between.client() as theirs:
        with suppress(LeaseLost), ours.once("o", keep=60, ttl=TTL_S) as work:
            assert work.lease is not None
            lose(work.lease)
        assert work.done is None
        with theirs.once("o", keep=60).begin(timeout=AT_ONCE_S) as work:
            assert work


def test_a_term_is_free_when_its_leader_resigns_too_late(between: Between) -> None:
    """Also when it was to be offered to somebody."""
    with between.client() as ours, between.client() as theirs:
        term = ours.election("e", ttl=TTL_S).campaign()
        assert term is not None
        lose(term)
        with pytest.raises(LeaseLost):
            term.resign(to="b")
        entered(theirs.lock("e"))


def test_several_names_are_free_when_they_are_let_go(between: Between) -> None:
    """Those of one lock."""
    with between.client() as ours, between.client() as theirs:
        with pytest.raises(LeaseLost), ours.multilock(["a", "b"], ttl=TTL_S) as leases:
            assert leases.lost.wait(10)
        entered(theirs.multilock(["a", "b"], ttl=TTL_S))


def test_a_standby_that_has_lost_its_seat_sits_down_again(between: Between) -> None:
    """The seat is not taken by another when it is only its own lease that stands in the store."""
    with between.client() as client:
        desk = client._desk
        seat = run(Seats(desk, "e", 1, False).take(this_thread(), None))
        assert seat is not None
        desk.session().keeper.lose(seat._lease._hold, "the store was away")
        assert run(seat.kept())
        seat.leave()
