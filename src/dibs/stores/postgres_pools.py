"""Permits on PostgreSQL: one statement where it is plain that there are enough, else a transaction that looks closely.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one. ``POOL_TAKE`` looks in its snapshot, and grants only if no other grant came in between, which the name's row in the
pool table tells: every grant raises its token. Meanwhile permits can only have been given back. Who is not granted so
(nothing left, others in line before it, a lease that seems over, another number of permits …) goes the long way: a
transaction locks the name's row, in the order of names, before it looks and decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dibs.store import LAST_TICKET, LINE_GRACE_S, Granted, Held, Mismatch, StoreBusy
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
from dibs.stores.postgres_sql import OVER, UNPINNED
from dibs.stores.postgres_wire import acquired, float8, instant, integer, numbers, text, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.store import Acquire
    from dibs.stores.rounds import Row

    # A verb with its parameters; and what executes statements in one round trip.
    Statement = tuple[str, Sequence[bytes | None]]
    Execute = Callable[[Sequence[Statement]], list[PGresult]]

# Who leaves the line, and who is told, as in POOL_GRANT. What is unclear is left for a closer look.
POOL_TAKE = f"""\
WITH asked AS (
    SELECT * FROM {{asked}} AS r (name, claim_id, ttl, holder, info, ticket, permits, take, i)
), seen AS MATERIALIZED (
    SELECT a.*, p.fencing_token, h.slot, h.taken + a.take < a.permits AS more
    FROM asked AS a
    JOIN {{pool}} AS p ON p.name = a.name AND p.permits = a.permits
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(l.take) FILTER (WHERE l.claim_id IS NOT NULL), 0) AS taken,
            coalesce(min(l.slot) FILTER (WHERE l.claim_id IS NULL), count(*) + 1)::integer AS slot,
            -- It holds already; a lease seems over; a purge has left a gap among the slots.
            coalesce(bool_or(l.claim_id = a.claim_id)
                OR min(l.expires_at) FILTER (WHERE l.claim_id IS NOT NULL) <= clock_timestamp()
                OR count(*) < max(l.slot), false) AS unclear
        FROM {{lease}} AS l WHERE l.name = a.name AND l.take IS NOT NULL
    ) AS h
    WHERE h.taken + a.take <= a.permits AND NOT h.unclear
      AND NOT EXISTS (
          SELECT FROM {{line}} AS w
          WHERE w.name = a.name AND w.ticket < coalesce(a.ticket, {LAST_TICKET}) AND w.claim_id <> a.claim_id)
), raised AS (
    UPDATE {{pool}} AS p SET fencing_token = p.fencing_token + 1
    FROM seen AS s WHERE p.name = s.name AND p.fencing_token = s.fencing_token AND p.permits = s.permits
    RETURNING s.*, p.fencing_token AS token
), granted AS (
    INSERT INTO {{lease}} AS l (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, info, take)
    SELECT r.name, r.slot, r.claim_id, r.holder, r.token, clock_timestamp(),
        clock_timestamp() + r.ttl * interval '1 second', r.info, r.take
    FROM raised AS r
    ON CONFLICT (name, slot) DO UPDATE
    SET claim_id = excluded.claim_id, holder = excluded.holder, fencing_token = excluded.fencing_token,
        acquired_at = excluded.acquired_at, expires_at = excluded.expires_at, info = excluded.info, take = excluded.take
    WHERE l.take IS NOT NULL AND l.claim_id IS NULL AND l.fencing_token < excluded.fencing_token
    RETURNING l.name, l.claim_id, l.slot, l.fencing_token, l.acquired_at
), departed AS (
    DELETE FROM {{line}} AS w USING granted AS g
    WHERE w.name = g.name
      AND (w.claim_id = g.claim_id OR w.seen_at <= clock_timestamp() - interval '{LINE_GRACE_S} s')
)
SELECT s.i, g.fencing_token, g.acquired_at, g.slot, CASE WHEN n.wake IS NOT NULL THEN pg_notify(n.wake, g.name) END
FROM granted AS g JOIN seen AS s ON s.name = g.name LEFT JOIN LATERAL (
    SELECT w.wake FROM {{line}} AS w
    WHERE w.name = g.name AND s.more AND w.claim_id <> g.claim_id
      AND w.seen_at > clock_timestamp() - interval '{LINE_GRACE_S} s'
    ORDER BY w.ticket LIMIT 1
) AS n ON true
"""
# Sent just before POOL_TAKE, in its transaction: those who take at the same moment do it one after the other, or all
# but one would look in vain. A row lock would do as well, but is a write, which makes a refusal wait for the disk.
POOL_QUEUE = "SELECT pg_advisory_xact_lock(hashtextextended(name, 7095203471)) FROM unnest($1::text[]) AS a (name)"
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
# A permit that changes hands, under the next token of the pool, whose row is locked before that of the slot.
POOL_TRANSFER = f"""\
WITH head AS MATERIALIZED (
    SELECT fencing_token FROM {{pool}} WHERE name = $1 FOR UPDATE
), moved AS (
    UPDATE {{lease}} AS l
    SET claim_id = $2, holder = $4, info = $6,
        fencing_token = CASE WHEN l.claim_id = $2 THEN l.fencing_token ELSE h.fencing_token + 1 END,
        acquired_at = CASE WHEN l.claim_id = $2 THEN l.acquired_at ELSE clock_timestamp() END,
        expires_at = greatest(
            CASE WHEN l.claim_id = $2 THEN l.expires_at END, clock_timestamp() + $3::float8 * interval '1 second')
    FROM head AS h
    WHERE l.name = $1 AND l.slot = $7::integer AND l.take IS NOT NULL AND $5 <> ''
      AND (l.claim_id = $2 OR l.claim_id = $5 AND {UNPINNED.format(row="l")}) AND l.expires_at > clock_timestamp()
    RETURNING l.fencing_token, l.acquired_at
), raised AS (
    UPDATE {{pool}} AS p SET fencing_token = greatest(p.fencing_token, m.fencing_token)
    FROM moved AS m WHERE p.name = $1
)
SELECT fencing_token, acquired_at FROM moved
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
    UPDATE {line} AS w SET seen_at = clock_timestamp(), take = a.take FROM asked AS a
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
POOL_FORGET = """\
DELETE FROM {pool} AS p
WHERE p.name = ANY($1::text[]) AND EXISTS (
    SELECT FROM {lease} AS l WHERE l.name = p.name AND l.slot = 1 AND l.take IS NULL)
"""
# A process that is stopped in the middle of a decision must not keep everybody else out (behind a pooler, where the
# connection has no settings of ours).
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
LIMITS = """\
SELECT set_config('statement_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $1, true)
"""
COMMIT = "COMMIT"
VERBS = (
    "BEGIN",
    "LIMITS",
    "POOL_QUEUE",
    "POOL_TRANSFER",
    "POOL_MAKE",
    "POOL_LOCK",
    "POOL_READ",
    "POOL_END",
    "POOL_GRANT",
    "POOL_ENTER",
    "POOL_RESIZE",
    "POOL_LOCKS",
    "POOL_FORGET",
    "COMMIT",
)


