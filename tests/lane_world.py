"""A claim lane by itself: a store that notes what reaches it, and a clock whose threads can be held back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dibs.ask import Act, Ask
from dibs.clock import Deadline, RealBell, RealClock
from dibs.lane import Lane
from dibs.store import RELEASED, Acquire, Granted

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
    def __init__(self, *, served: bool = False) -> None:
        self.clock, self.mutex, self.shop = Clock(), Mutex(), Shop()
        self.lane = Lane(self.clock, self.mutex, lambda: self.shop, 5.0, "lane", served=served)  # type: ignore[arg-type, return-value]

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

    def idling(self) -> Bell:
        """The bell of the lane's thread, which has served something and sleeps."""
        asks = self.put(acquire("served before"))
        self.lane.start()
        assert self.answered(*asks)
        (bell,) = self.clock.bells
        assert bell.asleep.wait(WAIT_S)
        return bell

    def end(self) -> None:
        assert self.lane.close().wait(self.clock, WAIT_S)
        for thread in self.clock.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.clock.threads)
        assert not self.shop.crowded, "two threads served at once"
        assert self.shop.closed <= 1


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
