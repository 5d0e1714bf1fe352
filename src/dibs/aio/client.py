"""A client for tasks: the verbs of ``dibs.Client``, awaited."""

from __future__ import annotations

from functools import wraps

from dibs._typing import TYPE_CHECKING, Any, Literal, TypeVar
from dibs.aio.claims import AsyncBatch, AsyncClaims, AsyncItem
from dibs.aio.election import AsyncElection, AsyncTerm
from dibs.aio.lease import AsyncLease
from dibs.aio.lockable import AsyncLock
from dibs.aio.multilock import AsyncMultiLease, AsyncMultiLock
from dibs.aio.once import AsyncOnce, AsyncOnceRun
from dibs.aio.queue import AsyncJob, AsyncJobBatch, AsyncQueue
from dibs.aio.rwlock import AsyncRWLock
from dibs.aio.semaphore import AsyncSemaphore
from dibs.aio.tasks import is_here, owner, take
from dibs.campaign import election_core
from dibs.claiming import claims_core
from dibs.handover import adopting, read_state
from dibs.history import keeping, reading
from dibs.lock import LockCore, check_decorated
from dibs.multilock import MultiCore
from dibs.names import check_name
from dibs.once import OnceCore, once_options
from dibs.once_keys import key_of_calls
from dibs.pausing import listing, pausing, resuming
from dibs.queue_core import QueueCore, listing_queues
from dibs.rwlock import RWCore
from dibs.semaphore import SemaphoreCore
from dibs.steps import run
from dibs.threads import unattended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from dibs.aio.tasks import Owner
    from dibs.desk import Desk, LeaseRecord
    from dibs.history import HistoryRecord
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.pausing import Pause
    from dibs.queue_records import QueueDepth
    from dibs.store import Capabilities

F = TypeVar("F", bound="Callable[..., Any]")


