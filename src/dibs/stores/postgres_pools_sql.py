"""The SQL of permits on PostgreSQL: see dibs.stores.postgres_pools."""

from __future__ import annotations

from dibs.store import LAST_TICKET, LINE_GRACE_S
from dibs.stores.postgres_line_sql import ALIVE, told_of_grant
from dibs.stores.postgres_sql import OVER, UNPINNED

# What the slots of a name amount to, and the first that is free. Where all up to the last that is held are held, it is
# the next, whether it has a row or not. (Between them it may have none, after a purge, which is left unclear.)
_HELD = """\
SELECT coalesce(sum(l.take), 0) AS taken, count(*) AS holders, coalesce(max(l.slot), 0) AS last,
            -- It holds already; a lease seems over.
            coalesce(bool_or(%(mine)s) OR min(l.expires_at) <= clock_timestamp(), false) AS unclear
        FROM {lease} AS l WHERE l.name = %(name)s AND l.take IS NOT NULL AND l.claim_id IS NOT NULL"""
_FREE = """\
CASE WHEN h.holders = h.last THEN h.last + 1 ELSE (
            SELECT l.slot FROM {lease} AS l
            WHERE l.name = %(name)s AND l.slot < h.last AND l.take IS NOT NULL AND l.claim_id IS NULL
            ORDER BY l.slot LIMIT 1) END"""
_PUT = """\
INSERT INTO {{lease}} AS l (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, info, take)
    SELECT {name}, r.slot, {claim_id}, {holder}, r.fencing_token, clock_timestamp(),
        clock_timestamp() + {ttl} * interval '1 second', {info}, {take}
    FROM {given} AS r
    ON CONFLICT (name, slot) DO UPDATE
    SET claim_id = excluded.claim_id, holder = excluded.holder, fencing_token = excluded.fencing_token,
        acquired_at = excluded.acquired_at, expires_at = excluded.expires_at, info = excluded.info, take = excluded.take
    WHERE l.take IS NOT NULL AND l.claim_id IS NULL AND l.fencing_token < excluded.fencing_token"""
_COLUMNS = ("name", "claim_id", "ttl", "holder", "info", "permits", "take")
_OF_ASKED, _OF_RAISED = ({column: f"{row}.{column}" for column in _COLUMNS} for row in "ar")
# Newcomers to names for which nobody waits, one a name. Whatever else is the case is left for POOL_DECIDE.
POOL_TAKE = f"""\
WITH asked AS (
    SELECT * FROM {{asked}} AS r (name, claim_id, ttl, holder, info, permits, take, i)
), seen AS MATERIALIZED (
    SELECT a.*, p.fencing_token AS token,
        {_FREE % _OF_ASKED} AS slot
    FROM asked AS a
    JOIN {{pool}} AS p ON p.name = a.name AND p.permits = a.permits
    CROSS JOIN LATERAL (
        {_HELD % {**_OF_ASKED, "mine": "l.claim_id = a.claim_id"}}
    ) AS h
    WHERE h.taken + a.take <= a.permits AND NOT h.unclear
      AND NOT EXISTS (SELECT FROM {{line}} AS w WHERE w.name = a.name)
), raised AS (
    UPDATE {{pool}} AS p SET fencing_token = p.fencing_token + 1
    FROM seen AS s
    WHERE p.name = s.name AND p.fencing_token = s.token AND p.permits = s.permits AND s.slot IS NOT NULL
    RETURNING s.*, p.fencing_token
), granted AS (
    {_PUT.format(given="raised", **_OF_RAISED)}
    RETURNING l.name, l.slot, l.fencing_token, l.acquired_at
)
SELECT s.i, g.fencing_token, g.acquired_at, g.slot FROM granted AS g JOIN seen AS s ON s.name = g.name
"""
# What is to be left for those in line; no more than there is, as each of them takes one at least. (The dead wait for
# nothing, and leave with the next grant that sees them; so does who is in line and does not know it.)
_KEPT = """\
SELECT coalesce(sum(w.take), 0) AS kept, coalesce(bool_or(w.claim_id = %(claim_id)s OR NOT %(alive)s), false) AS leave
        FROM (
            SELECT w.take, w.claim_id, w.seen_at FROM {line} AS w WHERE w.name = %(name)s AND %(ahead)s
            LIMIT greatest(%(permits)s - h.taken, 0)) AS w"""
