"""Planted bugs that only a switch of threads between two instructions brings to light, as in ``bugs``.

Of 1,500 worlds without such switches they break none or two: nobody else goes on where they leave something open.
"""

from __future__ import annotations

from dibs.keeper import Keeper
from dibs.lane import Lane
from dibs.session import Session
from tests.simulation.bugs import Bug, Edit

SWITCH_BUGS = (
    Bug(
        "a lane that two threads come to serve at once",
        ("a connection of",),
        330,
        (
            Edit(
                Lane,
                "drive",
                "with self._mutex:\n            if self._server is not None:",
                "if True:\n            if self._server is not None:",
            ),
        ),
    ),
    Bug(
        "a lane's thread that is woken by two at once",
        ("liveness", "a connection of", "P"),
        360,
        (Edit(Lane, "_summon", "with self._mutex:", "if True:"),),
    ),
    Bug(
        "a line that is left while others look at it",
        ("the thread", "liveness", "P"),
        360,
        (Edit(Session, "_withdraw", "with self.mutex:", "if True:"),),
    ),
    Bug(
        "a hold that is renewed while it is released",
        ("the thread", "liveness", "P"),
        120,
        (Edit(Keeper, "release", "with self._mutex:\n            now =", "if True:\n            now ="),),
    ),
)
