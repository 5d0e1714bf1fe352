"""Planted bugs in what threads share, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

from dibs.ask import Ask
from dibs.grips import Gripped
from dibs.keeper import Keeper
from dibs.lease import LeaseFacts
from tests.simulation.bugs import Bug, Edit

SHARED_BUGS = (
    Bug(
        "a block that ends another thread's",
        ("P",),
        300,
        (Edit(Gripped, "block_of", "if grip.blocks and grip.owner == owner:", "if grip.blocks:"),),
    ),
    Bug(
        "a reentrant lock that another thread enters",
        ("P", "the thread"),
        110,
        (Edit(Gripped, "_held_by", "if grip.owner == owner and grip.lease.held", "if grip.lease.held"),),
    ),
)
SHARED_JOB_BUGS = (
    Bug(
        "an answer of which one thread alone is told",
        ("liveness",),
        160,
        (Edit(Ask, "echo", "echo = Ask(self.request, self.give_up_at)", "return self"),),
    ),
)
SHARED_CLAIM_BUGS = (
    Bug(
        "an item of which it is noted late how it has ended",
        ("batch",),
        400,
        (
            Edit(Keeper, "release", "hold.finish, hold.first = finish, finish.first", "hold.first = finish.first"),
            Edit(
                LeaseFacts,
                "_end",
                "release(self._hold, finish)",
                "release(self._hold, finish); self._hold.finish = finish",
            ),
        ),
    ),
)
