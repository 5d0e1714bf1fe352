"""Servers that each keep some of a store's names: one that is away concerns the names it keeps, and no others.

What is asked of the others in the same call must neither fail with it nor wait for it again and again.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.errors import StoreUnavailable
from dibs.store import PartUnavailable

if TYPE_CHECKING:
    from dibs.clock import Deadline

# The part of the time that is left which one of several servers may take, so that there is some for the others.
ONE_OF_SEVERAL = 0.4
# A server that did not answer the last time gets no more. (A new connection over a long way takes half of it.)
AWAY_S = 0.5


class Parts:
    """Which servers did not answer when they were asked last, by whichever lane; shared by all stores of an address."""

    def __init__(self) -> None:
        self._away: set[object] = set()
        #: One of them has answered at some time.
        self.worked = False

    def is_away(self, part: object) -> bool:
        return part in self._away

    def limit(self, part: object, deadline: Deadline) -> Deadline:
        """Until when this server may take to answer."""
        return deadline.within(AWAY_S) if part in self._away else deadline

    def limit_of_several(self, part: object, deadline: Deadline) -> Deadline:
        """The same where the time is for others, too."""
        return self.limit(part, deadline.within(deadline.remaining() * ONE_OF_SEVERAL))

    def answered(self, part: object) -> None:
        self.worked = True
        self._away.discard(part)

    def did_not(self, part: object, error: StoreUnavailable) -> PartUnavailable:
        """Note that a server is away: the outcome of what it was asked."""
        self._away.add(part)
        return unavailable(error)


def unavailable(error: StoreUnavailable) -> PartUnavailable:
    """The outcome of what failed with this error by itself."""
    part = PartUnavailable(str(error), maybe_applied=error.maybe_applied)
    part.__cause__ = error.__cause__
    return part


def error_of(outcome: PartUnavailable) -> StoreUnavailable:
    """The error of a call that cannot go on without this."""
    return StoreUnavailable(str(outcome), maybe_applied=outcome.maybe_applied)
