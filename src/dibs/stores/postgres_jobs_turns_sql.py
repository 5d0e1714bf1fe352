"""The SQL of takes on PostgreSQL that may claim only so many jobs of a group.

Of a group only the first may be claimed, and not while others are that were first before these joined the group: they
were committed late, revived, or replaced. The claimed ones are found by what is noted here of each claim with a limit.
Without that the whole group would have to be looked through, and an index on claims would be written by each of them.

A note says nothing by itself: the job's row says whether the claim is in force. So whatever ends a claim leaves its
note alone, and takes delete such notes now and then. Notes are written and deleted by one transaction at a time for
each queue: none is deleted because of what was seen before the claim it stands for. (Takes without a limit write none:
whoever mixes them with takes that have one has no limit.)
"""

from __future__ import annotations

from dibs.stores.postgres_jobs_sql import CLAIM, FREE, FREE_THERE, SEEN, STRETCHES, TOLD_OF_UNTOLD, UNTOLD

SCHEMA = """\
CREATE TABLE IF NOT EXISTS {turn} (       -- jobs of groups that were claimed with a limit; some of the claims are over
    queue         text COLLATE "C" NOT NULL,
    group_name    text COLLATE "C" NOT NULL,
    id            bigint NOT NULL,
    PRIMARY KEY (queue, group_name, id)
);
"""

# Whether the claim that is noted is in force. (A job whose claim is over may have been put into another group. Nothing
# but its id is a condition, so that no other index looks as good while the table is empty.)
_NOTED = """\
(SELECT o.group_name = t.group_name AND o.claim_id IS NOT NULL AND o.expires_at > statement_timestamp()
                     FROM {job} AS o WHERE o.id = t.id)"""

# One take with a limit at a time for each queue.
TAKE_QUEUE = "SELECT pg_advisory_xact_lock(hashtextextended($1::text, {lock_seed}))"
# The notes of claims that are over; and how long that took.
CLEAR = f"""\
WITH gone AS (
    DELETE FROM {{turn}} AS t
    WHERE t.queue = $1::text
      AND {_NOTED} IS NOT TRUE
    RETURNING t.id
)
SELECT count(*), extract(epoch FROM clock_timestamp() - statement_timestamp())::float8 FROM gone
"""


def _take(limit: str, examined: str) -> str:
    """Of those that are looked at, one after the other and no further than is needed, the ones that have their turn.

    These are the jobs of which fewer than the limit (a parameter) are before them, or are claimed behind them.
    """
    return f"""\
), seen AS MATERIALIZED (
    SELECT f.* FROM looked AS l CROSS JOIN LATERAL (
        SELECT {SEEN}, j.group_name
        FROM {{job}} AS j
        WHERE j.id = l.id AND j.due_at <= statement_timestamp() AND {FREE}
            AND (j.group_name IS NULL OR NOT EXISTS (
                SELECT FROM {{job}} AS o WHERE o.queue = $1::text AND o.group_name = j.group_name AND o.id < j.id
                UNION ALL
                SELECT FROM {{turn}} AS t
                WHERE t.queue = $1::text AND t.group_name = j.group_name AND t.id > j.id
                AND {_NOTED}
                OFFSET {limit}::integer - 1))
        FOR UPDATE SKIP LOCKED
    ) AS f
    LIMIT $3::integer
), noted AS (
    INSERT INTO {{turn}} (queue, group_name, id)
    SELECT $1::text, s.group_name, s.id FROM seen AS s WHERE s.group_name IS NOT NULL ON CONFLICT DO NOTHING
), {CLAIM}
UNION ALL  -- how many were examined in vain
SELECT ROW((SELECT count(*) FROM {examined})::integer), NULL, NULL, NULL, NULL,
    extract(epoch FROM clock_timestamp() - statement_timestamp())::float8
WHERE NOT EXISTS (SELECT FROM seen)
"""


# The first in their order, within the stretches. What others of its group that are free precede need not be looked at.
TAKE_IN_ORDER = f"""\
WITH {UNTOLD}, first AS MATERIALIZED (
    SELECT f.*
    FROM {STRETCHES}
    CROSS JOIN LATERAL (
        SELECT j.id, -j.priority AS rank, j.due_at, j.group_name
        FROM {{job}} AS j
        WHERE {FREE_THERE}
        ORDER BY -j.priority, j.due_at, j.id + 0 LIMIT $14::integer
    ) AS f
    LIMIT $14::integer
), looked AS MATERIALIZED (
    SELECT f.id
    FROM (SELECT f.*, row_number() OVER (PARTITION BY f.group_name ORDER BY f.id) AS nth FROM first AS f) AS f
    WHERE f.group_name IS NULL OR f.nth <= $13::integer
    ORDER BY f.rank, f.due_at, f.id
{_take("$13", "first")}{TOLD_OF_UNTOLD}"""

# The first of each group, found by a step in the index for each of them. For how many jobs without a group it looks is
# the last parameter, 0 as a rule: there is no index on them, so that all others are passed over.
TAKE_BY_GROUPS = f"""\
WITH RECURSIVE groups (name) AS (
    (SELECT j.group_name FROM {{job}} AS j WHERE j.queue = $1::text AND j.group_name IS NOT NULL
     ORDER BY j.group_name, j.id LIMIT 1)
    UNION ALL
    SELECT (SELECT j.group_name FROM {{job}} AS j WHERE j.queue = $1::text AND j.group_name > g.name
            ORDER BY j.group_name, j.id LIMIT 1)
    FROM groups AS g WHERE g.name IS NOT NULL
), first AS (
    SELECT h.id, -h.priority AS rank, h.due_at
    FROM groups AS g CROSS JOIN LATERAL (
        SELECT j.id, j.priority, j.due_at, {FREE} AS free FROM {{job}} AS j
        WHERE j.queue = $1::text AND j.group_name = g.name ORDER BY j.group_name, j.id LIMIT $6::integer
    ) AS h
    WHERE h.free AND h.due_at <= statement_timestamp()
    UNION ALL
    (SELECT j.id, -j.priority, j.due_at FROM {{job}} AS j
     WHERE j.queue = $1::text AND j.group_name IS NULL AND j.due_at <= statement_timestamp() AND {FREE}
     ORDER BY -j.priority, j.due_at, j.id + 0 LIMIT $7::integer)
), looked AS MATERIALIZED (
    SELECT f.id FROM first AS f ORDER BY f.rank, f.due_at, f.id
{_take("$6", "looked")}"""

VERBS = "TAKE_QUEUE CLEAR TAKE_IN_ORDER TAKE_BY_GROUPS".split()
