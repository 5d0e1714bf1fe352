"""A place to stand between clients and a real store: to count calls, hold them up, lose them, or lose their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import dibs
from dibs.aio import AsyncClient
from dibs.client import Client
from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.desk import DEFAULTS, Desk
from dibs.store import Store, StoreAddress, Watch


class Between:
    """Counts what clients send to the store at a URL, and calls ``before`` and ``after`` around each call.

    They get the requests and run in the thread of the lane that sends them; what they raise, the lane sees.
    """

    def __init__(self, url: str) -> None:
        self.address, _ = locate(url)
        #: Of requests on leases, and on jobs.
        self.calls: list[list[Any]] = []
        self.before: Callable[[Sequence[Any]], object] = lambda requests: None
        self.after: Callable[[Sequence[Any]], object] = lambda requests: None
        #: Makes the source of hints; None for the store's own.
        self.watch: Callable[[], Watch | None] | None = None

    def open(self) -> Store:
        return _Between(self, self.address.open())

    def _desk(self, options: dict[str, Any]) -> Desk:
        address: StoreAddress = self.address._replace(open=self.open)
        return Desk(address, **{"info": None, **DEFAULTS, **options})

    def client(self, **options: Any) -> dibs.Client:
        """A client whose calls are seen."""
        return Client(self._desk(options))

    def async_client(self, **options: Any) -> dibs.AsyncClient:
        """The same, for asyncio."""
        return AsyncClient(self._desk(options))


class _Acts:
    """The acts on leases, or those on jobs."""

    def __init__(self, owner: Between, real: Any) -> None:
        self._owner = owner
        self._real = real

    def act(self, requests: Sequence[Any], deadline: Deadline) -> list[Any]:
        self._owner.calls.append(list(requests))
        self._owner.before(requests)
        outcomes: list[Any] = self._real.act(requests, deadline)
        self._owner.after(requests)
        return outcomes

    def within(self, request: Any, *given: Any) -> Any:
        self._owner.before([request])
        return self._real.within(request, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Between(_Acts):
    def __init__(self, owner: Between, store: Store) -> None:
        super().__init__(owner, store)
        self._store = store
        if owner.address.capabilities.queue:
            self.jobs = _Acts(owner, store.jobs)  # type: ignore[attr-defined]

    def watch(self, address: str, deadline: Deadline) -> Watch | None:
        return self._store.watch(address, deadline) if self._owner.watch is None else self._owner.watch()


class Holdup:
    """Stops the first call that ``wanted`` accepts until ``go_on``; put in the place of ``before`` or ``after``."""

    def __init__(self, wanted: Callable[[Sequence[Any]], bool]) -> None:
        self._wanted = wanted
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, requests: Sequence[Any]) -> None:
        if not self.reached.is_set() and self._wanted(requests):
            self.reached.set()
            assert self._open.wait(30), "the test forgot to let the store go on"

    def go_on(self) -> None:
        self._open.set()
