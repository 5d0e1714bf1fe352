"""The mutex of a shelf: who has it, and what a fork of this process does to it: no thread is in the midst of one then.

A child inherits the shelves, and a mutex that another thread had at that moment would be nobody's to release there.
"""

from __future__ import annotations

import os
from functools import wraps
from weakref import WeakSet

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.clock import RealClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.stores.memory import Shelf

M = TypeVar("M", bound="Callable[..., Any]")


def alone(method: M) -> M:
    """Have the mutex of the object's shelf while its method runs.

    There is nothing but a call in the block: see ``dibs.session`` on what Python 3.13 makes of loops in one.
    """

    @wraps(method)
    def having_it(self: Any, *given: Any) -> Any:
        with self._shelf.mutex:
            return method(self, *given)

    return having_it  # type: ignore[return-value]


class Forks:
    """Every shelf of this process, had by whoever forks it from before until after it."""

    def __init__(self) -> None:
        #: Held from before a fork until after it, so that one thread forks at a time and no shelf is added meanwhile.
        self._forking = RealClock.mutex()
        self._shelves: WeakSet[Shelf] = WeakSet()
        self._had: list[Shelf] = []
        self._registered = False

    def add(self, shelf: Shelf) -> None:
        with self._forking:
            self._shelves.add(shelf)
            if not self._registered:
                self._registered = True
                os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._after)

    def _before(self) -> None:
        self._forking.acquire()
        self._had = list(self._shelves)
        for shelf in self._had:
            shelf.mutex.acquire()

    def _after(self) -> None:
        had, self._had = self._had, []
        for shelf in had:
            shelf.mutex.release()
        self._forking.release()


# A process forks as a whole, so what must be had for it is known to the module as a whole.
FORKS = Forks()
