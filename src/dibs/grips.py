"""What was acquired through one object, remembered so that it can be released like ``threading.Lock``.

A lock is a description; what is true of holding lives on the lease. A *grip* is one lease acquired through an object:
whoever releases loosens the grip of its own first, or for a plain lock that of whoever holds it.

In a forked child there are the grips of its parent, too, who goes on holding: they are good for nothing there, except
for the end of a ``with`` block that the child was forked in.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from dibs.errors import DibsError, NotHeld
from dibs.owners import is_gone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.errors import LockTimeout
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms


class Releasable(Protocol):
    """A lease of one name, or of several."""

    @property
    def held(self) -> bool: ...
    @property
    def _over(self) -> bool:
        """It was released, or its loss is known."""
        ...

    @property
    def _given_back(self) -> bool:
        """It was released."""
        ...

    @property
    def _session(self) -> Session: ...
    @property
    def _holds(self) -> Sequence[Hold]: ...
    def _releasing(self) -> Steps[bool]: ...
    def _end(self) -> None:
        """Give it back, if that has not begun, without waiting for the answer."""


L = TypeVar("L", bound=Releasable)

# Where an object has so many grips, those that have ended are looked for when it has twice as many, and not each time.
MANY = 16


class Grip(Generic[L]):
    """One lease acquired through a lock: by whom, how often (reentrant), and how many open ``with`` blocks it has."""

    __slots__ = ("blocks", "count", "lease", "owner")

    def __init__(self, owner: object, lease: L) -> None:
        self.owner = owner
        self.lease = lease
        self.count = 1
        self.blocks = 0


def _ours(grip: Grip[L]) -> bool:
    """Whether this process has acquired it, and not the one that it was forked from."""
    return grip.lease._session.pid == os.getpid()


if TYPE_CHECKING:
    #: Grips to be loosened, and how often each is to be held afterwards.
    Aim = list[tuple[Grip[L], int]]


class Gripped(ABC, Generic[L]):
    """What was acquired through one object, so that it can be released through it."""

    __slots__ = ("_grips", "_many", "_released_inside", "name", "terms")

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self.terms = terms
        self._grips: list[Grip[L]] = []
        self._many = MANY
        #: The owners of blocks that go on although what they held was released inside: once for each block.
        self._released_inside: list[object] = []

    # What differs:

    @abstractmethod
    def acquire(self, owner: object, blocking: bool = True, timeout: Seconds | None = -1) -> Steps[L | None]:
        """What was asked for, or None when it could not be had in time (``timed_out`` makes the error of it)."""

    @abstractmethod
    def timed_out(self) -> LockTimeout:
        """The error for a caller who could not get it: who has it, since when, for how long still."""

    @abstractmethod
    def locked(self) -> bool:
        """As ``Lockable.locked``: of the whole client for locks, of this object for what has permits."""

    # What is the same:

    def _held_by(self, owner: object) -> Grip[L] | None:
        """A reentrant owner's own grip, if it is still held."""
        return next((grip for grip in self._grips[:] if grip.owner == owner and grip.lease.held), None)

    def _let_go_of_lost(self, owner: object) -> None:
        """Whoever asks for the only permit again is not at work any more under the lease that it has lost."""
        for grip in self._grips[:]:
            if grip.owner == owner and not (grip.blocks or grip.lease._given_back or grip.lease.held):
                grip.lease._end()

    def _grip(self, owner: object, lease: L) -> None:
        grips = self._grips
        if grips and (len(grips) < MANY or len(grips) >= self._many):
            # Grips on leases that have ended are of no use to anybody any more, except a loss its owner must hear of.
            pid = os.getpid()
            for grip in grips[:]:  # one by one, as other threads add theirs meanwhile
                over = grip.lease._over and (grip.owner == owner or grip.lease._given_back or is_gone(grip.owner))
                if not grip.blocks and (over or grip.lease._session.pid != pid):
                    with suppress(ValueError):  # another thread has just done so
                        grips.remove(grip)
            self._many = max(MANY, 2 * len(grips))
        grips.append(Grip(owner, lease))

    def release(self, owner: object) -> Steps[bool]:
        """Release as ``threading.Lock`` and ``RLock`` do: what this owner acquired, else (plain locks) what is held."""
        return self.releasing(self.aim(owner))

    def aim(self, owner: object) -> Aim[L]:
        """What such a release is to loosen. Raises NotHeld."""
        grip = self._find(owner)
        if grip is None:
            if self.terms.reentrant and self._grips:
                raise NotHeld(f"{self.name!r} was acquired by another owner; only its owner can release it")
            raise NotHeld(f"release of {self.name!r}, which is not held through this lock")
        return [(grip, grip.count - 1)]

    def releasing(self, aim: Aim[L]) -> Steps[bool]:
        ((grip, _),) = aim
        try:
            lease = self._let_go(grip)
            return True if lease is None else (yield from lease._releasing())
        except DibsError:
            raise
        except BaseException:
            self.make_sure(aim)
            raise

    def _latest(self) -> list[Grip[L]]:
        """The grips as they are now, the latest first: a copy, as other threads add and remove theirs meanwhile."""
        grips = self._grips
        return grips[::-1] if len(grips) > 1 else grips

    def enter(self, lease: L) -> None:
        """The beginning of a ``with`` block of this lease, which was just acquired."""
        for grip in self._latest():
            if grip.lease is lease:
                grip.blocks += 1
                return

    def enter_again(self, grip: Grip[L], blocks: int) -> None:
        """It stands for what was released inside so many blocks of its owner, as ``threading.Condition`` does it."""
        for _ in range(min(blocks, self._released_inside.count(grip.owner))):
            grip.blocks += 1
            self._released_inside.remove(grip.owner)

    def block_of(self, owner: object) -> Grip[L] | None:
        """The innermost ``with`` block that this owner has entered and not left; None without any."""
        for grip in self._latest():
            if grip.blocks and grip.owner == owner:
                return grip
        return None

    def leave(self, owner: object, block: Grip[L] | None) -> L | None:
        """The end of a ``with`` block: the lease to be released; None when an outer block goes on or none is held.

        ``block`` is what ``block_of`` has just found.
        """
        if block is not None:
            return self._let_go(block, 1)
        own = next((grip for grip in self._grips[::-1] if grip.owner == owner and _ours(grip)), None)
        if owner in self._released_inside:  # and perhaps acquired again there, as threading.Condition does
            self._released_inside.remove(owner)
        elif own is None:
            return self._leave_for_another()
        return None if own is None else self._let_go(own)

    def _leave_for_another(self) -> L | None:
        """The block that ends was entered in another thread or task, as frameworks do it.

        Which of several it is cannot be told. What was released or lost inside goes first: if it was another's, that
        one finds here what it has left. Of those that hold, all of a name with permits, it is the last.
        """
        grips = [grip for grip in self._grips[::-1] if grip.blocks]
        if self._released_inside:
            del self._released_inside[0]
        elif grips:
            if self.terms.reentrant:
                raise NotHeld(f"{self.name!r} was acquired by another owner; only its owner can leave its block")
            return self._let_go(next((grip for grip in grips if grip.lease._over), grips[0]), 1)
        return None

    # Where a Ctrl-C came in between (Python lets it in wherever a function begins), what was begun is done all the
    # same, and the store's answer is not waited for. Else a lease would be renewed that nobody has in hand.

    def drop(self, lease: L) -> None:
        """A lease was acquired for a block that has not begun."""
        for grip in self._latest():
            if grip.lease is lease:
                self._cut_short(grip, 0)
                return

    def cut_short(self, owner: object, block: Grip[L] | None) -> None:
        """A block was being left. None: it had not been found yet."""
        block = block or self.block_of(owner)
        if block is not None:
            self._cut_short(block, 1)

    def _cut_short(self, grip: Grip[L], blocks: int) -> None:
        try:
            lease = self._let_go(grip, min(blocks, grip.blocks))
        except NotHeld:  # it had been loosened
            lease = grip.lease
        if lease is not None:
            lease._end()

    def make_sure(self, aim: Aim[L]) -> None:
        """This was being loosened."""
        for grip, count in aim:
            with suppress(NotHeld):
                while grip.count > max(count, 1):
                    self._let_go(grip)
                if not count:
                    self._let_go(grip)
            if not count:
                grip.lease._end()

    def _find(self, owner: object) -> Grip[L] | None:
        grips = [grip for grip in self._grips[::-1] if _ours(grip)]
        for grip in grips:
            if grip.owner == owner:
                return grip
        if self.terms.reentrant:
            return None
        # A plain lock may be released by anybody: the grip that is held, if there is one.
        return next((grip for grip in grips if not grip.lease._over), None)

    def _let_go(self, grip: Grip[L], blocks: int = 0) -> L | None:
        """Loosen a grip, and leave so many of its blocks; the lease to be released when that was the last of it."""
        # With no call in between, so that no Ctrl-C gets there.
        grip.blocks -= blocks
        if grip.count > 1:
            grip.count -= 1
            return None
        try:
            self._grips.remove(grip)
        except ValueError:
            raise NotHeld(f"{self.name!r} was released by another thread at the same moment") from None
        if grip.blocks:
            self._released_inside += [grip.owner] * grip.blocks
        return grip.lease
