"""Holdings: who in this process holds what, as far as this process knows.

It answers for finding a hold, by its name and by its owner. What a hold is worth (``Keeper.is_held``), and when one is
added or removed, is the session's business, under whose mutex all of it changes. Looking needs no mutex.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dibs.hold import Hold


class Holdings:
    def __init__(self) -> None:
        #: Who in this process holds a name. (A name with permits many may hold at a time: these are only below.)
        self.held: dict[str, Hold] = {}
        #: What threads and tasks hold, and how many permits each of these is counted for in ``shares``.
        self.owned: dict[object, dict[Hold, int]] = {}
        #: How many permits of a name an owner has, without looking at each: seldom more than it has, and never fewer.
        self.shares: dict[tuple[object, str], int] = {}

    def add(self, hold: Hold) -> None:
        key, owner, permits = hold.key, hold.owner, 0
        if not hold.terms.permits:
            self.held[key] = hold
        else:  # before the hold is there, and no more when it is gone: after a Ctrl-C in between they are too many
            permits = hold.terms.take
            self.shares[owner, key] = self.shares.get((owner, key), 0) + permits
        owned = self.owned.get(owner)
        if owned is None:
            self.owned[owner] = {hold: permits}
        else:
            owned[hold] = permits

    def remove(self, hold: Hold) -> None:
        """Forget a hold; one that is not here does no harm."""
        key, owner = hold.key, hold.owner
        if not hold.terms.permits and self.held.get(key) is hold:
            del self.held[key]
        owned = self.owned.get(owner)
        if owned is not None:
            permits = owned.pop(hold, 0)
            if not owned:
                del self.owned[owner]
            if permits:
                left = self.shares.pop((owner, key), 0) - permits
                if left > 0:
                    self.shares[owner, key] = left
