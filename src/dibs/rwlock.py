"""Many readers or one writer: a pool of permits of which a reader takes one and a writer all.

So the rules of the line do what is wanted: a waiting writer counts as taking everything, which holds back the readers
who come after it, and a dead reader or writer delays others by its ttl only. A writer becomes a reader by giving back
all permits but one in a single write, with nobody in between; the other way round two readers would wait for each other
for ever, so it is refused.
"""

from __future__ import annotations

from weakref import ref

from dibs._typing import TYPE_CHECKING, Generic, NoReturn, TypeVar
from dibs.errors import LeaseLost, NotHeld, StoreUnavailable, WouldDeadlock
from dibs.lease import Lease, LeaseFacts
from dibs.lock import LockCore
from dibs.lockable import Lock
from dibs.owners import this_thread
from dibs.renewing import give_back_some
from dibs.semaphore import check_pools
from dibs.steps import run, sending
from dibs.store import PERMITS_MAX, Granted

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.desk import Desk
    from dibs.grips import Grip
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

L = TypeVar("L", bound=LeaseFacts)


class SideCore(LockCore[L]):
    """One side of a read/write lock: what readers, or what writers do."""

    __slots__ = ("__weakref__", "_other")

    #: The other side, if anybody has it.
    _other: Callable[[], SideCore[L] | None]

    def __reduce__(self) -> NoReturn:
        self._desk.__reduce__()  # before what the sides know of each other is found to be nothing to pickle

    def acquire(self, owner: object, blocking: bool = True, timeout: Seconds | None = -1) -> Steps[L | None]:
        other = self._other()
        if other is not None and other._held_by(owner) is not None:
            if self.terms.take > 1:
                raise WouldDeadlock(
                    f"{self.name!r} is held for reading by this very caller, and a reader cannot become a writer: two "
                    "who tried would wait for each other for ever. Release it and take it for writing, or take it for "
                    "writing at once and downgrade()"
                )
            raise WouldDeadlock(
                f"{self.name!r} is held for writing by this very caller: it may read already, or downgrade()"
            )
        return (yield from super().acquire(owner, blocking, timeout))

    def refuse_own(self, owner: object) -> None:
        if self._desk.session().keeper.shared_by(owner, self._key):
            raise WouldDeadlock(
                f"{self.name!r} is held by this very caller, who would wait for itself for ever once somebody else "
                f"waits to write: {self.instead('lock')}"
            )

    # A block that began as a writer's and was downgraded ends as a reader's:

    def block_of(self, owner: object) -> Grip[L] | None:
        other, grip = self._other(), super().block_of(owner)
        return super(SideCore, other).block_of(owner) if grip is None and other is not None else grip

    def _let_go(self, grip: Grip[L], blocks: int = 0) -> L | None:
        other = self._other()
        side = self if other is None or grip not in other._grips else other
        return super(SideCore, side)._let_go(grip, blocks)

    def locked(self) -> bool:
        return any(grip.lease.held for grip in self._grips)


class RWCore(Generic[L]):
    """Both sides of a read/write lock."""

    __slots__ = ("name", "readers", "writers")

    def __init__(self, desk: Desk, name: str, terms: Terms, make_lease: Callable[[Session, Hold, str], L]) -> None:
        check_pools(desk.address, "read/write locks")
        self.readers: SideCore[L] = SideCore(desk, name, terms._replace(permits=PERMITS_MAX, take=1), make_lease)
        self.name = self.readers.name
        self.writers: SideCore[L] = SideCore(
            desk, name, terms._replace(permits=PERMITS_MAX, take=PERMITS_MAX), make_lease
        )
        # A writer may become a reader, so its side keeps the other. Not the other way round, too: a circle would keep a
        # lease that was dropped.
        readers = self.readers
        self.writers._other = lambda: readers
        self.readers._other = ref(self.writers)

    def downgrade(self, owner: object) -> Steps[None]:
        """Turn this owner's write lease into a read lease, with no moment in between at which nobody holds it."""
        grip = self.writers._find(owner)
        # (Another's is not for this owner to weaken: that one goes on writing.)
        if grip is None or grip.owner != owner or grip.lease._over:
            if self.writers._desk.session().closed:  # which gave it back, whoever was in the midst of it
                raise StoreUnavailable("this dibs client is closed", maybe_applied=False)
            raise NotHeld(f"{self.name!r} is not held for writing by this very caller through this object")
        grip.lease.check()
        session, hold = grip.lease._session, grip.lease._hold
        # From here on it is a reader's for this process, whatever becomes of the answer.
        self.readers._grips.append(grip)
        self.writers._grips.remove(grip)
        ask = yield from sending(
            session,
            lambda: give_back_some(session, hold, 1),
            session.request_timeout_s + session.patience_s,
            "the store did not answer the downgrade: other readers may have to wait until the end",
        )
        if not isinstance(ask.outcome, Granted):
            session.keeper.lose(hold, "it had ended when it was to be downgraded")
            raise LeaseLost(grip.lease._why())


class RWLock:
    """Many readers or one writer of a name; ``read()`` and ``write()`` are locks like ``Lock``.

    A waiting writer holds back the readers who come after it. A dead reader or writer delays others by its ttl only.
    ``with rwlock.write() as lease:`` as with a lock; a block that was downgraded ends as a reader's.
    """

    __slots__ = ("__weakref__", "_core", "_read", "_write")

    def __init__(self, core: RWCore[Lease]) -> None:
        self._core = core
        self._read = Lock(core.readers)
        self._write = Lock(core.writers)

    @property
    def name(self) -> str:
        """What the lock is about."""
        return self._core.name

    def read(self) -> Lock:
        """The side of the readers: any number of them at a time, while no writer holds it or waits for it."""
        return self._read

    def write(self) -> Lock:
        """The side of the writers: one at a time, and no reader meanwhile."""
        return self._write

    def downgrade(self) -> None:
        """Make the write lease of this thread a read lease, with no gap; it is released as one.

        Raises NotHeld when this thread holds no write lease, LeaseLost when it had been lost, StoreUnavailable when the
        answer is unknown: it is a read lease all the same, but other readers may have to wait until it is released.
        """
        run(self._core.downgrade(this_thread()))

    def __repr__(self) -> str:
        return f"<dibs.RWLock {self.name!r}>"
