"""Threads of one process that take turns at one name: who is next asks in the call that has the release."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest

import dibs
from dibs import waiting
from dibs.store import Acquire, Release
from tests.between import Between
from tests.waits import eventually

numbers = itertools.count()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    """A place between clients and a memory store. Nobody polls meanwhile."""
    monkeypatch.setattr(waiting, "POLL_MIN_S", 25.0)
    monkeypatch.setattr(waiting, "POLL_MAX_S", 26.0)
    return Between(f"memory://turns-{next(numbers)}")


def kinds(calls: Sequence[Sequence[Any]]) -> list[list[type]]:
    return [[type(request) for request in call] for call in calls]


def in_line(client: dibs.Client) -> bool:
    """Somebody of this client has a place in the store's line, and sleeps."""
    asleep = client._desk.session().waiting._asleep
    return any(ask.request.ticket is not None for ask in list(asleep.values()))


def waiting_for(lock: dibs.Lock, then: Any = lambda: None) -> threading.Thread:
    """A thread that waits for a lock, does something, and gives it back."""

    def wait() -> None:
        with lock:
            then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_who_waits_asks_along_with_the_release(between: Between) -> None:
    """Instead of when it is told that the name is free: the hand-over is one call."""
    with between.client() as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        waiter = waiting_for(client.lock("a"))
        # (The third call: what happened before there was a watch was not told, so it asked once more.)
        eventually(lambda: len(between.calls) == 3 and in_line(client), "it waits")
        before = len(between.calls)
        lease.release()
        waiter.join(10)
        assert kinds(between.calls[before : before + 1]) == [[Release, Acquire]]


def test_who_is_just_asking_asks_once_more_along_with_the_release(between: Between) -> None:
    """The release came while its first request was under way: it was refused for what is over by now."""
    released = threading.Event()

    def hold_up(requests: Sequence[Any]) -> None:
        if len(between.calls) == 2:
            threading.Thread(target=release).start()
            eventually(lambda: client._desk.session().lane.pending.asks, "the release is queued")

    def release() -> None:
        assert lease is not None
        lease.release()
        released.set()

    with between.client() as client:
        lease = client.lock("a").acquire()
        between.before = hold_up
        waiting_for(client.lock("a")).join(10)
        assert released.wait(10)
        assert kinds(between.calls[:3]) == [[Acquire], [Acquire], [Release, Acquire]]
        assert between.calls[2][1].ticket is not None


def test_who_is_next_does_not_ask_for_what_is_given_back_at_once(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows who holds the name. (A place in the store's line is worth asking for when that lasts.)"""
    monkeypatch.setattr(waiting, "ASK_AGAIN_MIN_S", 60.0)
    with between.client() as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        threads = [waiting_for(client.lock("a")) for _ in range(8)]
        key = client._desk.key_prefix + "a"
        waits = client._desk.session().waiting
        eventually(lambda: len(between.calls) == 3 and in_line(client) and waits.behind(key) == 7, "all wait")
        before = len(between.calls)
        lease.release()
        for thread in threads:
            thread.join(10)
    assert kinds(between.calls[before:]) == [[Release, Acquire]] * 8 + [[Release]]


def test_who_is_next_asks_soon(between: Between) -> None:
    """Its place in line is before those of other processes who come later, where the name is held for long."""
    go_on = threading.Event()
    order: list[str] = []
    with between.client() as client, between.client() as other:
        lease = client.lock("a").acquire()
        assert lease is not None
        first = waiting_for(client.lock("a"), lambda: go_on.wait(10))
        eventually(lambda: in_line(client), "the first waits")
        second = waiting_for(client.lock("a"), lambda: order.append("second"))
        lease.release()
        eventually(lambda: in_line(client), "the second waits, while the first is at work")
        third = waiting_for(other.lock("a"), lambda: order.append("third"))
        eventually(lambda: in_line(other), "the third waits")
        go_on.set()
        for thread in (first, second, third):
            thread.join(10)
    assert order == ["second", "third"]


def test_whose_time_is_over_is_told_who_has_it_though_nobody_asked(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first in line has not asked, as the holder is of this process: that is the answer of whoever is behind it."""
    monkeypatch.setattr(waiting, "ASK_AGAIN_MIN_S", 60.0)
    go_on = threading.Event()
    with between.client() as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        holder = waiting_for(client.lock("a"), lambda: go_on.wait(30))
        eventually(lambda: in_line(client), "it waits")
        waits = client._desk.session().waiting
        first = waiting_for(client.lock("a"))
        eventually(lambda: waits.behind(client._desk.key_prefix + "a") == 1, "so does the next")
        lease.release()
        eventually(lambda: not waits._behind and waits._asleep, "the next is the first, and has not asked")
        before = len(between.calls)
        with pytest.raises(dibs.LockTimeout, match=str(os.getpid())), client.lock("a", timeout=0.01):
            pass
        assert not first_asked(between.calls[before:])
        go_on.set()
        holder.join(10)
        first.join(10)


def first_asked(calls: Sequence[Sequence[Any]]) -> bool:
    return any(type(request) is Acquire for call in calls for request in call)


def test_whose_time_is_over_is_told_by_the_grant_of_who_stood_before_it(between: Between) -> None:
    """It waits for the first answer to its line, and that is that the name is had by another of this process."""
    got: list[object] = []

    def late() -> None:
        got.append(client.lock("a").acquire(timeout=0.01))

    def hold_up(requests: Sequence[Any]) -> None:
        if len(between.calls) == 1:
            threads.append(threading.Thread(target=late))
            threads[0].start()
            eventually(lambda: client._desk.session().waiting._overdue.asks, "its time is over")
            threads.append(waiting_for(client.lock("a")))

    threads: list[threading.Thread] = []
    between.before = hold_up
    with between.client() as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        threads[0].join(10)
        assert got == [None]
        lease.release()
        threads[1].join(10)
        assert not threads[1].is_alive()


def test_nobody_sleeps_whom_nothing_wakes(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C comes in before the thread that wakes it was begun: what was interrupted is done again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "begin", interrupted)
    with between.client() as client:
        session = client._desk.session()
        core: Any = client.lock("a")._core
        ask = core._wish(session, "somebody", True)
        with session.mutex, pytest.raises(KeyboardInterrupt):
            session.waiting._sleep(ask, session.clock.now())
        assert not session.waiting._asleep
