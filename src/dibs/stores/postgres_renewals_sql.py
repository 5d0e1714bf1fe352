"""The SQL of renewals on PostgreSQL: of all that are asked for, or of those whose rows nobody else has locked."""

from __future__ import annotations

# One row comes back for all: ten thousand rows would take as long to read as their leases to renew. Each moves the end,
# if only by the smallest step: who watches a lease sees that it was renewed (END), also when the clock was set back.
_TO_RENEW = (
    "unnest($1::text[], $2::integer[], $3::text[], $4::float8[]) WITH ORDINALITY AS a (name, slot, claim_id, ttl, i)"
)
_OURS = "l.name = a.name AND l.slot = a.slot AND l.claim_id = a.claim_id AND l.expires_at > clock_timestamp()"
RENEW = f"""\
WITH renewed AS (
    UPDATE {{lease}} AS l
    SET expires_at = greatest(
        l.expires_at + interval '1 microsecond', clock_timestamp() + a.ttl * interval '1 second')
    FROM {_TO_RENEW}
    WHERE {_OURS}
    RETURNING a.i
)
SELECT array_agg(i), clock_timestamp() FROM renewed
"""
# Where that would wait longer than this for a transaction of somebody's, those alone are renewed that nobody has
# locked, and the others are told.
HURRY = "SELECT set_config('lock_timeout', '100ms', true)"
RENEW_UNLOCKED = f"""\
WITH free AS MATERIALIZED (
    SELECT a.* FROM {_TO_RENEW} JOIN {{lease}} AS l ON {_OURS} ORDER BY a.i FOR UPDATE OF l SKIP LOCKED
), renewed AS (
    UPDATE {{lease}} AS l
    SET expires_at = greatest(
        l.expires_at + interval '1 microsecond', clock_timestamp() + a.ttl * interval '1 second')
    FROM free AS a
    WHERE {_OURS}
    RETURNING a.i
)
SELECT array_agg(i), clock_timestamp(), (
    SELECT array_agg(a.i) FROM {_TO_RENEW} JOIN {{lease}} AS l ON {_OURS}
    WHERE a.i <> ALL (ARRAY(SELECT f.i FROM free AS f))
) FROM renewed
"""
VERBS = ("HURRY", "RENEW", "RENEW_UNLOCKED")
