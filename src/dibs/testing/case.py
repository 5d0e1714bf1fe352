"""What a conformance case is: a function whose docstring is the sentence it proves, and the promise it belongs to.

The cases of all modules called ``…_cases`` end up in the tables here; ``conformance`` runs them.
Nothing here or there needs a test framework.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from dibs.clock import Deadline, RealClock
from dibs.errors import StoreUnavailable
from dibs.store import GONE, Acquire, Granted, Held, Release, Renew, StoreBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dibs.store import Capabilities, Outcome, Request, Store, StoreAddress, StoredLease, Watch

T = TypeVar("T")

# What takes longer than this is not coming any more.
PATIENCE_S = 10.0
CLOCK = RealClock()


class Case(NamedTuple):
    name: str
    #: The promise it belongs to, as docs/explanation/safety numbers them.
    promise: str
    run: Callable[[Any], Any]
    #: Whether a store with these capabilities has promised it.
    promised: Callable[[Capabilities], bool]
    #: Its claims are made by ``Face.claims``: it holds wherever they are kept.
    anywhere: bool = False

    @property
    def sentence(self) -> str:
        """What the case proves."""
        return " ".join((self.run.__doc__ or "").split())


def always(_: Capabilities) -> bool:
    return True


def fifo(capabilities: Capabilities) -> bool:
    return capabilities.waiting_line == "FIFO"


def pools(capabilities: Capabilities) -> bool:
    return capabilities.permits


def queues(capabilities: Capabilities) -> bool:
    return capabilities.queue


class Table:
    """Cases by name, in the order in which they were written."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def case(
        self, promise: str, promised: Callable[[Capabilities], bool] = always, *, anywhere: bool = False
    ) -> Callable[[Callable[[T], Any]], Callable[[T], Any]]:
        def add(function: Callable[[T], Any]) -> Callable[[T], Any]:
            name = function.__name__
            assert name not in self.cases, f"two cases are called {name}"
            self.cases[name] = Case(name, promise, function, promised, anywhere)
            return function

        return add


#: Cases on the contract of stores: functions of a ``Bench``.
STORE_CASES = Table()
#: Cases on what users see: async functions of a ``Face``, run for threads and for tasks.
CLIENT_CASES = Table()


# -- saying what was seen ---------------------------------------------------------------------------------------------


def equal(seen: object, expected: object, what: str) -> None:
    """Fail unless ``seen`` is what was expected. Outcomes are tuples: their types count, or Released would be Gone."""
    if not _same(seen, expected):
        raise AssertionError(f"{what}: expected {expected!r}, saw {seen!r}")


def _same(seen: object, expected: object) -> bool:
    if isinstance(seen, list) and isinstance(expected, list):
        return len(seen) == len(expected) and all(map(_same, seen, expected))
    return seen == expected and (type(seen) is type(expected) or not isinstance(seen, tuple))


def granted(outcome: Outcome, what: str) -> int:
    """Fail unless it was granted; the fencing token."""
    if not isinstance(outcome, Granted):
        raise AssertionError(f"{what}: expected it to be granted, saw {outcome!r}")
    return outcome.fencing_token


def held(outcome: Outcome, what: str) -> Held:
    """Fail unless it was refused; the refusal."""
    if not isinstance(outcome, Held):
        raise AssertionError(f"{what}: expected Held, saw {outcome!r}")
    return outcome


def rising(tokens: Sequence[int], what: str) -> None:
    """Fail unless every token is greater than the one before."""
    for earlier, later in pairwise(tokens):
        if not later > earlier:
            raise AssertionError(f"{what}: token {later} was granted after token {earlier} (all: {list(tokens)})")


def until(attempt: Callable[[], T | None], what: str, limit_s: float = PATIENCE_S) -> T:
    """Try until the answer is true; fail when it never is."""
    end = time.monotonic() + limit_s
    while True:
        answer = attempt()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s:g} s (the last answer was {answer!r})")
        time.sleep(0.005)


