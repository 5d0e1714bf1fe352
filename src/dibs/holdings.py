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
        #: How many permits of which names an owner has, without looking at each: seldom more than it has, never fewer.
        self.shares: dict[object, dict[str, int]] = {}

    def add(self, hold: Hold) -> None:
        key, owner, permits = hold.key, hold.owner, 0
        if not hold.terms.permits:
            self.held[key] = hold
        else:  # before the hold is there, and no more when it is gone: after a Ctrl-C in between they are too many
            permits = hold.terms.take
            shares = self.shares.setdefault(owner, {})
            shares[key] = shares.get(key, 0) + permits
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
        permits = 0 if owned is None else owned.pop(hold, 0)
        if not owned:  # nor is there anything to count, whatever a Ctrl-C has left there
            self.shares.pop(owner, None)
            self.owned.pop(owner, None)
        elif permits:
            shares = self.shares[owner]
            shares[key] -= permits
            if shares[key] <= 0:
                del shares[key]

    def share(self, owner: object, key: str) -> int:
        """How many permits of a name this owner has at most."""
        shares = self.shares.get(owner)
        return 0 if shares is None else shares.get(key, 0)
