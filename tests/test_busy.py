"""A store that is too busy: tried again soon, by renewals as well, and no longer than anybody waits for its end."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dibs
from dibs.busy import BUSY_PAUSE_MIN_S, BUSY_TRIES, patiently
from dibs.store import Release, Renew, RowBusy, StoreBusy
from tests.between import Between
from tests.waits import eventually

numbers = itertools.count()
TRIES = 30


class Clock:
    """Its time passes in sleeps only."""

    def __init__(self) -> None:
        self.time, self.slept = 0.0, list[float]()

    def now(self) -> float:
        return self.time

    def jitter(self) -> float:
        return 0.5

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def busy_for(times: int, error: type[StoreBusy] = StoreBusy) -> Callable[[], str]:
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error("locked")
        return "done"

    return call


def test_a_call_is_repeated_until_the_store_takes_it() -> None:
    """Each half millisecond at first, then each whole one. That it was in vain is told once."""
    clock: Any = Clock()
    told: list[StoreBusy] = []
    assert patiently(busy_for(5 * BUSY_TRIES), clock, 1.0, lambda: False, told.append) == "done"
    assert clock.slept == [BUSY_PAUSE_MIN_S] * BUSY_TRIES + [2 * BUSY_PAUSE_MIN_S] * 4 * BUSY_TRIES
    assert len(told) == 1


def test_a_call_is_repeated_no_longer_than_it_may() -> None:
    """The store's last word is raised when the time is up, when somebody waits for it, and of a locked row at once."""
    clock: Any = Clock()
    told: list[StoreBusy] = []
    with pytest.raises(StoreBusy):
        patiently(busy_for(1000), clock, 0.1, lambda: False, told.append)
    assert 0.1 - 3 * BUSY_PAUSE_MIN_S < clock.now() < 0.1
    clock = Clock()
    with pytest.raises(StoreBusy):
        patiently(busy_for(1000), clock, 0.1, lambda: len(clock.slept) == 3, told.append)
    assert len(clock.slept) == 3
    clock = Clock()
    with pytest.raises(RowBusy):
        patiently(busy_for(1, RowBusy), clock, 0.1, lambda: False, told.append)
    assert not clock.slept


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://busy-{next(numbers)}")


@pytest.fixture
def client(between: Between) -> Iterator[dibs.Client]:
    with between.client() as client:
        yield client


def renewals(between: Between) -> int:
    return sum(isinstance(request, Renew) for call in between.calls for request in call)


def make_due(client: dibs.Client, lease: Any) -> None:
    """Have the lease renewed now."""
    session = client._desk.session()
    with session.mutex:
        session.renewer.forget(lease._hold)
        session.renewer._push(lease._hold, session.clock.now())
        session.renewer._wake()


def test_a_renewal_gets_through_where_many_write(between: Between, client: dibs.Client) -> None:
    """It is tried again at once, as acquires are, and not after a part of its interval, which leaves it a few tries."""
    lease = client.lock("kept", ttl=30).acquire()
    assert lease is not None
    before = lease.trusted_until
    left = iter(range(TRIES))

    def busy(requests: Any) -> None:
        if isinstance(requests[0], Renew) and next(left, None) is not None:
            raise StoreBusy("database is locked")

    between.before = busy
    make_due(client, lease)
    eventually(lambda: lease.trusted_until > before, "it was not renewed")
    assert renewals(between) == TRIES + 1
    assert lease.release()


def test_why_a_lease_is_about_to_be_lost_is_known_before(between: Between, client: dibs.Client) -> None:
    """Who sees the trust end by the clock, while the renewal is still being tried, is told what keeps it."""
    lease = client.lock("kept", ttl=30).acquire()
    assert lease is not None

    def busy(requests: Any) -> None:
        if isinstance(requests[0], Renew):
            raise StoreBusy("database is locked")

    between.before = busy
    make_due(client, lease)
    eventually(lambda: renewals(between) > 2, "it was not renewed")
    assert re.search(r"could not be renewed in time: the store stayed too busy \(data", lease._hold.why_over())
    between.before = lambda _: None
    eventually(lambda: lease._hold.last_error is None, "it was not renewed at last")
    assert lease.release()


@pytest.mark.parametrize("end", ["release", "close"])
def test_a_release_does_not_wait_for_a_busy_store_to_renew(between: Between, client: dibs.Client, end: str) -> None:
    """Nor does the end of a client; and no renewal follows it."""
    lease, other = client.lock("ended", ttl=30).acquire(), client.lock("kept", ttl=30).acquire()
    assert lease is not None
    assert other is not None
    tried = threading.Event()

    def busy(requests: Any) -> None:
        if isinstance(requests[0], Renew):
            tried.set()
            raise StoreBusy("database is locked")

    between.before = busy
    make_due(client, lease)
    assert tried.wait(10)
    ending = threading.Thread(target=lease.release if end == "release" else client.close)
    ending.start()
    ending.join(4)
    assert not ending.is_alive()
    sent = [request for call in between.calls for request in call if request.name == lease._hold.key]
    assert [type(request) for request in sent[-2:]] == [Renew, Release]
    assert other.held is (end == "release")
    client.close()
