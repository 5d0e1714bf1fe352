"""A waiting note: what a waiter that holds something says of itself in the info of a lease, and how people read it."""

from __future__ import annotations

import json
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.names import INFO_BYTES_MAX, people_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dibs.store import StoredLease

# What a note may say of what is held, in bytes of info; the rest is for the name that is waited for.
HOLDS_BYTES_MAX = INFO_BYTES_MAX - 1500
OWNER_CHARS_MAX = 100
# So many waiters of a ring are spelled out in the error.
SHOWN_MAX = 10


class Note(NamedTuple):
    """A waiter that holds something, as it shows itself to the others."""

    #: The same for as long as it waits.
    id: str
    #: How often it has said so. A beat is said only after the one before is known to have been kept.
    beat: int
    #: When it first did, by the store's clock; None in the first beat.
    since: float | None
    #: Who it is, for people: host/pid/client, and its thread or task.
    holder: str
    by: str
    #: The name that it waits for, how many permits that has in all (0: it is a lock), and how many of them it takes.
    waits: str
    permits: int
    take: int
    #: Names that it holds, each with its fencing token.
    holds: tuple[tuple[str, int], ...]

    def info(self, names: str) -> str:
        """As it is kept. ``names`` is what stands before every name; of very many holds the first are said."""
        said: list[tuple[str, int]] = []
        room = HOLDS_BYTES_MAX
        for name, token in self.holds:
            short = name[len(names) :]
            room -= len(json.dumps(short, ensure_ascii=False).encode()) + 24
            if room < 0:
                break
            said.append((short, token))
        words = {
            "waits": self.waits[len(names) :],
            "permits": self.permits,
            "take": self.take,
            "holds": said,
            "by": self.by,
            "since": self.since,
            "beat": self.beat,
            "id": self.id,
        }
        return json.dumps(words, ensure_ascii=False, separators=(",", ":"))


def understood(rows: Iterable[StoredLease], names: str) -> list[Note]:
    """The notes that these leases are; without those that another release of dibs may have written otherwise."""
    notes = []
    for row in rows:
        try:
            words: dict[str, Any] = json.loads(row.info or "")
            note = Note(
                str(words["id"]),
                int(words["beat"]),
                None if words["since"] is None else float(words["since"]),
                row.holder,
                str(words["by"]),
                names + words["waits"],
                int(words["permits"]),
                int(words["take"]),
                tuple((names + name, int(token)) for name, token in words["holds"]),
            )
        except (ValueError, KeyError, TypeError):
            continue
        notes.append(note)
    return notes


def called(owner: object) -> str:
    """A thread or task, for people."""
    whom = owner() if isinstance(owner, ref) else owner
    get_name = getattr(whom, "get_name", None)
    return f"task {get_name()}"[:OWNER_CHARS_MAX] if callable(get_name) else f"thread {whom}"[:OWNER_CHARS_MAX]


def spelled_out(ring: Sequence[Note], names: str) -> list[str]:
    """Who of a ring holds what and waits for what, a line for each."""
    wanted = {note.waits for note in ring}
    lines = []
    for note in ring[:SHOWN_MAX]:
        held = " and ".join(f"{name[len(names) :]!r} (token {token})" for name, token in note.holds if name in wanted)
        who = people_call(note.holder).removesuffix(")")
        who = f"{who}, {note.by})" if who != note.holder else f"{who} ({note.by})"
        lines.append(f"{who} holds {held} and waits for {note.waits[len(names) :]!r}")
    if len(ring) > SHOWN_MAX:
        lines.append(f"and {len(ring) - SHOWN_MAX} more")
    return lines
