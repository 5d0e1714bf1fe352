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
from dibs.store import Outcome, Request, Store, StoreAddress, Watch


class Between:
    """Counts what clients send to the store at a URL, and calls ``before`` and ``after`` around each call.

    They get the requests and run in the thread of the lane that sends them; what they raise, the lane sees.
    """

    def __init__(self, url: str) -> None:
        self.address, _ = locate(url)
        self.calls: list[list[Request]] = []
        self.before: Callable[[Sequence[Request]], object] = lambda requests: None
        self.after: Callable[[Sequence[Request]], object] = lambda requests: None
        #: Makes the source of hints; None for the store's own.
        self.watch: Callable[[], Watch] | None = None

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


class _Between:
    def __init__(self, owner: Between, store: Store) -> None:
        self._owner = owner
        self._store = store

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        self._owner.calls.append(list(requests))
        self._owner.before(requests)
        outcomes = self._store.act(requests, deadline)
        self._owner.after(requests)
        return outcomes

    def watch(self, address: str, deadline: Deadline) -> Watch | None:
        return self._store.watch(address, deadline) if self._owner.watch is None else self._owner.watch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Holdup:
    """Stops the first call that ``wanted`` accepts until ``go_on``; put in the place of ``before`` or ``after``."""

    def __init__(self, wanted: Callable[[Sequence[Request]], bool]) -> None:
        self._wanted = wanted
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, requests: Sequence[Request]) -> None:
        if not self.reached.is_set() and self._wanted(requests):
            self.reached.set()
            assert self._open.wait(30), "the test forgot to let the store go on"

    def go_on(self) -> None:
        self._open.set()
