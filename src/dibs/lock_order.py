"""In which order the callers of one client take names, so that two orders of two names are told before they deadlock.

Whoever holds one name and waits for another leaves the pair here. When the pair is there the other way round, both
orders are in the program, and ``LockOrderWarning`` is raised as a warning, once for the two names. Nothing is sent, and
nobody waits: it tells of a deadlock that can happen, also when it never did.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from itertools import islice

from dibs._typing import TYPE_CHECKING
from dibs.errors import LockOrderWarning
from dibs.hold import HELD

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from dibs.hold import Hold

# Pairs of names that are remembered; then the oldest are forgotten.
PAIRS_MAX = 10_000
# Of what a caller holds, so many names are paired with the one it takes: those it has held for longest.
HELD_MAX = 16


class LockOrder:
    def __init__(self, mutex: AbstractContextManager[object]) -> None:
        self._mutex = mutex
        #: Held and taken, in this order; where in the code that was first.
        self._pairs: OrderedDict[tuple[str, str], str] = OrderedDict()

    def taking(self, keys: Sequence[str], held: Collection[Hold]) -> None:
        """Somebody who holds these is about to wait for names. Warns, or raises where warnings are errors."""
        # A copy, made under the mutex, as another thread may release one of them meanwhile.
        with self._mutex:
            first = list(islice(held, HELD_MAX))
        # What was lost or dropped is in nobody's hands.
        mine = [hold.key for hold in first if hold.state == HELD and not hold.orphan]
        for key in keys:
            self._pair(mine, key)

    def _pair(self, mine: list[str], key: str) -> None:
        pairs = self._pairs
        new = [other for other in mine if (other, key) not in pairs and other != key]
        if not new:
            return
        level, place = _caller()
        crossed: list[tuple[str, str]] = []
        with self._mutex:
            for other in new:
                if (other, key) in pairs:
                    continue
                if len(pairs) >= PAIRS_MAX:
                    pairs.popitem(last=False)
                pairs[other, key] = place
                before = pairs.get((key, other))
                if before is None:
                    continue
                crossed.append((other, before))
        for other, before in crossed:
            had, wanted = _name(other), _name(key)
            warnings.warn(
                f"{wanted!r} is taken here while {had!r} is held, and at {before} it was the other way round: callers "
                "who do so at the same time wait for each other. Take them in one order everywhere, or together with "
                "multilock()",
                LockOrderWarning,
                stacklevel=level,
            )


def _caller() -> tuple[int, str]:
    """Where in the caller's program this is, as ``warnings.warn`` in ``_pair`` counts frames."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None:
        frame = frame.f_back
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] != "dibs":
            break
    return level, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _name(key: str) -> str:
    return key.partition(":")[2]
