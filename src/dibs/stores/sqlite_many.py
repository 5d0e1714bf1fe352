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
from typing import TYPE_CHECKING, Any

from dibs.clock import wall_now
from dibs.store import PIN_KEEP_S, RELEASED, Acquire, Granted, Release, Renew, Renewed

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
                groups.setdefault((kind, ttl, holder, info), {})[name] = place, claim_id
        elif kind is Release:
            name, claim_id, slot, ticket, keep, _ = request  # type: ignore[misc]
            if ticket is None and slot == 1 and keep <= PIN_KEEP_S:
                groups.setdefault((kind,), {})[name] = place, claim_id
        elif kind is Renew and request.slot == 1:  # type: ignore[union-attr]
            groups.setdefault((kind, request.ttl), {})[request.name] = place, request.claim_id  # type: ignore[union-attr]
    outcomes: dict[int, Outcome] = {}
    for (kind, *terms), asked in groups.items():
        if len(asked) > 1:
            claims = dumps({name: claim_id for name, (_, claim_id) in asked.items()}, ensure_ascii=False)
            _VERBS[kind](file, db, claims, asked, now, outcomes, *terms)
    return outcomes


def _acquire(
    file: SQLiteFile,
    db: sqlite3.Connection,
    claims: str,
    asked: dict[str, tuple[int, str]],
    now: float,
    outcomes: dict[int, Outcome],
    ttl: float,
    holder: str,
    info: str | None,
) -> None:
    db.execute(file.sql["grant_many"], (claims, None, holder, info, file.boot, now, now + ttl, file.floor))
    ((names, tokens, since),) = db.execute(file.sql["granted_many"], (claims, file.boot, now))
    for name, token, granted_wall in zip(loads(names), loads(tokens), loads(since), strict=True):
        outcomes[asked[name][0]] = Granted(token, float(granted_wall))


def _renew(
    file: SQLiteFile,
    db: sqlite3.Connection,
    claims: str,
    asked: dict[str, tuple[int, str]],
    now: float,
    outcomes: dict[int, Outcome],
    ttl: float,
) -> None:
    # (Those that are not renewed are told so one by one: they are few.)
    if db.execute(file.sql["renew_many"], (claims, file.boot, now, now + ttl)).rowcount == len(asked):
        renewed = Renewed(wall_now() + ttl)
        outcomes.update((place, renewed) for place, _ in asked.values())


def _release(
    file: SQLiteFile,
    db: sqlite3.Connection,
    claims: str,
    asked: dict[str, tuple[int, str]],
    now: float,
    outcomes: dict[int, Outcome],
) -> None:
    # Asked first: what was released cannot be told afterwards from what was not there.
    ((held,),) = db.execute(file.sql["held_many"], (claims, file.boot, now))
    if held == len(asked):
        db.execute(file.sql["release_many"], (claims, file.boot, now))
        outcomes.update((place, RELEASED) for place, _ in asked.values())


_VERBS: dict[type, Any] = {Acquire: _acquire, Renew: _renew, Release: _release}
