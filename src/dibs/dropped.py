"""A lease, or a claim on jobs, that its program drops while it is held: it is renewed no more, and its ttl frees it.

The hold keeps a ``Watch`` of what was made of it until it ends. A ``__del__`` would run at the end of every one, and a
Ctrl-C that comes just as one begins is shown and forgotten by Python: in a loop of short leases it was one in fifty.
"""

from __future__ import annotations

import os
from weakref import ref

from dibs._typing import TYPE_CHECKING
from dibs.hold import HELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.hold import Hold
    from dibs.session import Session


class Watch(ref[object]):
    """Calls ``told`` or ``quietly`` with itself when what it was made for is collected as garbage."""

    __slots__ = ("hold", "session")

    hold: Hold
    session: Session


def watch(made: object, hold: Hold, session: Session, dropped: Callable[[Watch], None]) -> None:
    """Have ``told`` or ``quietly`` called when what was made of the hold is collected, from now on.

    To be called once that is kept somewhere: a Ctrl-C that comes as it is made drops it, and whoever was about to keep
    it gives the hold back. Nobody has dropped a lease then.
    """
    hold.watch = it = Watch(made, dropped)
    it.hold = hold
    it.session = session


def quietly(watch: Watch) -> None:
    # Runs anywhere, also while the library holds its own mutex: it marks, and the renewer reads the mark.
    hold = watch.hold
    hold.watch = None
    if hold.state == HELD and watch.session.pid == os.getpid():
        hold.orphan = True


def told(watch: Watch) -> None:
    quietly(watch)
    hold, session = watch.hold, watch.session
    # (One that has just run out, and is not marked as lost yet, was not dropped too early.)
    if hold.orphan and not session.closed and session.clock.now() < hold.trusted_until:
        import warnings

        warnings.warn(
            f"a lease on {hold.key.partition(':')[2]!r} was dropped without release(); it ends by its ttl",
            ResourceWarning,
            source=watch,  # made with the lease
            stacklevel=1,
        )