_AHEAD = f"w.ticket < a.place AND w.claim_id <> ALL (a.before) AND {ALIVE}"
# The first of what is asked for of each name, as many as there are enough for beside what is kept for those in line; or
# none, when another grant came in between. Who leaves the line, and who is told, as in POOL_GRANT. The rest is refused
# where it is plain that too little is left, and whoever waits enters the line, as in POOL_ENTER. (That is synchronous
# with a grant only: a place in line that a crash forgets is taken again.) What is unclear is left for a closer look,
# with everybody after it.
POOL_DECIDE = f"""\
WITH placed AS (
    SELECT r.*, own.ticket AS own, coalesce(least(own.ticket, r.ticket), {LAST_TICKET}) AS place
    FROM {{asked}} AS r (name, claim_id, ttl, holder, info, ticket, permits, take, wake, i)
    LEFT JOIN LATERAL (
        SELECT w.ticket FROM {{line}} AS w WHERE w.name = r.name AND w.claim_id = r.claim_id AND r.wake IS NOT NULL
        LIMIT 1
    ) AS own ON true
), asked AS (
    SELECT *, sum(take) OVER o AS upto,  -- and who of them is in line, itself included
        array_agg(claim_id) FILTER (WHERE wake IS NOT NULL OR ticket IS NOT NULL) OVER o
            || claim_id AS before
    FROM placed
    WINDOW o AS (PARTITION BY name ORDER BY i)
), heads AS MATERIALIZED (
    SELECT p.name, p.permits, p.fencing_token AS token, h.taken, h.holders, h.last
    FROM (
        SELECT name, min(permits) AS permits, array_agg(claim_id) AS claims FROM asked
        GROUP BY name HAVING min(permits) = max(permits)) AS n
    JOIN {{pool}} AS p ON p.name = n.name AND p.permits = n.permits
    CROSS JOIN LATERAL (
        {_HELD % {"name": "p.name", "mine": "l.claim_id = ANY (n.claims)"}}
    ) AS h
    WHERE NOT h.unclear
), wanted AS MATERIALIZED (
    SELECT a.*, h.token, h.taken, h.holders, h.last, k.kept,
        bool_and(h.taken + a.upto + k.kept <= a.permits) OVER (PARTITION BY a.name ORDER BY a.i) AS fits
    FROM asked AS a JOIN heads AS h ON h.name = a.name
    CROSS JOIN LATERAL (
        {_KEPT % {**_OF_ASKED, "ahead": _AHEAD, "alive": ALIVE}}
    ) AS k
), seen AS MATERIALIZED (
    SELECT f.*, CASE WHEN f.nth > f.last - f.holders THEN f.holders + f.nth ELSE (
            SELECT l.slot FROM {{lease}} AS l
            WHERE l.name = f.name AND l.slot < f.last AND l.take IS NOT NULL AND l.claim_id IS NULL
            ORDER BY l.slot OFFSET f.nth - 1 LIMIT 1) END AS slot
    FROM (SELECT w.*, row_number() OVER (PARTITION BY w.name ORDER BY w.i) AS nth FROM wanted AS w WHERE w.fits) AS f
), raised AS (
    UPDATE {{pool}} AS p SET fencing_token = p.fencing_token + s.number
    FROM (
        SELECT name, token, permits, count(*) AS number, sum(take) AS takes, array_agg(claim_id) AS claims FROM seen
        GROUP BY name, token, permits HAVING count(slot) = count(*)) AS s
    WHERE p.name = s.name AND p.fencing_token = s.token AND p.permits = s.permits
    RETURNING s.name, s.takes, s.number, s.claims
), given AS (
    SELECT s.*, s.token + s.nth AS fencing_token FROM seen AS s JOIN raised AS r ON r.name = s.name
), granted AS (
    {_PUT.format(given="given", **_OF_RAISED)}
    RETURNING l.name, l.claim_id, l.slot, l.fencing_token, l.acquired_at
), refused AS MATERIALIZED (
    SELECT * FROM (
        SELECT w.*, coalesce(r.number, 0) AS number, w.permits - w.taken - coalesce(r.takes, 0) AS room,
            bool_and(NOT w.fits AND w.taken + coalesce(r.takes, 0) + w.kept + w.take > w.permits) OVER o AS plain,
            min(w.place) FILTER (WHERE w.wake IS NOT NULL) OVER (
                o ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS other  -- of those in this call
        FROM wanted AS w LEFT JOIN raised AS r ON r.name = w.name WHERE NOT w.fits OR r.name IS NULL
        WINDOW o AS (PARTITION BY w.name ORDER BY w.i)
    ) AS w WHERE w.plain
), relaxed AS (
    SELECT set_config('synchronous_commit', 'off', true) WHERE NOT EXISTS (SELECT FROM raised)
), departed AS (
    DELETE FROM {{line}} AS w USING raised AS r
    WHERE w.name = r.name
      AND (w.claim_id = ANY (r.claims) OR w.seen_at <= clock_timestamp() - interval '{LINE_GRACE_S} s')
      AND NOT EXISTS (SELECT FROM refused AS f WHERE f.name = w.name AND f.own = w.ticket)
    RETURNING w.name, w.ticket
), there AS (
    UPDATE {{line}} AS w SET seen_at = clock_timestamp(), take = f.take
    FROM refused AS f WHERE w.name = f.name AND w.ticket = f.own
), back AS (
    INSERT INTO {{line}} (name, ticket, claim_id, wake, seen_at, take)
    SELECT f.name, f.ticket, f.claim_id, f.wake, clock_timestamp(), f.take
    FROM refused AS f WHERE f.wake IS NOT NULL AND f.own IS NULL AND f.ticket > 0
    ON CONFLICT (name, ticket) DO NOTHING
), entered AS (
    INSERT INTO {{line}} (name, claim_id, wake, seen_at, take)
    SELECT f.name, f.claim_id, f.wake, clock_timestamp(), f.take
    FROM refused AS f WHERE f.wake IS NOT NULL AND f.own IS NULL AND coalesce(f.ticket, 0) = 0 ORDER BY f.i
    RETURNING name, claim_id, ticket
)
SELECT s.i, g.fencing_token, g.acquired_at, g.slot, NULL, NULL, NULL, NULL, CASE WHEN s.nth = 1 THEN
        {told_of_grant("g.name", "r.claims", "(h.permits - h.taken - r.takes)")} END
FROM granted AS g JOIN seen AS s ON s.name = g.name AND s.claim_id = g.claim_id
JOIN heads AS h ON h.name = g.name JOIN raised AS r ON r.name = g.name
UNION ALL
SELECT f.i, CASE WHEN o.enough THEN f.token + f.number ELSE b.fencing_token END,
    CASE WHEN o.enough THEN NULL ELSE b.acquired_at END, NULL, CASE WHEN o.enough THEN NULL ELSE b.holder END,
    CASE WHEN o.enough THEN {LINE_GRACE_S} ELSE extract(epoch FROM b.expires_at - clock_timestamp())::float8 END,
    coalesce(f.own, e.ticket, nullif(f.ticket, 0)),
    o.enough OR coalesce(f.other <= f.place, false) OR EXISTS (
        SELECT FROM {{line}} AS w WHERE w.name = f.name AND w.ticket < f.place AND w.claim_id <> f.claim_id
          AND NOT EXISTS (SELECT FROM departed AS d WHERE d.name = w.name AND d.ticket = w.ticket)),
    (SELECT count(*) FROM relaxed)
FROM refused AS f LEFT JOIN entered AS e ON e.name = f.name AND e.claim_id = f.claim_id
CROSS JOIN LATERAL (SELECT f.room >= f.take AS enough) AS o
LEFT JOIN LATERAL (
    SELECT l.fencing_token, l.acquired_at, l.holder, l.expires_at FROM {{lease}} AS l
    WHERE l.name = f.name AND l.take IS NOT NULL AND l.claim_id IS NOT NULL
    UNION ALL
    SELECT g.fencing_token, clock_timestamp(), g.holder, clock_timestamp() + g.ttl * interval '1 second'
    FROM given AS g WHERE g.name = f.name
    ORDER BY expires_at LIMIT 1
) AS b ON true
"""
# As POOL_TAKE for one newcomer, also where others wait and enough is left for all of them. It leaves no line, and tells
# nobody: whoever gave back has told the first in line.
_NEW = {
    "mine": "l.claim_id = $2::text",
    "name": "$1::text",
    "claim_id": "$2::text",
    "ttl": "$3::float8",
    "holder": "$4::text",
    "info": "$5::text",
    "permits": "$6::integer",
    "take": "$7::integer",
}
POOL_TAKE_NEW = f"""\
WITH seen AS MATERIALIZED (
    SELECT p.fencing_token AS token,
        {_FREE % _NEW} AS slot
    FROM {{pool}} AS p
    CROSS JOIN LATERAL (
        {_HELD % _NEW}
    ) AS h
    CROSS JOIN LATERAL (
        {_KEPT % {**_NEW, "ahead": "true", "alive": ALIVE}}
    ) AS k
    WHERE p.name = $1 AND p.permits = $6::integer AND h.taken + k.kept + $7 <= $6 AND NOT h.unclear AND NOT k.leave
), raised AS (
    UPDATE {{pool}} AS p SET fencing_token = p.fencing_token + 1
    FROM seen AS s WHERE p.name = $1 AND p.fencing_token = s.token AND p.permits = $6 AND s.slot IS NOT NULL
    RETURNING s.slot, p.fencing_token
)
{_PUT.format(given="raised", **_NEW)}
    RETURNING 1::bigint, l.fencing_token, l.acquired_at, l.slot
"""
# Sent just before a take, in its transaction: those who take at the same moment do it one after the other, or all but
# one would look in vain. A row lock would do as well, but is a write, which makes a refusal wait for the disk.
POOL_QUEUE = "SELECT pg_advisory_xact_lock(hashtextextended(name, 7095203471)) FROM unnest($1::text[]) AS a (name)"
# Pools of new names, unless a name is a lock already. The floor is locked against purge, as for locks. Where only this
# table was emptied, tokens go on from those of the permits.
POOL_MAKE = """\
INSERT INTO {pool} (name, permits, fencing_token)
SELECT a.name, a.permits, (
    SELECT greatest(m.value, (SELECT max(l.fencing_token) FROM {lease} AS l WHERE l.name = a.name))
    FROM {meta} AS m WHERE m.key = 'token_floor' FOR SHARE)
FROM unnest($1::text[], $2::integer[]) AS a (name, permits)
WHERE NOT EXISTS (SELECT FROM {lease} AS l WHERE l.name = a.name AND l.slot = 1 AND l.take IS NULL)
ORDER BY a.name
ON CONFLICT DO NOTHING
"""
POOL_LOCK = """\
SELECT name, permits, fencing_token, clock_timestamp() FROM {pool} WHERE name = ANY($1::text[]) ORDER BY name FOR UPDATE
"""
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
                         $8::integer[], $9::integer[], $10::integer[])
        AS r (name, slot, claim_id, holder, fencing_token, ttl, info, take, permits, room)
), granted AS (
    INSERT INTO {{lease}} AS l (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, info, take)
    SELECT a.name, a.slot, a.claim_id, a.holder, a.fencing_token, clock_timestamp(),
        clock_timestamp() + a.ttl * interval '1 second', a.info, a.take
    FROM asked AS a ORDER BY a.name, a.slot
    ON CONFLICT (name, slot) DO UPDATE
    SET claim_id = excluded.claim_id, holder = excluded.holder, fencing_token = excluded.fencing_token,
        acquired_at = CASE WHEN l.claim_id = excluded.claim_id THEN l.acquired_at ELSE excluded.acquired_at END,
        expires_at = greatest(CASE WHEN l.claim_id = excluded.claim_id THEN l.expires_at END, excluded.expires_at),
        info = excluded.info, take = excluded.take
    WHERE l.take IS NOT NULL AND (
        l.claim_id = excluded.claim_id OR (l.claim_id IS NULL AND l.fencing_token < excluded.fencing_token))
    RETURNING l.name, l.slot, l.acquired_at
), heads AS (
    SELECT name, max(permits) AS permits, max(fencing_token) AS fencing_token, min(room) AS room,
        array_agg(claim_id) AS claims
    FROM asked GROUP BY name
), raised AS (
    UPDATE {{pool}} AS p SET permits = h.permits, fencing_token = greatest(p.fencing_token, h.fencing_token)
    FROM heads AS h WHERE p.name = h.name
), departed AS (
    DELETE FROM {{line}} AS w USING asked AS a
    WHERE w.name = a.name
      AND (w.claim_id = a.claim_id OR w.seen_at <= clock_timestamp() - interval '{LINE_GRACE_S} s')
)
SELECT g.name, g.slot, g.acquired_at, NULL FROM granted AS g
UNION ALL
SELECT NULL, NULL, NULL, {told_of_grant("h.name", "h.claims", "h.room")} FROM heads AS h
"""
# Who is refused and wants to wait: seen alive in line, back in line, or at its end.
POOL_ENTER = """\
WITH asked AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::integer[], $5::bigint[])
        WITH ORDINALITY AS r (name, claim_id, wake, take, ticket, i)
), seen AS (
    UPDATE {line} AS w SET seen_at = clock_timestamp(), take = a.take FROM asked AS a
    WHERE w.name = a.name AND w.claim_id = a.claim_id
    RETURNING w.name, w.claim_id, w.ticket
), back AS (
    INSERT INTO {line} (name, ticket, claim_id, wake, seen_at, take)
    SELECT a.name, a.ticket, a.claim_id, a.wake, clock_timestamp(), a.take FROM asked AS a
    WHERE a.ticket > 0 AND NOT EXISTS (SELECT FROM {line} AS w WHERE w.name = a.name AND w.claim_id = a.claim_id)
    RETURNING name, claim_id, ticket
), entered AS (
    INSERT INTO {line} (name, claim_id, wake, seen_at, take)
    SELECT a.name, a.claim_id, a.wake, clock_timestamp(), a.take FROM asked AS a
    WHERE coalesce(a.ticket, 0) = 0
      AND NOT EXISTS (SELECT FROM {line} AS w WHERE w.name = a.name AND w.claim_id = a.claim_id)
    ORDER BY a.i
    RETURNING name, claim_id, ticket
)
SELECT * FROM seen UNION ALL SELECT * FROM back UNION ALL SELECT * FROM entered
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
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT = "COMMIT"
VERBS = (
    "BEGIN",
    "POOL_QUEUE",
    "POOL_TAKE_NEW",
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
