"""The two faces of a client behind one adapter, so that a case is written once and run for threads and for tasks.

A case is an async function. *Each task of it is an actor*: on the face for tasks it is the owner of what it acquires,
on the face for threads it has a thread of its own in which all its calls run, one after the other. Clients, locks and
leases are dibs' own objects on either face; only how their verbs are called differs, and ``Face.do`` hides that.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import asynccontextmanager
from queue import SimpleQueue
from weakref import WeakKeyDictionary

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.aio import AsyncClient
from dibs.client import Client
from dibs.desk import DEFAULTS, Desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from dibs.store import Capabilities, Store, StoreAddress

# A verb that has not come back after this long never will.
VERB_LIMIT_S = 40.0


def in_leases(client: Any, source: str, **options: Any) -> Any:
    """Claims as they are kept unless told otherwise."""
    return client.claims(source, **options)


class Place(NamedTuple):
    """A store under test, and how to make clients of it, and claims of those."""

    address: StoreAddress
    claims: Callable[..., Any] = in_leases

    def desk(self, options: dict[str, Any]) -> Desk:
        return Desk(self.address, **{"info": None, **DEFAULTS, **options})

    def closed_to_all(self) -> Place:
        """The same, but a failure to open: for what must be refused before any I/O."""

        def refuse() -> Store:
            raise AssertionError("the store was opened")

        return self._replace(address=self.address._replace(open=refuse))


class Face(ABC):
    """What a case uses instead of ``dibs.connect`` or ``dibs.connect_async``."""

    name = ""

    def __init__(self, place: Place) -> None:
        import os

        self.place = place
        self.capabilities = place.address.capabilities
        #: No other case uses this namespace.
        self.namespace = "conformance-" + os.urandom(5).hex()
        #: Seconds a lease lasts that a case wants to see end.
        self.short_ttl = max(1.0, self.capabilities.ttl_min_s)
        self._clients: list[Any] = []
        # What was handed out is kept until the clients are closed: a lease dropped before is a warning of its own.
        self._kept: list[object] = []

    def client(self, **options: Any) -> Any:
        """A new client; closed when the case is over."""
        client = self._client(self.place.desk({"namespace": self.namespace, **options}))
        self._clients.append(client)
        return client

    def claims(self, client: Any, source: str, **options: Any) -> Any:
        """``client.claims``, wherever they are kept. Items are numbers from 0 to 99, and letters from a to z."""
        return self.place.claims(client, source, **options)

    def idle_client(self, **options: Any) -> Any:
        """A client whose store cannot be opened."""
        return self._client(self.place.closed_to_all().desk({"namespace": self.namespace, **options}))

    async def close(self) -> None:
        for client in self._clients:
            await self.do(client.close)
        self._kept.clear()

    # What differs:

    @abstractmethod
    def _client(self, desk: Desk) -> Any: ...

    @abstractmethod
    async def do(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a verb of a client, lock, lease or event for the running task, and wait for its result."""

    @abstractmethod
    def decorate(self, lock: Any, function: Callable[[], object]) -> Callable[[], Awaitable[Any]]:
        """A function decorated with the lock, to be awaited."""

    @abstractmethod
    def holding(self, lock: Any) -> Any:
        """``with lock as lease`` or ``async with lock as lease``."""

    @abstractmethod
    async def real_capabilities(self, client: Any) -> Capabilities:
        """What the store offers, its settings read."""


class _Actor:
    """The thread of one task of a case."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon, so that a verb that hangs fails its case and not the end of the interpreter.
        threading.Thread(target=self._run, name="conformance", daemon=True).start()

    def _run(self) -> None:
        while (item := self.calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised in the task that asked
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call


class Threads(Face):
    name = "threads"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._actors: WeakKeyDictionary[asyncio.Task[Any], _Actor] = WeakKeyDictionary()
        self._all: list[_Actor] = []

    def _client(self, desk: Desk) -> Client:
        return Client(desk)

    async def do(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The task is looked up before wait_for may make another.
        task = asyncio.current_task()
        assert task is not None
        future = self._in_thread_of(task, lambda: verb(*args, **kwargs))
        result = await asyncio.wait_for(future, VERB_LIMIT_S)
        self._kept.append(result)
        return result

    def _in_thread_of(self, task: asyncio.Task[Any], call: Callable[[], Any]) -> asyncio.Future[Any]:
        actor = self._actors.get(task)
        if actor is None:
            actor = self._actors[task] = _Actor()
            self._all.append(actor)
        future: Future[Any] = Future()
        actor.calls.put((future, call))
        return asyncio.wrap_future(future)

    def decorate(self, lock: Any, function: Callable[[], object]) -> Callable[[], Awaitable[Any]]:
        def plain() -> object:
            return function()

        locked = lock(plain)
        return lambda: self.do(locked)

    @asynccontextmanager
    async def holding(self, lock: Any) -> AsyncIterator[Any]:
        lease = await self.do(lock.__enter__)
        try:
            yield lease
        except BaseException as error:
            await self.do(lock.__exit__, type(error), error, None)
            raise
        await self.do(lock.__exit__, None, None, None)

    async def real_capabilities(self, client: Any) -> Capabilities:
        return await self.do(lambda: client.capabilities)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await super().close()
        for actor in self._all:
            actor.calls.put(None)


class Tasks(Face):
    name = "tasks"

    def _client(self, desk: Desk) -> AsyncClient:
        return AsyncClient(desk)

    async def do(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Awaited in the running task itself: it is the owner.
        result = verb(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        self._kept.append(result)
        return result

    def decorate(self, lock: Any, function: Callable[[], object]) -> Callable[[], Awaitable[Any]]:
        async def awaited() -> object:
            return function()

        return lock(awaited)  # type: ignore[no-any-return]

    def holding(self, lock: Any) -> Any:
        return lock

    async def real_capabilities(self, client: Any) -> Capabilities:
        shown = client.capabilities
        return await shown if inspect.isawaitable(shown) else shown  # type: ignore[no-any-return]


FACES: dict[str, type[Face]] = {"threads": Threads, "tasks": Tasks}
