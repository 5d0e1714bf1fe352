"""Permits on PostgreSQL: read under a row lock, decide, write, in one transaction.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one, so a transaction locks the name's row in the pool table, in the order of names, before it looks.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch, StoreBusy
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
from dibs.stores.postgres_sql import OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.store import Acquire
    from dibs.stores.rounds import Row

_FLOAT8 = Struct("!d").unpack

# Pools of new names, unless a name is a lock already. The floor is locked against purge, as for locks.
POOL_MAKE = """\
INSERT INTO {pool} (name, permits, fencing_token)
SELECT a.name, a.permits, (SELECT value FROM {meta} WHERE key = 'token_floor' FOR SHARE)
FROM unnest($1::text[], $2::integer[]) AS a (name, permits)
WHERE NOT EXISTS (SELECT FROM {lease} AS l WHERE l.name = a.name AND l.slot = 1 AND l.take IS NULL)
ORDER BY a.name
ON CONFLICT DO NOTHING
"""
POOL_LOCK = "SELECT name, permits, fencing_token FROM {pool} WHERE name = ANY($1::text[]) ORDER BY name FOR UPDATE"
POOL_READ = """\
SELECT l.name, l.claim_id, l.take, l.slot, l.holder, l.fencing_token, l.acquired_at,
    extract(epoch FROM l.expires_at - clock_timestamp())::float8
FROM {lease} AS l
WHERE l.name = ANY($1::text[]) AND l.take IS NOT NULL AND l.claim_id IS NOT NULL
UNION ALL
SELECT w.name, w.claim_id, w.take, NULL, NULL, w.ticket, NULL,
    extract(epoch FROM clock_timestamp() - w.seen_at)::float8
