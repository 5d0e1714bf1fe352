"""Plain requests of many names in one statement a verb, instead of one a name.

It answers for the requests that most batches consist of: acquires of newcomers, renewals and releases, each of a lock
and of a name of its own. What it does not decide, one statement a request does afterwards (``dibs.stores.sqlite``).

Python's interpreter is free while SQLite works on a statement, and is asked for at each of its ends: a thousand of them
would wait for it a thousand times while other threads have work. The names travel as one JSON object, with the claim of
each, and what came of them comes back as a single row.
"""

from __future__ import annotations

import sqlite3
from json import dumps, loads

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import wall_now
from dibs.store import PIN_KEEP_S, RELEASED, Acquire, Granted, Release, Renew, Renewed
from dibs.stores.sqlite_sql import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.store import Outcome, Request
    from dibs.stores.sqlite_file import SQLiteFile


def has_json(db: sqlite3.Connection) -> bool:
    """Whether this SQLite has the functions for JSON; before 3.38 they were an option."""
    try:
        db.execute("SELECT 1 FROM json_each('[]')").fetchall()
    except sqlite3.OperationalError:
        return False
    return True


def decided(file: SQLiteFile, db: sqlite3.Connection, requests: Sequence[Request], now: float) -> dict[int, Outcome]:
    """Do what can be done together, in the open transaction; the outcomes by the places of the requests."""
    if len({request[0] for request in requests}) < len(requests):
        return {}  # requests for one name are tried in their order
    if file.has_json is None:
        file.has_json = has_json(db)
    if not file.has_json:
        return {}
    groups: dict[tuple[Any, ...], dict[str, tuple[int, str]]] = {}
    for place, request in enumerate(requests):
        kind = type(request)
        if kind is Acquire:
            name, claim_id, ttl, holder, info, _, ticket, permits, _, _ = request  # type: ignore[misc]
            if ticket is None and not permits:
                groups.setdefault((_Many.acquire, ttl, holder, info), {})[name] = place, claim_id
        elif kind is Release:
            name, claim_id, slot, ticket, keep, _ = request  # type: ignore[misc]
            if ticket is None and slot == 1 and keep <= PIN_KEEP_S:
                groups.setdefault((_Many.release,), {})[name] = place, claim_id
        elif kind is Renew and request.slot == 1:  # type: ignore[union-attr]
            groups.setdefault((_Many.renew, request.ttl), {})[request.name] = place, request.claim_id  # type: ignore[union-attr]
    outcomes: dict[int, Outcome] = {}
    for (verb, *terms), asked in groups.items():
        if len(asked) > 1:
            outcomes.update(verb(_Many(file, db, asked, now), *terms))
    return outcomes


class _Many:
    """Requests of one kind that differ in their names and claims only."""

    def __init__(self, file: SQLiteFile, db: sqlite3.Connection, asked: dict[str, tuple[int, str]], now: float) -> None:
        self._file = file
        self._db = db
        self._places = {name: place for name, (place, _) in asked.items()}
        claims = dumps({name: claim_id for name, (_, claim_id) in asked.items()}, ensure_ascii=False)
        self._theirs = claims, file.boot, now
        self._now = now

    def acquire(self, ttl: float, holder: str, info: str | None) -> dict[int, Outcome]:
        file, now = self._file, self._now
        values = self._theirs[0], 1, holder, info, file.boot, now, now + ttl, file.floor
        self._db.execute(file.sql["grant_many"], numbered(values))
        ((names, tokens, since),) = self._db.execute(file.sql["granted_many"], numbered(self._theirs))
        grants = zip(loads(names), loads(tokens), loads(since), strict=True)
        return {self._places[name]: Granted(token, float(granted_wall)) for name, token, granted_wall in grants}

    def renew(self, ttl: float) -> dict[int, Outcome]:
        return self._change("renew_many", (self._now + ttl,), Renewed(wall_now() + ttl))

    def release(self) -> dict[int, Outcome]:
        return self._change("release_many", (), RELEASED)

    def _change(self, statement: str, values: tuple[float, ...], outcome: Outcome) -> dict[int, Outcome]:
        """Change the leases that are there. Which they are is asked before: of what was released nothing tells it."""
        ((names,),) = self._db.execute(self._file.sql["held_many"], numbered(self._theirs))
        self._db.execute(self._file.sql[statement], numbered((*self._theirs, *values)))
        return {self._places[name]: outcome for name in loads(names)}
