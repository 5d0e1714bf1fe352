"""Planted bugs in elections, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.campaign
import dibs.succession
from dibs.campaign import ElectionCore
from dibs.keeper import Keeper
from dibs.standby import Seats
from tests.simulation.bugs import Bug, Edit

ELECTION_BUGS = (
    Bug(
        "a campaign whose time is over before its looks and its seat know",
        ("P11",),
        1100,
        (Edit(ElectionCore, "_time_left", "self._desk.session().time_left(until)", "None"),),
    ),
    Bug(
        "a reserve whose turn is put off by every look",
        ("P7",),
        20,
        (Edit(ElectionCore, "_in_reserve", "RESERVE_STEP_S if turn_at is None else turn_at", "RESERVE_STEP_S"),),
    ),
    Bug(
        "a standby turned away that has asked for one of the seats",
        ("elections",),
        230,
        (Edit(Seats, "take", "for core in self._cores:", "for core in self._cores[:1]:"),),
    ),
    Bug(
        "an offer that anybody takes up",
        ("elections",),
        20,
        (Edit(dibs.campaign, "offered", 'not same(offer.get("to"), value)', "False"),),
    ),
    Bug(
        "an offer made while the leader trusts its term",
        ("P5", "P1", "P10"),
        20,
        (Edit(Keeper, "_part_with", "hold.state = RELEASED", "pass"),),
    ),
    Bug(
        "an offer that is not withdrawn",
        ("P9", "P7"),
        20,
        (
            Edit(
                dibs.campaign,
                "offering",
                "released = yield from _answered(session, Release(hold.key, claim))",
                "return False",
            ),
        ),
    ),
    Bug(
        "whoever takes over said to be the one that was named",
        ("elections",),
        300,
        (Edit(dibs.succession, "_leads", "info is not None and same(info.get(VALUE), to)", "info is not None"),),
    ),
)
