"""Planted bugs in work that is done once, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.steps
import dibs.stores.memory
from dibs.lock import LockCore
from dibs.once import OnceCore
from tests.simulation.bugs import Bug, Edit, Value

_ONCE = ("once",)

ONCE_BUGS = (
    Bug(
        "a run marked that has failed",
        _ONCE,
        60,
        (Edit(OnceCore, "end", "if failed:", "if False:"),),
    ),
    Bug(
        "a look that knows of no time limit",
        ("P11",),
        600,
        (
            Edit(OnceCore, "begin", "self._lock.look(session.time_left(until))", "self._lock.look()"),
            Edit(LockCore, "_look_on", "session.time_left(until)", "None"),
        ),
    ),
    Bug(
        "a look each second, however short the wait",
        ("P12",),
        400,
        (Value(dibs.steps, "LOOK_MIN_S", 1.0),),
    ),
    Bug(
        "an answer to the mark that was lost taken for a yes",
        _ONCE,
        200,
        (Edit(OnceCore, "end", "if not told:", "if False:"),),
    ),
    Bug(
        "a mark that is kept for half of its time",
        _ONCE,
        20,
        (Edit(dibs.stores.memory, "_act", "now + request.keep", "now + request.keep / 2"),),
    ),
)
