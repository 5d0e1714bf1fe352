"""Which run each thread or task is inside, so that the end of a ``with once:`` block finds the one that it is about."""

from __future__ import annotations

from weakref import ref

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.errors import NotHeld
from dibs.owners import sentinel

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


class Blocks(Generic[R]):
    """The runs of one once that have been entered. A run is true when the work is its block's to do."""

    __slots__ = ("_alive", "_name", "_runs")

    def __init__(self, name: str) -> None:
        self._name = name
        #: Of each thread or task, the innermost last.
        self._runs: dict[object, list[R]] = {}
        #: Of those of them that can be garbage while their blocks are left for that reason.
        self._alive: dict[object, Callable[[], object]] = {}

    def enter(self, owner: object, run: R) -> None:
        if isinstance(owner, ref) and owner not in self._alive:
            self._alive[owner] = sentinel(owner)
        self._runs.setdefault(owner, []).append(run)

    def innermost(self, owner: object) -> R | None:
        """The run that this owner entered last and has not left."""
        runs = self._runs.get(owner)
        return runs[-1] if runs else None

    def of_the_gone(self) -> Any:
        """An owner that has ended inside; None without any."""
        return next((owner for owner, alive in list(self._alive.items()) if alive() is None), None)

    def leave(self, owner: object) -> R:
        """The run whose block ends.

        It may have been entered by another thread or task, as frameworks do it. Which of several ends then cannot be
        told, and a run that goes on must not be marked as done: NotHeld.
        """
        if owner not in self._runs:
            others = list(self._runs)
            if not others:
                raise NotHeld(f"nobody is in a block of {self._name!r}")
            if len(others) > 1 and any(any(runs) for runs in list(self._runs.values())):
                raise NotHeld(
                    f"a block of {self._name!r} ends that was entered by one of {len(others)} other threads or tasks: "
                    "enter what begin() returns, which is a run of its own, instead of the once that they share"
                )
            owner = others[-1]
        runs = self._runs[owner]
        run = runs.pop()
        if not runs:
            del self._runs[owner]
            self._alive.pop(owner, None)
        return run
