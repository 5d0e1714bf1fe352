"""A store that is too busy to take a call: how soon to ask again, and what to tell who has waited for long enough.

That is SQLite while another process is writing. It serves nobody in turn: whoever tries when the file is free is next.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, TypeVar
from dibs.errors import StoreUnavailable
from dibs.store import StoreBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Clock

T = TypeVar("T")

# Pauses before a call is repeated. They double after so many tries in vain, up to the longest: where dozens of them
# write, trying would keep the processors from the process that does. (Doubled sooner, they would favour whoever has
# just written over those who wait.)
BUSY_PAUSE_MIN_S = 0.0005
BUSY_PAUSE_MAX_S = 0.004
BUSY_TRIES = 8


def pause_s(tries: int) -> float:
    """How long to pause after so many tries in vain before this one."""
    return min(BUSY_PAUSE_MAX_S, BUSY_PAUSE_MIN_S * float(2 ** min(tries // BUSY_TRIES, 16)))


def patiently(
    call: Callable[[], T],
    clock: Clock,
    until: float,
    awaited: Callable[[], bool],
    in_vain: Callable[[StoreBusy], None],
) -> T:
    """What the call returns, as soon as the store takes it; tried each millisecond at least, as it is somebody's lease.

    Raises StoreBusy when it has not by then, or its end is awaited; and at once where only a single row is locked,
    which may last. ``in_vain`` is called after the first try that was.
    """
    tries = 0
    while True:
        try:
            return call()
        except StoreBusy as error:
            pause = pause_s(min(tries, BUSY_TRIES)) * (0.5 + clock.jitter())
            if type(error) is not StoreBusy or clock.now() + pause >= until or awaited():
                raise
            if not tries:
                in_vain(error)
        clock.sleep(pause)
        tries += 1


def stayed_busy(error: Exception) -> StoreUnavailable:
    """What is told when no later attempt got through either."""
    return StoreUnavailable(
        f"the store stayed too busy ({error}): others ask too much of it, or somebody's transaction locks it",
        maybe_applied=isinstance(error, StoreBusy) and error.maybe_applied,
    )
