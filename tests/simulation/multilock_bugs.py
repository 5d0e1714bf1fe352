"""Planted bugs in multilocks, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

from dibs.keeper import Keeper
from dibs.multilock import MultiCore, _Had, _Part
from tests.simulation.bugs import Bug, Edit

MULTILOCK_BUGS = (
    Bug(
        "what was had is kept while the rest is waited for",
        ("multilock", "liveness"),
        60,
        (Edit(MultiCore, "acquire", "self._drop_all(had.values())", "pass"),),
    ),
    Bug(
        "a name told to be lost before all are there",
        ("loss is loud",),
        250,
        (Edit(_Had, "__init__", "self._name = name", "self._name = name; hold.given = True"),),
    ),
    Bug(
        "what is over given out with the rest",
        ("P5",),
        900,
        (Edit(MultiCore, "_hand_over", "if not session.give(*[each._hold for each in had.values()]):", "if False:"),),
    ),
    Bug(
        "somebody else's place in line",
        ("P13",),
        60,
        (Edit(_Part, "keep_place", "self._ask.request.ticket or self._ticket", "1"),),
    ),
    Bug(
        "only the first of several given back",
        ("P9", "multilock"),
        60,
        (Edit(MultiCore, "_drop_all", "keeper.give_back(*holds)", "keeper.give_back(holds[0])"),),
    ),
    Bug(
        "a release of several that takes them for lost",
        ("P4",),
        20,
        (Edit(Keeper, "release_all", "if hold.state != HELD or now >= hold.trusted_until:", "if True:"),),
    ),
)
