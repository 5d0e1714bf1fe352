"""Pauses as a client obeys them: which names it asks nobody for, because an operator has stopped new grants.

A pause is no state of a name but a note that lies beside all names of a namespace, under ``namespace~paused``, where no
name of a user can be ('~' is in no namespace). Clients read these notes, and none asks the store for a name with a list
that is older than ``PAUSES_FRESH_S``, however long it was stopped meanwhile. So a pause is in force everywhere after
that time and the time of the requests under way; whoever holds already is left alone, and renews and releases as ever.

The price is one read a second for a client that is at work, and none for each acquire. (A condition in every store's
grant would be in force at once, and would be paid for by every grant of everybody.) What operators do is in
``dibs.pausing``.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.names import info_in, people_call, plain
from dibs.store import ROW_MARK, Held

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.ask import Ask
    from dibs.clock import Clock, Deadline
    from dibs.store import Store, StoredLease

# A first request for a name is sent only with a list of pauses that was read within this time.
PAUSES_FRESH_S = 1.0
# A request is refused only by a list of pauses that was read within this time: so a resume is soon noticed.
PAUSED_FRESH_S = 0.3
assert PAUSED_FRESH_S <= PAUSES_FRESH_S
# What the name of a queue begins with in a pause.
QUEUE = "queue/"
# A waiter that was told of a pause asks again after this, or after its poll if that is sooner.
ASK_AGAIN_S = 1.0


class Pauses:
    """What one client knows of the pauses of its namespace. Used by whoever serves its claim lane, and nobody else."""

    def __init__(self, namespace: str, *, permits: bool) -> None:
        #: Where they are kept: the slots of one name, or (where names have no permits) names that begin so.
        self.key = f"{namespace}~paused"
        self._users = f"{namespace}:"
        self._queues = f"{namespace}~queue:"
        self.before = self.key + ("\x01" if permits else "\U0010ffff")
        self.permits = permits
        #: When the list is too old to send a first request by it (to refuse one by it, if there are pauses).
        self.stale_at = float("-inf")
        #: There were pauses when it was read.
        self.some = False
        self._names: dict[str, Held] = {}
        self._prefixes: list[tuple[str, Held]] = []
        #: Which names somebody was told of that waits for them; see ``news``.
        self._told: set[tuple[str, str | None]] = set()

    def refusals(
        self, batch: list[Ask], opened: Callable[[], Store], deadline: Deadline, clock: Clock, now: float
    ) -> dict[Ask, Held]:
        """The answers to those of a batch who are not to be sent, by a list that is fresh at ``now``.

        What may have been granted already (its ``t0`` is set) is sent in any case: only so its outcome is known. What
        reading the list raises is raised.
        """
        first = [ask for ask in batch if ask.is_new()]
        if not first:
            return {}
        if now >= self.stale_at:
            self.look(opened(), deadline, now)
            now, began = clock.now(), now
            if now - began >= PAUSES_FRESH_S:  # this process was stopped meanwhile, or the store is slow
                self.look(opened(), deadline, now)
        if not self.some:
            return {}
        answers = ((ask, self.refusal(ask.request.name)) for ask in first)
        return {ask: held for ask, held in answers if held is not None}

    def look(self, store: Store, deadline: Deadline, now: float) -> None:
        """Read the list anew. ``now`` was read before."""
        rows = store.leases(self.key, self.before, deadline)
        names: dict[str, Held] = {}
        prefixes: list[tuple[str, Held]] = []
        for row in sorted(rows, key=lambda row: row.fencing_token):  # of one name the last counts
            name, told = told_by(row)
            held = Held(None, row.fencing_token, row.acquired_at, ASK_AGAIN_S, paused=told)
            if name.endswith("*"):
                prefixes.append((name[:-1], held))
            else:
                names[name] = held
        self._names, self._prefixes = names, prefixes
        self.some = bool(rows)
        if not rows:
            self._told.clear()
        self.stale_at = now + (PAUSED_FRESH_S if rows else PAUSES_FRESH_S)

    def refusal(self, key: str) -> Held | None:
        """The answer to a first request for a name (with its namespace), if that is paused."""
        if key.startswith(self._users):
            name = key[len(self._users) :].partition(ROW_MARK)[0]
        elif key.startswith(self._queues):
            name = QUEUE + key[len(self._queues) :]
        else:  # dibs's own, of which operators know nothing
            return None
        held = self._names.get(name)
        if held is None:
            held = next((held for prefix, held in self._prefixes if name.startswith(prefix)), None)
        return held

    def news(self, key: str, held: Held) -> bool:
        """Whether nobody who waits for this name was told of this pause yet."""
        known = (key, held.paused)
        if known in self._told:
            return False
        self._told.add(known)
        return True


def note_of(row: StoredLease) -> dict[str, Any]:
    """What stands in a pause: the name or prefix*, who paused it, and why."""
    return info_in(row.info) or {}


def told_by(row: StoredLease) -> tuple[str, str]:
    """The name or prefix* of a pause, and what whoever wants it is told."""
    from datetime import datetime

    note = note_of(row)
    since, until = (datetime.fromtimestamp(when).astimezone() for when in (row.acquired_at, row.expires_at))
    text = f"is paused by {plain(note.get('by') or people_call(row.holder))} since {since:%Y-%m-%d %H:%M:%S %Z}"
    text += f", until {until:%Y-%m-%d %H:%M:%S %Z} at the latest"
    return str(note.get("name", "")), f"{text}: {plain(note['note'])}" if note.get("note") else text
