"""Planted bugs in how pauses are written and obeyed, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.pauses
import dibs.pausing
from dibs.pauses import Pauses
from tests.simulation.bugs import Bug, Edit, Value

_PAUSE = ("pause",)

PAUSE_BUGS = (
    Bug(
        "a pause that is not waited for",
        _PAUSE,
        20,
        (Edit(dibs.pausing, "pausing", "session.pause(), SETTLE_S", "session.pause(), SETTLE_S / 2"),),
    ),
    Bug(
        "a pause that is not in force when the client is closed, and told to be",
        _PAUSE,
        450,
        (
            Edit(
                dibs.pausing,
                "pausing",
                "if (yield session, session.pause(), SETTLE_S):",
                "yield session, session.pause(), SETTLE_S\n    if False:",
            ),
        ),
    ),
    Bug(
        "lists of pauses kept for twice as long",
        _PAUSE,
        60,
        (Value(dibs.pauses, "PAUSES_FRESH_S", 2.0),),
    ),
    Bug(
        "a prefix that pauses nothing",
        _PAUSE,
        35,
        (Edit(Pauses, "look", 'name.endswith("*")', "False"),),
    ),
    Bug(
        "an answer of no, for ever",
        ("P7", "liveness"),
        20,
        (Edit(Pauses, "look", "PAUSED_FRESH_S if rows", "1000 if rows"),),
    ),
)
