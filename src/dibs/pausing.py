"""What operators do to stop new grants for a while: pause, resume, and list the pauses.

A pause is written as a lease that nobody has: granted, and in the same call released with *keep*. So it is durable, is
shown with its note, belongs to no process, and ends by itself; a pause that is forgotten cannot stop a fleet for ever.
Pausing again writes the new one before it takes away the old, so that there is no moment between them. How clients
obey is in ``dibs.pauses``.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import InvalidOption, StoreUnavailable, Unsupported
from dibs.names import check_info, check_name, check_seconds, people_call, plain
from dibs.pauses import PAUSES_FRESH_S, note_of
from dibs.store import ANY_SLOT, PERMITS_MAX, Acquire, Granted, Release
from dibs.trust import DRIFT

if TYPE_CHECKING:
    from datetime import datetime

    from dibs.clock import Deadline
    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.pauses import Pauses
    from dibs.steps import Steps
    from dibs.store import Store, StoredLease

PAUSE_DEFAULT_S = 3600.0
# For so long after a pause was written somebody may send a request by an older list: their clocks may be slow, and
# 0.1 s is for whoever looks at its list and is kept from sending for a moment.
SETTLE_S = PAUSES_FRESH_S * (1 + DRIFT) + 0.1
# A shorter one would be over when it is in force everywhere, or a moment later.
PAUSE_MIN_S = 2.0
assert PAUSE_MIN_S > SETTLE_S


class Pause(NamedTuple):
    """A pause in force: no new grants of ``name``, or of all names that begin with what stands before its ``*``.

    ``note`` is why, ``by`` who said so. It ends by itself at ``until``, ``expires_in`` seconds after the store was
    asked; times are the store's.
    """

    name: str
    note: str | None
    by: str
    since: datetime
    until: datetime
    expires_in: float

    def covers(self, name: str) -> bool:
        """Whether ``name`` is paused by it."""
        return name.startswith(self.name[:-1]) if self.name.endswith("*") else name == self.name

    def __str__(self) -> str:
        why = f": {plain(self.note)}" if self.note else ""
        return (
            f"{self.name!r} is paused by {plain(self.by)} since {self.since.astimezone():%Y-%m-%d %H:%M:%S}, "
            f"until {self.until.astimezone():%Y-%m-%d %H:%M:%S} at the latest{why}"
        )


def pausing(desk: Desk, name: str, note: str | None, ttl: Seconds | None, by: str | None) -> Steps[Pause]:
    pauses = _pauses(desk)
    limits = desk.address.capabilities
    least, most = max(PAUSE_MIN_S, limits.ttl_min_s), limits.ttl_max_s
    ttl = min(PAUSE_DEFAULT_S, most) if ttl is None else ttl
    ttl_s = check_seconds("the ttl of a pause", ttl, least=least, most=most)
    for what, value in (("note", note), ("by", by)):
        if value is not None and not isinstance(value, str):
            raise InvalidOption(f"{what} is a str, not {value!r}")
    try:
        info = check_info({"name": check_name(name), "note": note, "by": by or _who()})
    except InvalidOption as error:
        raise InvalidOption(f"the note cannot be kept: {error}") from None
    session = desk.session()
    claim_id = f"{session.client_id}-pause-{os.urandom(4).hex()}"
    key = pauses.key if pauses.permits else f"{pauses.key}/{os.urandom(8).hex()}"
    acquire = Acquire(key, claim_id, ttl_s, session.holder, info, permits=PERMITS_MAX if pauses.permits else 0)
    keep = Release(key, claim_id, ANY_SLOT if pauses.permits else 1, None, ttl_s, info)

    def act(store: Store, deadline: Deadline) -> StoredLease | None:
        granted = store.act([acquire, keep], deadline)[0]
        rows = [row for row in _rows(pauses, store, deadline) if note_of(row).get("name") == name]
        # Only what came before this one goes: of several operators at the same moment, the last one's pause stays.
        last = granted.fencing_token if type(granted) is Granted else max((r.fencing_token for r in rows), default=0)
        for row in rows:
            if row.fencing_token < last:
                store.break_lease(row.name, row.fencing_token, True, deadline)
        return rows[-1] if rows else None

    row = yield from desk._acting(act)
    if row is None:
        raise StoreUnavailable(f"{name!r} is not paused: the store did not keep what it was told")
    pauses.stale_at = float("-inf")
    if (yield session, session.pause(), SETTLE_S):
        raise StoreUnavailable(f"this dibs client is closed; {name!r} is paused, and all know of it in {SETTLE_S:g} s")
    return _pause(row)


def resuming(desk: Desk, name: str) -> Steps[bool]:
    pauses = _pauses(desk)
    check_name(name)

    def act(store: Store, deadline: Deadline) -> bool:
        rows = [row for row in _rows(pauses, store, deadline) if note_of(row).get("name") == name]
        return sum(store.break_lease(row.name, row.fencing_token, True, deadline) for row in rows) > 0

    ended = yield from desk._acting(act)
    pauses.stale_at = float("-inf")
    return ended


def listing(desk: Desk) -> Steps[list[Pause]]:
    pauses = _pauses(desk)
    rows = yield from desk._acting(lambda store, deadline: _rows(pauses, store, deadline))
    # Of one name there are two for the moment in which one takes the place of the other.
    latest = {pause.name: pause for pause in map(_pause, rows)}
    return sorted(latest.values())


def _pauses(desk: Desk) -> Pauses:
    limits = desk.address.capabilities
    if not limits.pause:
        raise Unsupported(
            f"{limits.store} cannot pause names: it keeps nothing for hours, or cannot list what it keeps"
        )
    pauses = desk.session().pauses
    assert pauses is not None
    return pauses


def _rows(pauses: Pauses, store: Store, deadline: Deadline) -> list[StoredLease]:
    """The pauses, the oldest first."""
    return sorted(store.leases(pauses.key, pauses.before, deadline), key=lambda row: row.fencing_token)


def _pause(row: StoredLease) -> Pause:
    from datetime import datetime, timezone

    note = note_of(row)
    since, until = (datetime.fromtimestamp(when, timezone.utc) for when in (row.acquired_at, row.expires_at))
    by = note.get("by") or people_call(row.holder)
    return Pause(str(note.get("name", "")), note.get("note"), by, since, until, row.expires_in)


def _who() -> str:
    """The user of this process as operators know it: user@host."""
    import pwd

    host = os.uname().nodename
    try:
        return f"{os.environ.get('SUDO_USER') or pwd.getpwuid(os.getuid()).pw_name}@{host}"
    except KeyError:  # a user without a name, as in some containers
        return f"uid {os.getuid()}@{host}"
