"""The threads that dibs keeps for itself: each sleeps on a bell, and both are made here, or neither.

A process can be out of threads or file descriptors for a while. What would have needed one then is refused to whoever
asked for it, and goes again as soon as there are some: so a thread of dibs never ends by an error, and no bell is left
that would be rung in vain.
"""

from __future__ import annotations

import os
import sys
from _thread import start_new_thread
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Protocol
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import FrameType

    from dibs.clock import Bell, Clock


def begin(clock: Clock, name: str, run: Callable[[Bell], None], *, waits: bool = False) -> Bell:
    """Begin a thread; the bell that it sleeps on, which ``run`` is given. StoreUnavailable when there can be none.

    waits: it waits for the lane itself, which nothing keeps waiting for it.
    """
    try:
        bell = clock.bell()
        try:
            clock.spawn(name, lambda: run(bell) if waits else _own(clock.thread(), run, bell))
        except RuntimeError:  # it was not begun. (After a Ctrl-C it may have been: the bell is its own to close then.)
            bell.close()
            raise
    except (OSError, RuntimeError) as error:
        raise StoreUnavailable(f"this process cannot have the thread that dibs needs: {error}") from error
    return bell


# Said to who would wait for this very thread.
IN_THE_MIDST = (
    "a signal handler, a __del__ or a callback has interrupted this thread in the midst of dibs's own work, and would "
    "wait for it here: set a flag there, and do this where the program looks at it"
)
#: The threads that others wait for: those that were begun here, while they live, and callers that serve a lane, of
#: whichever client. By their numbers, each with what has put it there.
BUSY: dict[int, object] = {}
# A forked child has one thread, and may give the numbers of the others to its own.
os.register_at_fork(after_in_child=BUSY.clear)


def _own(me: int, run: Callable[[Bell], None], bell: Bell) -> None:
    BUSY[me] = bell
    try:
        run(bell)
    finally:
        BUSY.pop(me, None)


def is_nested() -> bool:
    """Whether code of dibs's is among what has called the code that calls dibs now, as a signal handler's may be."""
    frame: FrameType | None = sys._getframe(1)
    inside = True
    while frame is not None:
        ours = frame.f_globals.get("__name__", "").startswith("dibs.")
        if ours and not inside:
            return True
        inside = inside and ours
        frame = frame.f_back
    return False


def unattended(act: Callable[[], object]) -> None:
    """Do it in a thread of its own, without waiting for anything at all; not at all where there can be none.

    For what the garbage collector closes: it comes in the middle of anything, also of the beginning of a thread.
    """

    def quietly() -> None:
        with suppress(Exception):
            act()

    with suppress(RuntimeError):
        start_new_thread(quietly, ())


class _Sleeper(Protocol):
    _bell: Bell | None

    @property
    def _mutex(self) -> AbstractContextManager[object]: ...


def is_known(sleeper: _Sleeper, bell: Bell) -> bool:
    """Whether this thread is the one that is woken: asked by it before it does anything. If not, its bell is closed.

    A Ctrl-C may have come between its beginning and the noting of its bell. Then it notes that itself; or another was
    begun in its place meanwhile, and it has to go.
    """
    with sleeper._mutex:
        if sleeper._bell is None:
            sleeper._bell = bell
        known = sleeper._bell is bell
    if not known:
        bell.close()
    return known


def aside(clock: Clock, name: str, run: Callable[[], object]) -> None:
    """Call it in a thread of its own, so that nobody waits for it; in this one where there can be no other."""
    try:
        clock.spawn(name, run)  # type: ignore[arg-type]
    except RuntimeError:
        run()