class Lateness:
    """``with Lateness() as late:`` measures for how long this machine kept waiting what was to run.

    For promises of how soon something happens: on a machine that is busy with other things everything is as late.
    Counted are threads of this process that wake up late, and where Linux tells (/proc/pressure), for how long anything
    at all waited for a processor or a disk; ``seconds`` is complete at the end of the block.
    """

    #: A thread that only sleeps wakes up to this much late on an idle machine, too.
    USUAL_S = 0.005

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pressed_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="lateness", daemon=True)

    def _measure(self) -> None:
        while not self._end.is_set():
            before = time.monotonic()
            self._end.wait(0.01)
            over = time.monotonic() - before - 0.01
            if over > self.USUAL_S:
                self.seconds += over

    def __enter__(self) -> Lateness:
        self._pressed_s = _pressed_s()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.seconds += _pressed_s() - self._pressed_s


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Fail when the block takes longer than ``limit_s`` seconds and what the machine kept it waiting (``Lateness``)."""
    with Lateness() as late:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
    assert took < limit_s + late.seconds, f"{what}: {took:.2f} s, and {limit_s:g} s is soon enough"


def _pressed_s() -> float:
    """Seconds, since the machine was started, in which something waited for a processor, and for a disk."""
    waited_us = 0
    for what in ("cpu", "io"):
        try:
            with open(f"/proc/pressure/{what}", encoding="ascii") as pressure:
                waited_us += int(pressure.readline().rpartition("total=")[2])
        except (OSError, ValueError):  # another system, or not to be seen here
            pass
    return waited_us / 1e6


# -- a store on the bench ---------------------------------------------------------------------------------------------


class Connection:
    """One opened store, as a session uses it: a busy store is asked again."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def _patiently(self, act: Callable[[Deadline], T], again: tuple[type[Exception], ...] = (StoreBusy,)) -> T:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return act(Deadline(CLOCK, CLOCK.now() + PATIENCE_S))
            except again:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)

    def act(self, *requests: Request) -> list[Outcome]:
        # On a busy machine a short session loses its connection. As clients do: once more, where that changes nothing.
        same = all(isinstance(request, (Acquire, Renew)) for request in requests)
        again = (StoreBusy, StoreUnavailable) if same else (StoreBusy,)
        outcomes = self._patiently(lambda deadline: self.store.act(requests, deadline), again)
        equal(len(outcomes), len(requests), "outcomes of one call")
        return outcomes

    def acquire(
        self, name: str, claim_id: str, ttl: float = 60, *, line: bool = False, ticket: int | None = None
    ) -> Outcome:
        return self.act(asking(name, claim_id, ttl, line=line, ticket=ticket))[0]

    def renew(self, name: str, claim_id: str, ttl: float = 60) -> Outcome:
        return self.act(Renew(name, claim_id, ttl))[0]

    def release(self, name: str, claim_id: str, ticket: int | None = None) -> Outcome:
        return self.act(Release(name, claim_id, 1, ticket))[0]

    def leases(self, prefix: str) -> list[StoredLease]:
        return self._patiently(lambda deadline: self.store.leases(prefix, prefix + "\U0010ffff" * 64, deadline))

    def lease(self, name: str) -> StoredLease | None:
        return next((lease for lease in self.leases(name) if lease.name == name), None)

    def shown(self, name: str) -> StoredLease:
        """The lease in force on the name; fail when there is none."""
        lease = self.lease(name)
        if lease is None:
            raise AssertionError(f"no lease in force is shown for {name!r}")
        return lease

    def break_lease(self, name: str, fencing_token: int, *, now: bool) -> bool:
        return self._patiently(lambda deadline: self.store.break_lease(name, fencing_token, now, deadline))

    def purge(self, prefix: str, older_than: float) -> int:
        before = prefix + "\U0010ffff" * 64
        return self._patiently(lambda deadline: self.store.purge(prefix, before, older_than, deadline))

    def setup(self) -> None:
        self._patiently(self.store.setup)

    def watch(self, address: str) -> Watch | None:
        return self._patiently(lambda deadline: self.store.watch(address, deadline))

    def until_granted(
        self, name: str, claim_id: str, what: str, *, line: bool = False, ticket: int | None = None
    ) -> int:
        """Ask until the name is had; the fencing token."""

        def attempt() -> Granted | None:
            outcome = self.acquire(name, claim_id, line=line, ticket=ticket)
            return outcome if isinstance(outcome, Granted) else None

        return granted(until(attempt, what), what)

    def until_expired(self, name: str, what: str) -> None:
        until(lambda: self.lease(name) is None, what)


class Bench:
    """A store under test: connections to it, names nobody else uses, and the end of it all."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self.capabilities = address.capabilities
        #: Seconds a lease lasts that a case wants to see end.
        self.short_ttl = max(0.5, self.capabilities.ttl_min_s)
        self.namespace = "conformance-" + os.urandom(5).hex()
        self._opened: list[Connection] = []
        self._names = 0

    def open(self) -> Connection:
        connection = Connection(self.address.open())
        self._opened.append(connection)
        return connection

    def name(self, text: str = "") -> str:
        """A key as a session would make it: ``namespace:name``."""
        self._names += 1
        return f"{self.namespace}:{self._names}/{text}"

    def names(self, count: int) -> list[str]:
        return [self.name() for _ in range(count)]

    def close(self) -> None:
        while self._opened:
            self._opened.pop().store.close()


def asking(
    name: str, claim_id: str, ttl: float = 60, *, line: bool = False, ticket: int | None = None, info: str | None = None
) -> Acquire:
    """An acquire as a session sends it: the address of its waiters is the client's id, the first part of the claim."""
    client = claim_id.partition("-")[0]
    return Acquire(name, claim_id, ttl, f"host/{client}", info, client if line else None, ticket)


@contextmanager
def told_soon(bench: Bench, waiter: Acquire, what: str) -> Iterator[None]:
    """Where a store has hints, what the block does sends one to who waits there, and soon."""
    waiting = bench.open()
    held(waiting.act(waiter)[0], "a waiter")
    watch = bench.open().watch(waiter.claim_id.partition("-")[0])
    if watch is None:
        yield
        return
    try:
        assert watch.fileno() is not None or watch.interval_s is not None, "a watch with neither fileno nor interval_s"
        held(waiting.act(waiter)[0], "the waiter once more, since what was before the watch is not told")
        time.sleep(0.05)
        list(watch.changed([waiter.name]))  # whatever happened until now
        yield
        until(lambda: waiter.name in watch.changed([waiter.name]), f"the hint of {what}", 2)
    finally:
        watch.close()


def claims(count: int) -> list[str]:
    """Claim ids of as many different clients."""
    return [f"{os.urandom(6).hex()}-1" for _ in range(count)]


def gone(outcome: Outcome, what: str) -> None:
    equal(outcome, GONE, what)


def together(works: Iterable[Callable[[], T]]) -> list[T]:
    """Run each in a thread of its own, all starting at the same moment; their results, or the first failure."""
    works = list(works)
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(index: int, work: Callable[[], T]) -> None:
        try:
            barrier.wait(PATIENCE_S)
            results[index] = work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i, work), daemon=True) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
        if thread.is_alive():
            raise AssertionError(f"{len(works)} threads at once: one did not end")
    if failures:
        raise failures[0]
    return results
