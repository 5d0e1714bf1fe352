"""Permits: at most so many holders of one name at a time, across processes and machines.

The store keeps how many permits the name has, so that two programs with different limits are told, not let in. Each
lease has a number of its own among those that hold (``lease.slot``), from 1, the same until it ends. A holder that dies
gives its permits back by its ttl. Works like ``threading.BoundedSemaphore``: one object, many holders.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, TypeVar
from dibs.errors import DibsError, InvalidOption, NotHeld, Unsupported, WouldDeadlock
from dibs.hold import LOST
from dibs.lease import Lease, LeaseFacts, releasing_all
from dibs.lock import LockCore
from dibs.lockable import Lockable, given_back
from dibs.names import check_flag
from dibs.steps import run
from dibs.store import PERMITS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.desk import Desk
    from dibs.grips import Aim
    from dibs.hold import Hold
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.store import StoreAddress
    from dibs.terms import Terms

L = TypeVar("L", bound=LeaseFacts)


class SemaphoreCore(LockCore[L]):
    """What a semaphore does, in steps for either face."""

    __slots__ = ()

    def __init__(
        self,
        desk: Desk,
        name: str,
        limit: int,
        weight: int,
        resize: bool,
        terms: Terms,
        make_lease: Callable[[Session, Hold, str], L],
    ) -> None:
        check_pools(desk.address, "semaphores")
        check_permits("limit", limit, PERMITS_MAX - 1)
        check_permits("weight", weight, limit)
        check_flag("resize", resize)
        super().__init__(desk, name, terms._replace(permits=limit, take=weight, resize=resize), make_lease)

    def release_some(self, owner: object, count: int) -> Steps[bool]:
        """Give back ``count`` of what was acquired through this object, this owner's first."""
        return self.releasing(self.aim(owner, count))

    def aim(self, owner: object, count: int | None = None) -> Aim[L]:
        """What this owner is to loosen: its own, the latest first, and then that of others unless it is reentrant."""
        if count is None:
            return super().aim(owner)
        check_permits("n", count, PERMITS_MAX)
        aim: Aim[L] = []
        left = count
        grips, pid = self._grips[::-1], os.getpid()
        for own in (True,) if self.terms.reentrant else (True, False):
            for grip in grips:
                lease = grip.lease
                if (grip.owner == owner) is not own or lease._session.pid != pid:
                    continue
                if lease._over and not (
                    own and lease._hold.state == LOST
                ):  # one that was lost is its owner's to hear of
                    continue
                loosened = min(grip.count, left)
                aim.append((grip, grip.count - loosened))
                left -= loosened
                if not left:
                    return aim
        raise self._too_many(count - left, count)

    def releasing(self, aim: Aim[L]) -> Steps[bool]:
        leases: list[L] = []
        had = missed = 0
        try:
            for grip, count in aim:
                for _ in range(grip.count - count):
                    try:
                        lease = self._let_go(grip)
                    except NotHeld:  # another thread was quicker
                        missed += 1
                        continue
                    had += 1
                    if lease is not None:
                        leases.append(lease)
            confirmed = yield from releasing_all(leases)
        except DibsError:
            raise
        except BaseException:
            self.make_sure(aim)
            raise
        if missed:
            raise self._too_many(had, had + missed)
        return confirmed

    def _too_many(self, held: int, count: int) -> ValueError:
        whose = "by this owner through it" if self.terms.reentrant else "through it"
        return ValueError(
            f"semaphore {self.name!r} released too many times: {held} held {whose}, {count} to be released"
        )

    def refuse_own(self, owner: object) -> None:
        allowed = self.terms.permits - self.terms.take
        mine = sum(hold.terms.take for hold in self._desk.session().keeper.shared_by(owner, self._key, allowed))
        if mine > allowed:
            raise WouldDeadlock(
                f"this very caller holds {mine} of {self.terms.permits} permits of {self.name!r} and would wait for "
                f"itself for ever to get {self.terms.take} more: {self.instead('semaphore')}"
            )

    def available(self) -> Steps[int]:
        """How many of this object's limit nobody holds, as the store knows now; not below 0."""
        records = yield from self._desk.leases_of(self.name)
        return max(0, self.terms.permits - sum(record.take for record in records))

    def locked(self) -> bool:
        """Whether nothing could be acquired for what this object holds, as far as this process knows."""
        held = sum(self.terms.take for grip in self._grips if grip.lease.held)
        return held + self.terms.take > self.terms.permits


def check_pools(address: StoreAddress, what: str) -> None:
    """Refuse where a store has only locks."""
    if address.observed:
        raise Unsupported(f"no {what} with takeover='observe': how many have ended is counted by the store's clock")
    if not address.capabilities.permits:
        raise Unsupported(
            f"{address.capabilities.store} has locks only, no {what}; `dibs doctor` says what a store has"
        )


def check_permits(what: str, number: int, most: int) -> None:
    """Refuse what is not a number of permits."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidOption(f"{what} is a whole number, not {number!r}")
    if not 1 <= number <= most:
        raise InvalidOption(f"{what} is from 1 to {most:,}, not {number:,}")


class Semaphore(Lockable[Lease]):
    """At most so many holders of a name at a time. A description: acquiring it gives a ``Lease`` with a ``slot``.

    Works like ``threading.BoundedSemaphore``, as a context manager and as a decorator: one object, many holders.
    """

    __slots__ = ()

    _core: SemaphoreCore[Lease]

    @property
    def name(self) -> str:
        """What the semaphore is about."""
        return self._core.name

    @property
    def limit(self) -> int:
        """How many permits there are."""
        return self._core.terms.permits

    def release(self, n: int = 1) -> bool:
        """Release ``n`` of what was acquired through this object, first what this thread did.

        Raises ValueError when so many are not held through it, LeaseLost when one had been lost. Returns False when the
        store did not confirm; those leases then end by their ttl.
        """
        return given_back(self._core, self._core.releasing, n)

    def available(self) -> int:
        """How many permits are free now: for people and metrics, as it may change at once.

        How many are held is asked of the store, and is taken from this object's ``limit``; not below 0. (That the store
        keeps another limit, only ``acquire`` is told.)
        """
        return run(self._core.available())

    def __repr__(self) -> str:
        return f"<dibs.Semaphore {self.name!r} of {self.limit}>"
