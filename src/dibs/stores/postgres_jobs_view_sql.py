"""The SQL of what people see of queues on PostgreSQL, and how they mend them."""

from __future__ import annotations

from dibs.stores.postgres_jobs_sql import ENDED, FREE, KEPT, PURGED, columns

DEPTHS = f"""\
SELECT d.queue, sum(d.ready)::bigint, sum(d.later)::bigint, sum(d.claimed)::bigint, sum(d.dead)::bigint,
    coalesce(max(d.oldest), 0)::float8
FROM (
    SELECT j.queue, count(*) FILTER (WHERE j.due_at <= statement_timestamp() AND {FREE}) AS ready,
        count(*) FILTER (WHERE j.due_at > statement_timestamp() AND {FREE}) AS later,
        count(*) FILTER (WHERE NOT {FREE}) AS claimed, 0 AS dead,
        extract(epoch FROM statement_timestamp()
            - min(j.due_at) FILTER (WHERE j.due_at <= statement_timestamp() AND {FREE})) AS oldest
    FROM {{job}} AS j WHERE j.queue >= $1::text AND j.queue < $2::text GROUP BY j.queue
    UNION ALL
    SELECT e.queue, 0, 0, 0, count(*) FILTER (WHERE e.state = 'dead'), NULL
    FROM {{end}} AS e WHERE e.queue >= $1::text AND e.queue < $2::text
        AND (e.keep_until IS NULL OR e.keep_until > statement_timestamp())
    GROUP BY e.queue
) AS d
GROUP BY d.queue ORDER BY d.queue
"""
_STATE = f"""\
CASE WHEN NOT {FREE} THEN 'claimed' WHEN j.due_at <= statement_timestamp() THEN 'ready' ELSE 'later' END"""
_LIVE = f"""\
SELECT j.id, {_STATE}, j.payload, j.payload_bytes, j.priority, j.tries, j.max_tries, j.crashes, j.fencing_token,
    j.created_at, j.due_at, j.key, j.group_name, j.holder, j.expires_at, j.error, NULL::text, NULL::timestamptz
FROM {{job}} AS j WHERE"""
_ENDED = """\
SELECT e.id, e.state, e.payload, e.payload_bytes, e.priority, e.tries, e.max_tries, e.crashes, e.fencing_token,
    e.created_at, e.due_at, e.key, e.group_name, e.holder, e.expires_at, e.error, e.result, e.ended_at
FROM {end} AS e WHERE (e.keep_until IS NULL OR e.keep_until > statement_timestamp()) AND"""
LIST_LIVE = (
    f"{_LIVE} j.queue = $1::text AND {_STATE} = $2::text\nORDER BY -j.priority, j.due_at, j.id + 0 LIMIT $3::bigint"
)
LIST_ENDED = f"{_ENDED} e.queue = $1::text AND e.state = $2::text\nORDER BY e.ended_at DESC, e.id DESC LIMIT $3::bigint"
FIND = f"""\
{_LIVE} j.id = $2::bigint AND j.queue || '' = $1::text
UNION ALL
{_ENDED} e.id = $2::bigint AND e.queue || '' = $1::text
"""
CANCEL = f"""\
WITH found AS MATERIALIZED (
    SELECT j.id FROM {{job}} AS j WHERE j.queue || '' = $1::text AND j.id = ANY ($2::bigint[]) ORDER BY j.id FOR UPDATE
), gone AS (
    DELETE FROM {{job}} AS j WHERE j.id = ANY (ARRAY(SELECT f.id FROM found AS f)) RETURNING {columns("j")}, j.error
), kept AS (
    INSERT INTO {{end}} (state, ended_at, keep_until, error, {KEPT})
    SELECT 'cancelled', {ENDED}, {ENDED} + $3::float8 * interval '1 second', g.error,
        {columns("g")}
    FROM gone AS g WHERE $3::float8 > 0
), {PURGED}
SELECT array_agg(g.id), count(g.group_name) FROM gone AS g
"""
# (A key that a live job has is found by its index; of dead ones with the same key the first comes back.)
REVIVE = """\
WITH dead AS MATERIALIZED (
    SELECT e.* FROM {end} AS e
    WHERE e.queue = $1::text AND e.state = 'dead' AND ($2::bigint[] IS NULL OR e.id = ANY ($2::bigint[]))
    ORDER BY e.id FOR UPDATE
), back AS (
    INSERT INTO {job} (id, queue, priority, due_at, payload, payload_bytes, key, group_name, max_tries, fencing_token,
        created_at, holder, expires_at, error)
    SELECT d.id, d.queue, d.priority, statement_timestamp(), d.payload, d.payload_bytes, d.key, d.group_name,
        d.max_tries, d.fencing_token, d.created_at, d.holder, d.expires_at, d.error
    FROM dead AS d ORDER BY d.id
    ON CONFLICT DO NOTHING
    RETURNING id
), gone AS (
    DELETE FROM {end} AS e WHERE e.id = ANY (ARRAY(SELECT b.id FROM back AS b))
)
SELECT count(*) FROM back
"""
FORGET = """\
WITH gone AS (
    DELETE FROM {end} AS e
    WHERE e.queue = $1::text AND ($2::bigint[] IS NULL OR e.id = ANY ($2::bigint[]))
      AND e.ended_at <= clock_timestamp() - $3::float8 * interval '1 second'
    RETURNING e.id
)
SELECT count(*) FROM gone
"""
VERBS = "DEPTHS LIST_LIVE LIST_ENDED FIND CANCEL REVIVE FORGET".split()
