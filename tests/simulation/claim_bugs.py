"""Planted bugs in claims, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

from dibs.batch import Ends, Item
from dibs.claiming import ClaimsCore
from dibs.keeper import Keeper
from dibs.tries import Tries
from tests.simulation.bugs import Bug, Edit

_TRIES = ("tries",)

CLAIM_BUGS = (
    Bug(
        "an item that is freed before its tally",
        _TRIES,
        34,
        (Edit(Keeper, "_end", "hold.first is not None and", "False and"),),
    ),
    Bug(
        "the try of a holder that has lost its item taken back",
        _TRIES,
        40,
        (Edit(Keeper, "_end", "hold.first is not None and hold.state == RELEASED", "hold.first is not None"),),
    ),
    Bug(
        "a try that is not counted",
        _TRIES,
        18,
        (Edit(Tries, "_go_on", "tries=before.tries + 1", "tries=before.tries"),),
    ),
    Bug(
        "one try too many",
        _TRIES,
        40,
        (Edit(Tries, "_go_on", "before.tries >= self.max_tries", "before.tries > self.max_tries"),),
    ),
    Bug(
        "an item that is to be left alone for a while and is not",
        ("retry_in",),
        50,
        (Edit(Item, "fail", "ends.release_one(self, keep, info)", "ends.release_one(self, keep / 2, info)"),),
    ),
    Bug(
        "what was won and is not wanted kept",
        ("P9",),
        1200,
        (Edit(ClaimsCore, "taking", "ends.release(*won)", "pass"),),
    ),
    Bug(
        "a loss that the last answer tells, and nobody hears",
        ("batch",),
        60,
        (Edit(Ends, "settling", "self.lost[key] = value", "pass"),),
    ),
)
