"""The face for threads: ``Client`` and ``Lock``, thin verbs over the steps both faces share."""

from __future__ import annotations

from _thread import get_ident
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dibs.errors import LeaseLost
from dibs.grips import Releasable
from dibs.lease import Lease, Lost
from dibs.lock import LockCore, check_decorated
from dibs.multilock import MultiCore, MultiLeaseFacts
from dibs.steps import run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dibs.desk import Desk, LeaseRecord
    from dibs.grips import Gripped
    from dibs.names import Seconds
    from dibs.store import Capabilities

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T", bound=Releasable)


class Lockable(Generic[T]):
    """What all locks for threads have in common: the verbs of ``threading.Lock``, ``with``, and decorating."""

    __slots__ = ("_core",)

    def __init__(self, core: Gripped[T]) -> None:
        self._core = core

    def acquire(self, blocking: bool = True, timeout: Seconds | None = -1) -> T | None:
        """Wait up to ``timeout`` seconds for it; its lease, or None when it could not be had.

        ``timeout=-1`` means what the lock was built with, None for ever, 0 (or ``blocking=False``) asks exactly once.
        Raises StoreUnavailable when the store gives no answer, SetupRequired when it is not set up,
        WouldDeadlock when this thread holds it already and would wait without limit.
        """
        return run(self._core.acquire(get_ident(), blocking, timeout))

    def release(self) -> bool:
        """Release what this thread acquired through this lock, or what another did if the lock is not reentrant.

        Raises NotHeld (a RuntimeError) when nothing is held, LeaseLost when it had been lost. Returns False when the
        store did not confirm; the lease then ends by its ttl.
        """
        return run(self._core.release(get_ident()))

    def locked(self) -> bool:
        """Whether this client holds it now, as far as this process knows."""
        return self._core.locked()

    def __enter__(self) -> T:
        lease = run(self._core.acquire(get_ident()))
        if lease is None:
            raise self._core.timed_out()
        return lease

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        lease = self._core.leave(get_ident())
        if lease is not None:
            try:
                run(lease._releasing())
            except LeaseLost:
                if exc_type is None:
                    raise

    def __call__(self, function: F) -> F:
        """Decorate: each call holds the lock. When it cannot be had: LockTimeout, or with on_busy="skip" None."""
        check_decorated(function, awaited=False)
        core = self._core

        @wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            lease = self.acquire()
            if lease is None:
                if core.terms.on_busy == "skip":
                    return None
                raise core.timed_out()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self.__exit__(BaseException)
                raise
            self.__exit__(None)
            return result

        return locked  # type: ignore[return-value]


class Lock(Lockable[Lease]):
    """A name held by one at a time. A description: acquiring it gives a ``Lease``.

    Works like ``threading.Lock`` (``threading.RLock`` with ``reentrant=True``), as a context manager and as a
    decorator. Safe to share among threads.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """What the lock is about."""
        return self._core.name

    def __repr__(self) -> str:
        return f"<dibs.Lock {self.name!r}>"


class MultiLease(MultiLeaseFacts[Lease]):
    """Several names held by this process, for threads. ``leases[name]`` is the lease of each."""

    __slots__ = ()

    @property
    def lost(self) -> Lost:
        """Set when one of the leases is lost; can be waited for."""
        return Lost(*self.leases.values())

    def renew(self, ttl: Seconds | None = None) -> None:
        """Renew all of them now, in one call; see ``Lease.renew``."""
        run(self._renewing(ttl))

    def release(self) -> bool:
        """Give all of them back, in one call; see ``Lease.release``."""
        return run(self._releasing())

    def __enter__(self) -> MultiLease:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            run(self._releasing())
        except LeaseLost:
            if exc_type is None:
                raise


class MultiLock(Lockable[MultiLease]):
    """Several names, all or nothing. A description: acquiring it gives a ``MultiLease``.

    Asks for all in one round trip and holds nothing while it waits, so it deadlocks with nobody. Works like ``Lock``.
    """

    __slots__ = ()

    _core: MultiCore[MultiLease, Lease]

    @property
    def names(self) -> tuple[str, ...]:
        """What the lock is about, in the order given."""
        return self._core.names

    def __repr__(self) -> str:
        return f"<dibs.MultiLock of {len(self.names)} names>"


class Client:
    """A connection to the place where leases are kept; made by ``dibs.connect``. Safe to share among threads."""

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
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> Lock:
        """Describe a lock on ``name``; nothing is sent.

        ttl: seconds a grant lasts without renewal (default: the client's). renew: keep it alive in the background.
        timeout: seconds to wait; None for ever, 0 asks once. reentrant: the same thread may acquire it again.
        min_hold: nobody gets the name before this many seconds after the grant, however early it is released.
        max_hold: it is not renewed beyond this many seconds, then it is lost. on_lost: called in a thread of its own
        when the lease is lost. on_busy: what the decorator does when the name cannot be had, "raise" or "skip".
        info: a small JSON object for whoever looks at the lease. Times are seconds or timedelta.

        Raises InvalidName and InvalidOption.
        """
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return Lock(LockCore(self._desk, name, terms, Lease))

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
        on_busy: str = "raise",
        info: dict[str, Any] | None = None,
    ) -> MultiLock:
        """Describe a lock on all of these names at once; nothing is sent. The other parameters are those of ``lock``.

        All or nothing: they are asked for in one round trip, and whoever waits holds none of them meanwhile, so that no
        set of multilocks can deadlock. ``timeout`` is for all of them together.

        Raises InvalidName for a name given twice, and InvalidOption.
        """
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return MultiLock(MultiCore(self._desk, names, terms, Lease, MultiLease))

    def leases(self, prefix: str = "") -> list[LeaseRecord]:
        """The leases in force in this namespace whose name starts with ``prefix``, by name."""
        return run(self._desk.leases(prefix))

    def holder(self, name: str) -> LeaseRecord | None:
        """Who holds ``name`` now, or None."""
        return run(self._desk.holder(name))

    def break_lease(self, name: str, *, fencing_token: int, now: bool = False) -> bool:
        """Take a lease from its holder, if it is still the one with this token; False when it is not.

        It cannot be renewed any more, its holder hears of the loss at the next renewal, and the name is free when the
        lease would have expired. With ``now=True`` the name is free at once: for up to a ttl the old holder may still
        believe in its lease, and only fencing tokens keep the two apart.
        """
        return run(self._desk.breaking(name, fencing_token, now))

    def purge(self, older_than: Seconds) -> int:
        """Delete the rows of names that have been free for ``older_than`` seconds; return how many.

        Tidiness only: a dead holder's lease ends by itself. The floor under the fencing tokens is kept.
        """
        return run(self._desk.purging(older_than))

    def setup(self) -> None:
        """Make the tables; harmless when they exist. Raises SetupRequired when the login may not."""
        run(self._desk.setting_up())

    def ping(self) -> float:
        """Reach the store and return the seconds it took; raises StoreUnavailable or SetupRequired."""
        return run(self._desk.pinging())

    @property
    def capabilities(self) -> Capabilities:
        """What this store really promises, some of it read from the server's settings; connects when needed."""
        return run(self._desk.capabilities())

    def close(self) -> None:
        """Give back what is held, refuse who waits, close the connections. May be called twice."""
        run(self._desk.closing())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dibs.Client {self._desk.address.shown}>"