def take(rows: list[Row]) -> list[Statement]:
    """What grants where it is plain that there are enough, the last in the flight."""
    queue = ("POOL_QUEUE", (texts([row[0] for row in rows]),))
    if len(rows) == 1:
        request = rows[0][2]
        return [queue, ("POOL_TAKE_ONE", (*acquired(rows), b"%d" % request.permits, b"%d" % request.take))]
    of_pools = numbers([row[2].permits for row in rows]), numbers([row[2].take for row in rows])
    return [queue, ("POOL_TAKE", (*acquired(rows), *of_pools))]


def taken(result: PGresult, rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Note what was granted so; return the rest."""
    get = result.get_value
    granted = set()
    for r in range(result.ntuples):
        place = integer(get(r, 0)) - 1
        granted.add(place)
        outcomes[rows[place][1]] = Granted(integer(get(r, 1)), instant(get(r, 2)), integer(get(r, 3)))
    return [row for place, row in enumerate(rows) if place not in granted]


def acquire(execute: Execute, begin: list[Statement], rows: list[Row], outcomes: list[Any]) -> None:
    """Decide these acquires of permits, one a name, in one transaction."""
    asked: dict[str, tuple[int, Acquire]] = {name: (index, request) for name, index, request in rows}
    heads, holdings, lines = _locked(execute, list(asked), begin)
    new = [name for name in asked if name not in heads]
    if new:
        make = ("POOL_MAKE", (texts(new), numbers([asked[name][1].permits for name in new])))
        more = _locked(execute, new, [make])
        heads, holdings, lines = heads | more[0], holdings | more[1], lines | more[2]
    over = [name for name, held in holdings.items() if any(holding.ends_in <= 0 for holding in held)]
    if over:
        more = _locked(execute, over, [("POOL_END", (texts(over),))])
        holdings |= more[1]
    decisions = {
        name: decide(State(*heads[name], holdings.get(name, ()), lines.get(name, ())), request)
        for name, (_, request) in asked.items()
        if name in heads
    }
    grants = [(asked[name][1], decision) for name, decision in decisions.items() if isinstance(decision, Grant)]
    held = [asked[name][1] for name, decision in decisions.items() if isinstance(decision, Held)]
    resized = [request for request in held if request.permits != heads[request.name][0]]
    entering = [request for request in held if request.wake is not None]
    writes: list[Statement] = []
    if grants:
        writes.append(_grant(grants))
    if resized:
        limits = numbers([request.permits for request in resized])
        writes.append(("POOL_RESIZE", (texts([request.name for request in resized]), limits)))
    if entering:
        writes.append(_enter(entering))
    results = execute([*writes, ("COMMIT", ())])
    for name, decision in decisions.items():
        if not isinstance(decision, Grant):
            outcomes[asked[name][0]] = decision
    strangers = [name for name in asked if name not in heads]
    if grants:
        get = results[0].get_value
        granted = {text(get(r, 0)) or "": instant(get(r, 1)) for r in range(results[0].ntuples)}
        for request, grant in grants:
            if request.name in granted:
                index = asked[request.name][0]
                outcomes[index] = Granted(grant.fencing_token, granted[request.name], grant.slot)
            else:
                strangers.append(request.name)
    if entering:
        get = results[-2].get_value
        for r in range(results[-2].ntuples):
            index = asked[text(get(r, 0)) or ""][0]
            outcomes[index] = outcomes[index]._replace(ticket=integer(get(r, 1)))
    if strangers:
        _refuse_locks(execute, strangers)
        for name in strangers:
            outcomes[asked[name][0]] = Mismatch(0)


def _refuse_locks(execute: Execute, names: list[str]) -> None:
    """Names that are locks; StoreBusy if one is not, and only met somebody at the same moment."""
    given = texts(names)
    locks, _ = execute([("POOL_LOCKS", (given,)), ("POOL_FORGET", (given,))])
    if locks.ntuples < len(names):
        raise StoreBusy("a name changed while its permits were asked for")


def _locked(
    execute: Execute, names: list[str], before: list[Statement]
) -> tuple[dict[str, tuple[int, int]], dict[str, list[Holding]], dict[str, list[Waiting]]]:
    """Do what is to be done before, lock the names, and read their permits and tokens, who holds, and who waits."""
    given = texts(names)
    *_, locked, read = execute([*before, ("POOL_LOCK", (given,)), ("POOL_READ", (given,))])
    get = locked.get_value
    heads = {text(get(r, 0)) or "": (integer(get(r, 1)), integer(get(r, 2))) for r in range(locked.ntuples)}
    holdings: dict[str, list[Holding]] = {head: [] for head in heads}
    lines: dict[str, list[Waiting]] = {head: [] for head in heads}
    for r in range(read.ntuples):
        name, claim_id, take, slot, holder, number, acquired_at, seconds = (read.get_value(r, c) for c in range(8))
        key, claim = text(name) or "", text(claim_id) or ""
        if key not in heads:
            continue
        if slot is None:
            lines[key].append(Waiting(integer(number), claim, integer(take), float8(seconds)))
        else:
            since, ends_in = instant(acquired_at), float8(seconds)
            who = claim, integer(take), text(holder) or ""
            holdings[key].append(Holding(integer(slot), *who, integer(number), since, ends_in))
    return heads, holdings, lines


def _grant(grants: list[tuple[Acquire, Grant]]) -> Statement:
    more = ["true" if grant.left > 0 else "false" for _, grant in grants]
    return (
        "POOL_GRANT",
        (
            texts([request.name for request, _ in grants]),
            numbers([grant.slot for _, grant in grants]),
            texts([request.claim_id for request, _ in grants]),
            texts([request.holder for request, _ in grants]),
            numbers([grant.fencing_token for _, grant in grants]),
            numbers([request.ttl for request, _ in grants]),
            texts([request.info for request, _ in grants]),
            numbers([grant.take for _, grant in grants]),
            numbers([grant.permits for _, grant in grants]),
            ("{" + ",".join(more) + "}").encode(),
        ),
    )


def _enter(requests: list[Acquire]) -> Statement:
    return (
        "POOL_ENTER",
        (
            texts([request.name for request in requests]),
            texts([request.claim_id for request in requests]),
            texts([request.wake and "dibs_" + request.wake for request in requests]),
            numbers([request.take for request in requests]),
            numbers([request.ticket for request in requests]),
        ),
    )
