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
        #: What threads and tasks hold.
        self.owned: dict[object, dict[Hold, None]] = {}

    def add(self, hold: Hold) -> None:
        if not hold.terms.permits:
            self.held[hold.key] = hold
        owned = self.owned.get(hold.owner)
        if owned is None:
            self.owned[hold.owner] = {hold: None}
        else:
            owned[hold] = None

    def remove(self, hold: Hold) -> None:
        """Forget a hold; one that is not here does no harm."""
        key, owner = hold.key, hold.owner
        if not hold.terms.permits and self.held.get(key) is hold:
            del self.held[key]
        owned = self.owned.get(owner)
        if owned is not None:
            owned.pop(hold, None)
            if not owned:
                del self.owned[owner]