FROM {line} AS w WHERE w.name = ANY($1::text[])
"""
# A renewal does not take the lock on the pool: while it is being committed, a lease may seem over that goes on.
# So leases that seem over are ended under their own locks, where that is looked at once more, before anybody counts.
# One that is pinned goes on to be counted.
POOL_END = f"""\
UPDATE {{lease}} AS l SET claim_id = NULL, holder = NULL, info = NULL
WHERE name = ANY($1::text[]) AND take IS NOT NULL AND claim_id IS NOT NULL AND {OVER}
"""
# Who is granted leaves the line, and so do those who ask no more; where permits are left, the next is told. A row
# that is not as it was read (a lock made it at this very moment, say) is left alone, its name missing in the answer.
POOL_GRANT = f"""\
WITH asked AS (
    SELECT * FROM unnest($1::text[], $2::integer[], $3::text[], $4::text[], $5::bigint[], $6::float8[], $7::text[],
                         $8::integer[], $9::integer[], $10::boolean[])
        AS r (name, slot, claim_id, holder, fencing_token, ttl, info, take, permits, more)
), granted AS (
    INSERT INTO {{lease}} AS l (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, info, take)
    SELECT a.name, a.slot, a.claim_id, a.holder, a.fencing_token, clock_timestamp(),
        clock_timestamp() + a.ttl * interval '1 second', a.info, a.take
    FROM asked AS a ORDER BY a.name
    ON CONFLICT (name, slot) DO UPDATE
    SET claim_id = excluded.claim_id, holder = excluded.holder, fencing_token = excluded.fencing_token,
        acquired_at = CASE WHEN l.claim_id = excluded.claim_id THEN l.acquired_at ELSE excluded.acquired_at END,
        expires_at = greatest(CASE WHEN l.claim_id = excluded.claim_id THEN l.expires_at END, excluded.expires_at),
        info = excluded.info, take = excluded.take
    WHERE l.take IS NOT NULL AND (
        l.claim_id = excluded.claim_id OR (l.claim_id IS NULL AND l.fencing_token < excluded.fencing_token))
    RETURNING l.name, l.acquired_at
), raised AS (
    UPDATE {{pool}} AS p SET permits = a.permits, fencing_token = greatest(p.fencing_token, a.fencing_token)
    FROM asked AS a WHERE p.name = a.name
), departed AS (
    DELETE FROM {{line}} AS w USING asked AS a
    WHERE w.name = a.name
      AND (w.claim_id = a.claim_id OR w.seen_at <= clock_timestamp() - interval '{LINE_GRACE_S} s')
)
SELECT g.name, g.acquired_at, CASE WHEN n.wake IS NOT NULL THEN pg_notify(n.wake, g.name) END
FROM granted AS g JOIN asked AS a ON a.name = g.name LEFT JOIN LATERAL (
    SELECT w.wake FROM {{line}} AS w
    WHERE w.name = g.name AND a.more AND w.claim_id <> a.claim_id
      AND w.seen_at > clock_timestamp() - interval '{LINE_GRACE_S} s'
    ORDER BY w.ticket LIMIT 1
) AS n ON true
"""
# Who is refused and wants to wait: seen alive in line, back in line, or at its end.
POOL_ENTER = """\
WITH asked AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::integer[], $5::bigint[])
        AS r (name, claim_id, wake, take, ticket)
), seen AS (
    UPDATE {line} AS w SET seen_at = clock_timestamp() FROM asked AS a
    WHERE w.name = a.name AND w.claim_id = a.claim_id
    RETURNING w.name, w.ticket
), back AS (
    INSERT INTO {line} (name, ticket, claim_id, wake, seen_at, take)
    SELECT a.name, a.ticket, a.claim_id, a.wake, clock_timestamp(), a.take FROM asked AS a
    WHERE a.ticket > 0 AND NOT EXISTS (SELECT FROM {line} AS w WHERE w.name = a.name AND w.claim_id = a.claim_id)
    RETURNING name, ticket
), entered AS (
    INSERT INTO {line} (name, claim_id, wake, seen_at, take)
    SELECT a.name, a.claim_id, a.wake, clock_timestamp(), a.take FROM asked AS a
    WHERE coalesce(a.ticket, 0) = 0
      AND NOT EXISTS (SELECT FROM {line} AS w WHERE w.name = a.name AND w.claim_id = a.claim_id)
    RETURNING name, ticket
)
SELECT name, ticket FROM seen UNION ALL SELECT name, ticket FROM back UNION ALL SELECT name, ticket FROM entered
"""
POOL_RESIZE = """\
UPDATE {pool} AS p SET permits = a.permits FROM unnest($1::text[], $2::integer[]) AS a (name, permits)
WHERE p.name = a.name
"""
# What turned out to be locks, and is to be no pool, then.
POOL_LOCKS = "SELECT name FROM {lease} WHERE name = ANY($1::text[]) AND slot = 1 AND take IS NULL"
POOL_FORGET = "DELETE FROM {pool} WHERE name = ANY($1::text[])"
VERBS = (
    "POOL_MAKE",
    "POOL_LOCK",
    "POOL_READ",
    "POOL_END",
    "POOL_GRANT",
    "POOL_ENTER",
    "POOL_RESIZE",
    "POOL_LOCKS",
    "POOL_FORGET",
)


class Wire(NamedTuple):
    """How the store talks to its server, and how values travel."""

    #: Executes a verb with its parameters.
    execute: Callable[[str, Sequence[bytes | None]], PGresult]
    texts: Callable[[list[str | None]], bytes]
    numbers: Callable[[list[Any]], bytes]
    int: Callable[[bytes | None], int]
    text: Callable[[bytes | None], str | None]
    instant: Callable[[bytes | None], float]


def acquire(wire: Wire, rows: list[Row], outcomes: list[Any]) -> None:
    """Decide these acquires of permits, one a name, inside the transaction that is open."""
    asked: dict[str, tuple[int, Acquire]] = {name: (index, request) for name, index, request in rows}
    heads = _locked(wire, list(asked))
    if len(heads) < len(asked):
        new = [name for name in asked if name not in heads]
        wire.execute("POOL_MAKE", (wire.texts(list(new)), wire.numbers([asked[name][1].permits for name in new])))
        heads |= _locked(wire, new)
    holdings: dict[str, list[Holding]] = {name: [] for name in asked}
    lines: dict[str, list[Waiting]] = {name: [] for name in asked}
    if heads and _read(wire, heads, holdings, lines):
        wire.execute("POOL_END", (wire.texts(list(heads)),))
        _read(wire, heads, holdings, lines)
    strangers = [name for name in asked if name not in heads]
    grants: list[tuple[Acquire, Grant]] = []
    entering: list[Acquire] = []
    resized: list[Acquire] = []
    for name, (index, request) in asked.items():
        if name not in heads:
            continue
        permits, token = heads[name]
        decision = decide(State(permits, token, holdings[name], lines[name]), request)
        if isinstance(decision, Grant):
            grants.append((request, decision))
            continue
        outcomes[index] = decision
        if isinstance(decision, Held):
            if request.permits != permits:
                resized.append(request)
            if request.wake is not None:
                entering.append(request)
    if grants:
        granted = _grant(wire, grants)
        for request, grant in grants:
            at = granted.get(request.name)
            if at is None:
                strangers.append(request.name)
            else:
                outcomes[asked[request.name][0]] = Granted(grant.fencing_token, at, grant.slot)
    if strangers:
        _refuse_locks(wire, strangers)
        for name in strangers:
            outcomes[asked[name][0]] = Mismatch(0)
    if resized:
        names: list[str | None] = [request.name for request in resized]
        wire.execute("POOL_RESIZE", (wire.texts(names), wire.numbers([request.permits for request in resized])))
    if entering:
        for name, ticket in _enter(wire, entering).items():
            index = asked[name][0]
            outcomes[index] = outcomes[index]._replace(ticket=ticket)


def _refuse_locks(wire: Wire, names: list[str]) -> None:
    """Names that are locks; StoreBusy if one is not, and only met somebody at the same moment."""
    given = wire.texts(list(names))
    if wire.execute("POOL_LOCKS", (given,)).ntuples < len(names):
        raise StoreBusy("a name changed while its permits were asked for")
    wire.execute("POOL_FORGET", (given,))


def _locked(wire: Wire, names: list[str]) -> dict[str, tuple[int, int]]:
    result = wire.execute("POOL_LOCK", (wire.texts(list(names)),))
    get = result.get_value
    return {wire.text(get(r, 0)) or "": (wire.int(get(r, 1)), wire.int(get(r, 2))) for r in range(result.ntuples)}


def _read(
    wire: Wire,
    heads: dict[str, tuple[int, int]],
    holdings: dict[str, list[Holding]],
    lines: dict[str, list[Waiting]],
) -> bool:
    """Who holds and who waits; whether a lease seems to be over."""
    result = wire.execute("POOL_READ", (wire.texts(list(heads)),))
    for head in heads:
        holdings[head], lines[head] = [], []
    over = False
    for r in range(result.ntuples):
        name, claim_id, take, slot, holder, number, acquired_at, seconds = (result.get_value(r, c) for c in range(8))
        key, claim = wire.text(name) or "", wire.text(claim_id) or ""
        (duration,) = _FLOAT8(seconds or b"")
        if slot is None:
            lines[key].append(Waiting(wire.int(number), claim, wire.int(take), duration))
        else:
            since = wire.instant(acquired_at)
            held = Holding(
                wire.int(slot), claim, wire.int(take), wire.text(holder) or "", wire.int(number), since, duration
            )
            holdings[key].append(held)
            over = over or duration <= 0
    return over


def _grant(wire: Wire, grants: list[tuple[Acquire, Grant]]) -> dict[str, float]:
    more = ["true" if grant.left > 0 else "false" for _, grant in grants]
    result = wire.execute(
        "POOL_GRANT",
        (
            wire.texts([request.name for request, _ in grants]),
            wire.numbers([grant.slot for _, grant in grants]),
            wire.texts([request.claim_id for request, _ in grants]),
            wire.texts([request.holder for request, _ in grants]),
            wire.numbers([grant.fencing_token for _, grant in grants]),
            wire.numbers([request.ttl for request, _ in grants]),
            wire.texts([request.info for request, _ in grants]),
            wire.numbers([grant.take for _, grant in grants]),
            wire.numbers([grant.permits for _, grant in grants]),
            ("{" + ",".join(more) + "}").encode(),
        ),
    )
    get = result.get_value
    return {wire.text(get(r, 0)) or "": wire.instant(get(r, 1)) for r in range(result.ntuples)}


def _enter(wire: Wire, requests: list[Acquire]) -> dict[str, int]:
    result = wire.execute(
        "POOL_ENTER",
        (
            wire.texts([request.name for request in requests]),
            wire.texts([request.claim_id for request in requests]),
            wire.texts([request.wake and "dibs_" + request.wake for request in requests]),
            wire.numbers([request.take for request in requests]),
            wire.numbers([request.ticket for request in requests]),
        ),
    )
    get = result.get_value
    return {wire.text(get(r, 0)) or "": wire.int(get(r, 1)) for r in range(result.ntuples)}
