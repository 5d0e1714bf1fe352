"""What ``dibs bench`` does to a store, a work at a time, and for how long: the times come back, and nothing stays held.

A work does the same again and again for the time it is given, on names that nobody else uses, through the same calls
as a program. What is done once before the clock runs is not counted: connections and tables are made then. A work on
what the store does not have raises Unsupported.
"""

from __future__ import annotations

import os
from array import array
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.cli import BUSY, CommandError
from dibs.cli.bench_figures import Samples
from dibs.client import Client
from dibs.desk import Desk
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.claims import Batch
    from dibs.clock import Clock
    from dibs.lockable import Lock
    from dibs.queue import JobBatch, Queue

PREFIX = "dibs-bench/"
THREADS = 8
PERMITS = 8
BATCH = 100
# Each leaves a row, and these suffice to tell what a new name costs.
NEW_NAMES_MAX = 1000
# Nobody else wants these names: whoever waits this long for one will not get it.
WAIT_S = 10.0
# A waiter has been waiting for this and a few locks' time, twice that at most, when it is handed the name over.
HOLD_S = 0.01
HOLD_LOCKS = 4
# When the store goes away, the end of a job is tried again for as long as its claim lasts.
CLAIM_S = 5.0


class Place:
    """Where it is measured: a client, names of our own, and seconds for each work."""

    def __init__(self, client: Client, seconds: float) -> None:
        self.client = client
        self.seconds = seconds
        self.clock: Clock = client._desk.session().clock
        self._prefix = f"{PREFIX}{os.urandom(4).hex()}/"
        #: Threads that measure shall come to an end.
        self.stopped = False
        #: What could not be put away, as the store was gone.
        self.left: list[str] = []
        #: The last batch, also after a Ctrl-C in front of the first line of its end: it is given back with the client.
        self.last: Batch[int] | JobBatch | None = None

    def name(self, what: str) -> str:
        return self._prefix + what


class Work(NamedTuple):
    """What is done, in words, and the function that does it."""

    what: str
    run: Callable[[Place], Samples]


class _Spell(NamedTuple):
    """What one thread did from one moment to another."""

    times: array[float]
    began: float
    ended: float

    @property
    def samples(self) -> Samples:
        return Samples(self.times, self.ended - self.began)


def _again_and_again(place: Place, act: Callable[[], object], most: float = float("inf")) -> _Spell:
    """Do it for the time that a work has, or until it was done so often."""
    act()
    now, times = place.clock.now, array("d")
    first = before = now()
    until = first + place.seconds
    while before < until and len(times) < most and not place.stopped:
        act()
        after = now()
        times.append(after - before)
        before = after
    return _Spell(times, first, before)


