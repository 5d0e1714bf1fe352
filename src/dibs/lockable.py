"""The verbs that all locks for threads have in common (``dibs.aio.lockable`` has them for tasks)."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.errors import DibsError, LeaseLost
from dibs.grips import Releasable
from dibs.lease import Lease
from dibs.lock import check_decorated, ran_inside
from dibs.owners import this_thread
from dibs.steps import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.grips import Aim, Gripped
    from dibs.names import Seconds
    from dibs.steps import Steps

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T", bound=Releasable)


def given_back(core: Gripped[T], releasing: Callable[[Aim[T]], Steps[bool]], *how_many: int) -> bool:
    """Take the steps that release what this thread has of it; also where Ctrl-C comes in, it is given back."""
    aim: Aim[T] | None = None
    try:
        aim = core.aim(this_thread(), *how_many)
        return run(releasing(aim))
    except DibsError:
        raise
    except BaseException:
        with suppress(Exception):  # nothing was held
            core.make_sure(core.aim(this_thread(), *how_many) if aim is None else aim)
        raise


class Lockable(Generic[T]):
    """What all locks for threads have in common: the verbs of ``threading.Lock``, ``with``, and decorating."""

    __slots__ = ("__weakref__", "_core")

    def __init__(self, core: Gripped[T]) -> None:
        self._core = core

    def acquire(self, blocking: bool = True, timeout: Seconds | None = -1) -> T | None:
        """Wait up to ``timeout`` seconds for it; its lease, or None when it could not be had.

        ``timeout=-1`` means what the lock was built with, None for ever, 0 (or ``blocking=False``) asks exactly once.
        Raises StoreUnavailable when the store gives no answer, SetupRequired when it is not set up,
        WouldDeadlock when this thread holds it already and would wait without limit, or began to wait last in a ring of
        callers who wait for each other.
        """
        return run(self._core.acquire(this_thread(), blocking, timeout))

    def release(self) -> bool:
        """Release what this thread acquired through this lock, or what another did if the lock is not reentrant.

        Raises NotHeld (a RuntimeError) when nothing is held, LeaseLost when it had been lost. Returns False when the
        store did not confirm; the lease then ends by its ttl.
        """
        return given_back(self._core, self._core.releasing)

    def locked(self) -> bool:
        """Whether it is held, as far as this process knows; ``client.holder(name)`` asks the store.

        A lock: whether this client holds it, through whichever object; a multilock: all of its names. A side of a
        read/write lock: whether it is held through this object. A semaphore: whether what is held through this object
        leaves too few permits for another acquire through it.
        """
        return self._core.locked()

    def __enter__(self) -> T:
        return self._enter(self._core.acquire(this_thread()))

    def _enter(self, acquiring: Steps[T | None]) -> T:
        core, lease = self._core, None
        try:
            lease = run(acquiring)
            if lease is None:
                raise core.timed_out()
            core.enter(lease)
            return lease
        except BaseException:
            if lease is not None:
                core.drop(lease)
            raise

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        block = None
        try:
            owner = this_thread()
            block = self._core.block_of(owner)
            lease = self._core.leave(owner, block)
            if lease is None:
                return
            if exc_type is GeneratorExit:
                lease._session.end(lease._releasing(), exc_type)
            else:
                run(lease._releasing())
        except LeaseLost:
            if exc_type is None:
                raise
        except DibsError:
            raise
        except BaseException:
            self._core.cut_short(this_thread(), block)
            raise

    # What threading.Condition asks of an RLock, to wait without it. Without, it would take a reentrant lock
    # for one that is not held, and go on without a lock whose time-out is over when it wants it back.

    def _is_owned(self) -> bool:
        return self._core._find(this_thread()) is not None

    def _release_save(self) -> tuple[int, int]:
        grip = self._core._find(this_thread())
        count, blocks = 1, 0
        if grip is not None:
            count, blocks, grip.count = grip.count, grip.blocks, 1
        given_back(self._core, self._core.releasing)
        return count, blocks

    def _acquire_restore(self, had: tuple[int, int]) -> None:
        run(self._core.acquire(this_thread(), True, None))
        grip = self._core._find(this_thread())
        if grip is not None:
            grip.count, blocks = had
            self._core.enter_again(grip, blocks)

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
                core.enter(lease)
                result = ran_inside(function(*args, **kwargs))
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