class AsyncClient:
    """A connection to the place where leases are kept, for asyncio; made by ``dibs.connect_async``.

    Safe to share among tasks, also of several loops.
    """

    #: The task whose block it is.
    _entered: Owner | None = None

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncLock:
        """Describe a lock on ``name``; nothing is sent. The parameters are those of ``dibs.Client.lock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncLock(LockCore(self._desk, name, terms, AsyncLease))

    def multilock(
        self,
        names: Collection[str],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncMultiLock:
        """Describe a lock on all of these names at once; see ``dibs.Client.multilock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncMultiLock(MultiCore(self._desk, names, terms, AsyncLease, AsyncMultiLease))

    def claims(
        self,
        source: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = False,
        margin: Seconds | None = None,
        max_tries: int | None = None,
        info: dict[str, Any] | None = None,
        mode: Literal["leases", "columns"] = "leases",
        table: str | None = None,
        key: str | None = None,
    ) -> AsyncClaims:
        """Describe claims on items of ``source``; see ``dibs.Client.claims``."""
        given = (ttl, renew, margin, max_tries, info, mode, table, key)
        return AsyncClaims(claims_core(self._desk, source, AsyncItem, AsyncBatch, *given))

    def queue(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        max_tries: int | None = 10,
        priority: int = 0,
        group_limit: int | None = None,
        keep_results: Seconds = 0,
    ) -> AsyncQueue:
        """Describe a durable queue of work; see ``dibs.Client.queue``."""
        options = (ttl, renew, max_hold, max_tries, priority, group_limit, keep_results)
        return AsyncQueue(QueueCore(self._desk, name, *options, AsyncJob, AsyncJobBatch))

    async def queues(self, prefix: str = "") -> list[QueueDepth]:
        """The queues of this namespace whose name starts with ``prefix`` and that have jobs, and how deep they are."""
        return await take(listing_queues(self._desk, prefix))

    def election(
        self,
        name: str,
        *,
        value: Any = None,
        ttl: Seconds | None = None,
        priority: int = 0,
        standby_max: int | None = None,
        standby_full: Literal["refuse", "replace"] = "refuse",
        info: dict[str, Any] | None = None,
    ) -> AsyncElection:
        """Describe an election, in which this client is a candidate or looks on; see ``dibs.Client.election``."""
        return AsyncElection(
            election_core(self._desk, name, AsyncTerm, value, ttl, priority, standby_max, standby_full, info)
        )

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        weight: int = 1,
        resize: bool = False,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncSemaphore:
        """Describe a semaphore: at most ``limit`` permits of ``name``; see ``dibs.Client.semaphore``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncSemaphore(SemaphoreCore(self._desk, name, limit, weight, resize, terms, AsyncLease))

    def rwlock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncRWLock:
        """Describe a lock for many readers or one writer of ``name``; see ``dibs.Client.rwlock``."""
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return AsyncRWLock(RWCore(self._desk, name, terms, AsyncLease))

    def once(
        self,
        name: str,
        key: Key | None = None,
        *,
        keep: Seconds,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> AsyncOnce:
        """Describe work that is to be done at most once in ``keep`` seconds for this key; see ``dibs.Client.once``."""
        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        return AsyncOnce(OnceCore(self._desk, name, key, options, AsyncLease, AsyncOnceRun))

    def once_per(
        self,
        name: str,
        *,
        keep: Seconds,
        key: Callable[..., Key] | None = None,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """Decorate an async function: each call is ``once(name, its key).run(function, …)``.

        See ``dibs.Client.once_per``.
        """
        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        check_name(name)

        def decorate(function: F) -> F:
            check_decorated(function, awaited=True)
            key_of = key_of_calls(function, key)

            @wraps(function)
            async def at_most_once(*args: Any, **kwargs: Any) -> Any:
                core = OnceCore(self._desk, name, key_of(*args, **kwargs), options, AsyncLease, AsyncOnceRun)
                return await AsyncOnce(core).run(function, *args, **kwargs)

            return at_most_once  # type: ignore[return-value]

        return decorate

    async def adopt(
        self,
        state: dict[str, Any],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        info: dict[str, Any] | None = None,
    ) -> AsyncLease:
        """Take over a lease that another process exported; see ``dibs.Client.adopt``."""
        given = read_state(self._desk, state)
        info = given.info if info is None else info
        terms = self._desk.terms(ttl, renew, None, False, min_hold, max_hold, on_lost, "raise", info)
        return await take(adopting(self._desk, given, terms, owner(), AsyncLease))

    async def leases(self, prefix: str = "") -> list[LeaseRecord]:
        """The leases in force in this namespace whose name starts with ``prefix``, by name."""
        return await take(self._desk.leases(prefix))

    async def holder(self, name: str) -> LeaseRecord | None:
        """Who holds ``name`` now, or None; of several (of a semaphore, readers) the one with the smallest slot."""
        return await take(self._desk.holder(name))

    async def break_lease(self, name: str, *, fencing_token: int, now: bool = False) -> bool:
        """Take a lease from its holder; see ``dibs.Client.break_lease``."""
        return await take(self._desk.breaking(name, fencing_token, now))

    async def purge(self, older_than: Seconds) -> int:
        """Delete rows of free names; see ``dibs.Client.purge``."""
        return await take(self._desk.purging(older_than))

    async def pause(
        self, name: str, note: str | None = None, *, ttl: Seconds | None = None, by: str | None = None
    ) -> Pause:
        """Stop new grants of ``name`` for every client of this namespace; a ``*`` at its end means all that begin so.

        Holders go on: they renew and release. A caller that asks once is refused, and waiters go on waiting; they are
        told who paused it, and ``note``. It ends by itself after ``ttl`` seconds (from 2 to the store's longest ttl;
        default: an hour) or with ``resume``. Pausing again replaces note and end. by: who is shown to have paused it
        (default: user@host).

        It returns when the pause is in force: after a good second, in which every client looks. A request that was on
        its way at that moment, for at most its request time-out, may be granted yet. Raises InvalidName,
        InvalidOption, and Unsupported where the store cannot keep it (``capabilities.pause``).
        """
        return await take(pausing(self._desk, name, note, ttl, by))

    async def resume(self, name: str) -> bool:
        """End the pause of exactly this ``name`` or ``prefix*``; False when there was none.

        Other clients notice within half a second, and their waiters ask within a second more.
        """
        return await take(resuming(self._desk, name))

    async def pauses(self) -> list[Pause]:
        """The pauses in force in this namespace, by name."""
        return await take(listing(self._desk))

    async def setup(self, *, history: int | None = None) -> None:
        """Make the tables; harmless when they exist. Raises SetupRequired when the login may not.

        history: from now on the store writes down who had each name, and keeps the last so many grants of each
        (``history(name)``); 0 switches that off and forgets it, None leaves it as it is. Unsupported where the store
        cannot (``capabilities.history``).
        """
        await take(self._desk.setting_up() if history is None else keeping(self._desk, history))

    async def history(self, name: str, limit: int = 100) -> list[HistoryRecord]:
        """Who had ``name`` and when, newest first: up to ``limit`` grants, whichever client made them.

        The store writes them down while it is told to (``setup(history=100)``). Raises SetupRequired when it was not,
        and Unsupported where it cannot (``capabilities.history``).
        """
        return await take(reading(self._desk, name, limit))

    async def ping(self) -> float:
        """Reach the store and return the seconds it took; raises StoreUnavailable or SetupRequired."""
        return await take(self._desk.pinging())

    @property
    def capabilities(self) -> Coroutine[Any, Any, Capabilities]:
        """What this store really promises, to be awaited: some of it is read from the server's settings."""
        return self._capabilities()

    async def _capabilities(self) -> Capabilities:
        # A coroutine as of every other verb: of what ``take`` returns, asyncio makes no task since Python 3.12.
        return await take(self._desk.capabilities())

    async def close(self) -> None:
        """Give back what is held, refuse waiters, close the connections. May be called twice."""
        await take(self._desk.closing())

    async def __aenter__(self) -> AsyncClient:
        self._entered = owner()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if exc_type is GeneratorExit and (not is_here(self._entered) or self._desk.is_busy_here()):
            unattended(lambda: run(self._desk.closing()))
        else:
            await self.close()

    def __repr__(self) -> str:
        return f"<dibs.AsyncClient {self._desk.address.shown}>"
