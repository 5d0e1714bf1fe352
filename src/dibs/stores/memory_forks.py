"""What a fork of this process does to the shelves of its memory stores: no thread is in the midst of one meanwhile.

A child inherits the shelves, and a mutex that another thread had at that moment would be nobody's to release there.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dibs.stores.memory import Shelf


class Forks:
    """Every shelf of this process, had by whoever forks it from before until after it."""

    def __init__(self) -> None:
        #: Held from before a fork until after it, so that one thread forks at a time and no shelf is added meanwhile.
        self._forking = threading.Lock()
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
