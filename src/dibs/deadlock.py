"""Which waiters can never proceed: a pure reading of who waits for what, and who holds it.

A waiter is *stuck* if what it waits for could not be had even when everybody who is not stuck had given back all they
hold: of a lock, if its holder is stuck; of a pool of permits, if those that the stuck hold leave fewer than it takes.
So the stuck are what is left after everybody who can proceed has, and has given back, in whatever order (the greatest
fixpoint). Some of them are in a *ring*: each waits, through others, for each. The rest wait behind one, and go on when
it is broken.

Standing in line behind another waiter is not being stuck here, since lines move by themselves.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import PERMITS_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dibs.note import Note

    # Of each name, the fencing tokens of the leases in force, and how many permits each has taken.
    Leases = Mapping[str, Mapping[int, int]]


def as_said(notes: Iterable[Note]) -> dict[str, dict[int, int]]:
    """The leases that notes speak of, each as if it had taken all permits: enough to know which are worth a look."""
    leases: dict[str, dict[int, int]] = {}
    for note in notes:
        for name, token in note.holds:
            leases.setdefault(name, {})[token] = PERMITS_MAX
    return leases


def stuck(notes: Collection[Note], leases: Leases) -> dict[str, set[str]]:
    """The stuck, by id: for each the others (or itself) whose holds are in its way."""
    # A waiter may have two notes for a moment, when it was not told whether the earlier one was kept: the later counts.
    whose: dict[tuple[str, int], str] = {}
    waiters_of: dict[str, list[str]] = {}
    for note in sorted(notes, key=age):
        for lease in note.holds:
            whose[lease] = note.id
        waiters_of.setdefault(note.waits, []).append(note.id)
    left = {note.id: note for note in notes}
    doubted = list(left)
    while doubted:
        note_id = doubted.pop()
        if note_id not in left:
            continue
        note = left[note_id]
        held = sum(take for token, take in leases.get(note.waits, {}).items() if whose.get((note.waits, token)) in left)
        if max(note.permits, 1) - held >= note.take:
            del left[note_id]
            for name, _ in note.holds:
                doubted += waiters_of.get(name, ())
    return {
        note.id: {
            other
            for token in leases.get(note.waits, {})
            if (other := whose.get((note.waits, token))) is not None and other in left
        }
        for note in left.values()
    }


def ring_of(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    """All who wait for each other with ``start``; empty when it is stuck only behind others, or not at all."""
    if start not in graph:
        return set()
    ahead = _reached(graph, start)
    behind: dict[str, list[str]] = {}
    for waiter in ahead:
        for other in graph[waiter]:
            behind.setdefault(other, []).append(waiter)
    # Whoever is reached and does not lead back waits for nobody here: its own ring must be broken first.
    return ahead if start in behind and _reached(behind, start) == ahead else set()


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    """The start, and all that can be reached from it."""
    found = {start}
    open_ = [start]
    while open_:
        for other in graph.get(open_.pop(), ()):
            if other not in found:
                found.add(other)
                open_.append(other)
    return found


def reached(graph: Mapping[str, Collection[str]], starts: Iterable[str]) -> set[str]:
    """Everybody on whom these wait, and they themselves."""
    found: set[str] = set()
    for start in starts:
        if start in graph and start not in found:
            found |= _reached(graph, start)
    return found


def age(note: Note) -> tuple[float, str, int]:
    """What orders notes from the oldest waiter to the youngest, the same for everybody who looks."""
    return (float("inf") if note.since is None else note.since, note.id, note.beat)


def in_turn(ring: Sequence[Note], graph: Mapping[str, Collection[str]]) -> list[Note]:
    """The ring from its youngest on, each followed by one it waits for where that is not told yet."""
    by_id = {note.id: note for note in ring}
    told: list[Note] = []
    for start in sorted(ring, key=age, reverse=True):
        note: Note | None = start
        while note is not None and note not in told:
            told.append(note)
            others = sorted((by_id[other] for other in graph[note.id] if other in by_id), key=age, reverse=True)
            note = next((other for other in others if other not in told), None)
    return told
