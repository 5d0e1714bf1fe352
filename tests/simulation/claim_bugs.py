"""Planted bugs in claims, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.claiming
from dibs.aio.claims import AsyncBatch, AsyncClaims
from dibs.batch import BatchFacts, Ends, Item
from dibs.claims import Batch, Claims
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
        (Edit(Item, "fail", "most=limits.ttl_max_s)", "most=limits.ttl_max_s) / 2"),),
    ),
    Bug(
        "what was won and is not wanted kept",
        ("P9",),
        1250,
        (Edit(dibs.claiming, "_give_up", "ends.release(*won)", "pass"),),
    ),
    Bug(
        "a loss that the last answer tells, and nobody hears",
        ("batch",),
        60,
        (Edit(Ends, "settling", "self.lost.add(key)", "pass"),),
    ),
    Bug(
        "what is not due any more kept",
        ("P9",),
        65,
        (Edit(BatchFacts, "_keep_due", "self._give_back(stale)", "pass"),),
    ),
    Bug(
        "a stream that stops without finishing the item at hand",
        ("batch", "tries"),
        118,
        (Edit(Claims, "_stream", "batch._finish()", "pass"),),
    ),
    Bug(
        "a stream that is closed and keeps its items",
        ("P9",),
        80,
        (Edit(Batch, "__exit__", "self._ends.session.end(", "exc_type is GeneratorExit or self._ends.session.end("),),
    ),
)
CLAIM_TASK_BUGS = (
    Bug(
        "a batch kept whose task is cancelled when it looks again",
        ("P9",),
        65,
        (Edit(AsyncClaims, "take", "await end(batch._ends.session, batch._ending(), type(error), me)", "pass"),),
    ),
    Bug(
        "a stream of tasks that gives nothing back when it is closed",
        ("P9",),
        51,
        (Edit(AsyncBatch, "__aexit__", "await end(", "exc_type is GeneratorExit or await end("),),
    ),
)
