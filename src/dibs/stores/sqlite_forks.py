"""What a fork of this process does to its SQLite connections: none is open while it happens.

A child that inherits SQLite's idea of the locks it has on a file would hold none of them. So before a fork every
connection finishes the request under way and is closed; afterwards parent and child open one of their own.
"""

from __future__ import annotations

import os
from weakref import WeakSet

from dibs._typing import TYPE_CHECKING
from dibs.clock import RealClock
from dibs.store import StoreBusy

if TYPE_CHECKING:
    from dibs.stores.sqlite_file import SQLiteFile


class Forks:
    """Every file that this process has open, told before it forks and afterwards on both sides."""

    def __init__(self) -> None:
        #: Held from before a fork until after it, so that no file is opened in between.
        self._forking = RealClock.mutex()
        self._files: WeakSet[SQLiteFile] = WeakSet()
        self._told: list[SQLiteFile] = []
        self._registered = False

    def add(self, file: SQLiteFile) -> None:
        if file in self._files:
            return
        with self._forking:
            self._files.add(file)
            if not self._registered:
                self._registered = True
                os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._after)

    def others(self, file: SQLiteFile) -> list[SQLiteFile]:
        """The other files; StoreBusy during a fork, which waits for who asks."""
        if not self._forking.acquire(blocking=False):
            raise StoreBusy("this process is about to fork")
        try:
            return [other for other in self._files if other is not file]
        finally:
            self._forking.release()

    def _before(self) -> None:
        self._forking.acquire()
        self._told = list(self._files)
        for file in self._told:
            file.before_fork()

    def _after(self) -> None:
        told, self._told = self._told, []
        for file in told:
            file.after_fork()
        self._forking.release()


# A process forks as a whole, so what must be told of it is known to the module as a whole.
FORKS = Forks()
