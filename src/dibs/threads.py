"""The threads that dibs keeps for itself: each sleeps on a bell, and both are made here, or neither.

A process can be out of threads or file descriptors for a while. What would have needed one then is refused to whoever
asked for it, and goes again as soon as there are some: so a thread of dibs never ends by an error, and no bell is left
that would be rung in vain.
"""

from __future__ import annotations

import os
from _thread import get_ident, start_new_thread
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Protocol
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dibs.clock import Bell, Clock


def begin(clock: Clock, name: str, run: Callable[[Bell], None]) -> Bell:
    """Begin a thread; the bell that it sleeps on, which ``run`` is given. StoreUnavailable when there can be none."""
    try:
        bell = clock.bell()
        try:
            clock.spawn(name, lambda: _own(run, bell))
        except RuntimeError:  # it was not begun. (After a Ctrl-C it may have been: the bell is its own to close then.)
            bell.close()
            raise
    except (OSError, RuntimeError) as error:
        raise StoreUnavailable(f"this process cannot have the thread that dibs needs: {error}") from error
    return bell


#: The threads that were begun here and have not ended.
_OWN: set[int] = set()
#: Those of callers that serve a lane, of whichever client, by an object of each such call.
SERVING: dict[object, int] = {}
# A forked child has one thread, and may give the numbers of the others to its own.
os.register_at_fork(after_in_child=_OWN.clear)
os.register_at_fork(after_in_child=SERVING.clear)


def _own(run: Callable[[Bell], None], bell: Bell) -> None:
    me = get_ident()
    _OWN.add(me)
    try:
        run(bell)
    finally:
        _OWN.discard(me)


def is_own() -> bool:
    """Whether this thread is one of those that dibs keeps for itself, or in the midst of work like theirs."""
    me = get_ident()
    return me in _OWN or me in list(SERVING.values())


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