class _Aside:
    """A function that is called in a thread of its own."""

    def __init__(self, clock: Clock, call: Callable[[], Any]) -> None:
        self._call = call
        self._gate = clock.gate()
        self._over = False
        self._result: Any = None
        self._error: BaseException | None = None
        clock.spawn("dibs-bench", self._run)

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
        self._over = True
        self._gate.open()

    def wait(self) -> None:
        """Until it has returned."""
        if not self._over:
            self._gate.wait(None)

    def result(self) -> Any:
        """What it returned; raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result


# -- the works ---------------------------------------------------------------------------------------------------------


def _ping(place: Place) -> Samples:
    return _again_and_again(place, place.client.ping).samples


def _lock(place: Place) -> Samples:
    return _again_and_again(place, partial(_enter, place.client.lock(place.name("lock"), timeout=WAIT_S))).samples


def _enter(lock: Any) -> None:
    with lock:
        pass


def _new(place: Place) -> Samples:
    numbers = iter(range(NEW_NAMES_MAX + 1))

    def enter_another() -> None:
        with place.client.lock(place.name(f"new/{next(numbers)}"), timeout=WAIT_S):
            pass

    return _again_and_again(place, enter_another, NEW_NAMES_MAX).samples


def _threads(place: Place) -> Samples:
    locks = [place.client.lock(place.name(f"thread/{n}"), timeout=WAIT_S) for n in range(THREADS)]
    threads: list[_Aside] = []
    try:
        for lock in locks:  # (one by one, so that those that were begun are known)
            threads.append(_Aside(place.clock, partial(_again_and_again, place, partial(_enter, lock))))  # noqa: PERF401
        spells: list[_Spell] = [thread.result() for thread in threads]
    except BaseException:
        place.stopped = True
        for thread in threads:
            thread.wait()
        raise
    times = array("d")
    for spell in spells:
        times.extend(spell.times)
    return Samples(times, max(spell.ended for spell in spells) - min(spell.began for spell in spells))


def _batch(place: Place) -> Samples:
    claims, items = place.client.claims(place.name("batch")), range(BATCH)

    def take() -> None:
        with claims.take(items) as place.last:
            busy = len(place.last.busy)
            if busy:
                raise CommandError(BUSY, f"{busy} of {BATCH} names were not to be had: were they paused?")

    return _again_and_again(place, take).samples


def _hand_over(place: Place) -> Samples:
    name, times = place.name("handover"), array("d")
    now = place.clock.now
    ours = place.client.lock(name, timeout=WAIT_S)
    with _another(place.client) as other:
        theirs = other.lock(name, timeout=WAIT_S)
        _hand_over_once(place, ours, theirs, HOLD_S)  # it made the tables, a connection, and a listener
        began = now()
        _enter(ours)
        hold_s = HOLD_S + HOLD_LOCKS * (now() - began)
        until = now() + place.seconds
        while not times or now() < until:
            times.append(_hand_over_once(place, ours, theirs, hold_s * (1 + place.clock.jitter())))
    return Samples(times, sum(times))


def _hand_over_once(place: Place, ours: Lock, theirs: Lock, hold_s: float) -> float:
    """Seconds from the release to the grant of another client, which has been waiting."""
    session = place.client._desk.session()
    with ours:
        waiter = _Aside(place.clock, partial(_granted_at, place.clock, theirs))
        session.wait(session.pause(), hold_s)
        released_at = place.clock.now()
    granted_at: float = waiter.result()
    return granted_at - released_at


def _granted_at(clock: Clock, lock: Lock) -> float:
    with lock:
        return clock.now()


def _another(client: Client) -> Client:
    """Another client of the same store, with connections of its own."""
    desk = client._desk
    return Client(
        Desk(
            desk.address,
            namespace=desk.namespace,
            ttl=desk.ttl,
            info=None,
            request_timeout=desk.request_timeout_s,
            patience=desk.patience_s,
        )
    )


def _semaphore(place: Place) -> Samples:
    semaphore = place.client.semaphore(place.name("semaphore"), PERMITS, timeout=WAIT_S)
    return _again_and_again(place, partial(_enter, semaphore)).samples


def _queue(place: Place) -> Samples:
    queue = place.client.queue(place.name("queue"), ttl=CLAIM_S)

    def put_and_work() -> None:
        queue.put(None)
        with queue.take(timeout=WAIT_S) as place.last:
            if not place.last:
                raise CommandError(BUSY, "a job that was put was not to be had: was its queue paused?")
            place.last.done()

    try:
        return _again_and_again(place, put_and_work).samples
    finally:
        _clear(place, queue)


def _clear(place: Place, queue: Queue) -> None:
    """Delete what was put and not done, as by Ctrl-C."""
    try:
        # In this order: what was being claimed may be given back between the two.
        jobs = {job.id for state in ("claimed", "ready") for job in queue.jobs(state)}
        if jobs:
            queue.cancel(*jobs)
            queue.purge(*jobs)
    except StoreUnavailable:
        place.left.append(f"a job may be left in the queue {queue.name!r}, as the store went away (see dibs cancel)")


WORKS = {
    "ping": Work("the smallest question, and its answer", _ping),
    "lock": Work("acquire and release, one name", _lock),
    "new": Work("the same, names not seen before", _new),
    "threads": Work(f"the same, {THREADS} threads with a name each", _threads),
    "batch": Work(f"claim {BATCH} names, and give them back", _batch),
    "handover": Work("from a release to the next waiter's grant", _hand_over),
    "semaphore": Work(f"acquire and release, one of {PERMITS} permits", _semaphore),
    "queue": Work("put, take and end a job", _queue),
}
