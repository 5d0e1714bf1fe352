"""The SQL of queues on MySQL and MariaDB: the tables, and the statements of each act, in what both servers share.

*Locks.* The rows of the live jobs lie in the order in which they are claimed. A take finds them in that order, skips
those that somebody has locked, and changes no column of the primary key; it never waits for anybody. Every other act
names jobs by their ids, through an index, in the order of the ids. So no two acts wait for each other in a circle, but
where jobs move in the claim order: those that are to be tried again, and those that a put replaces. For each of these
InnoDB looks for its like in the unique indexes, and locks the entry behind it as well, which is another put's or key's.
Several moved at once can so meet somebody who ends several: one time in 2,000 where eight threads do nothing else. The
server then rolls one of the two back, and dibs begins it again. (It would take 60 us more for each put to do without
that uniqueness, and a commit for each job to move one at a time.) The index of the ids is not declared unique for the
same reason: an AUTO_INCREMENT makes them so.

Values stand in the text as numbers or hexadecimal, as everywhere in this store, so a statement is also good for
somebody else's connection. ``{job}`` and the other names in braces are replaced once, ``%s`` by values.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.stores.mysql_sql import EPOCH, NOW, SERVER, locking

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = """\
CREATE TABLE IF NOT EXISTS {job_end} (
    id            BIGINT NOT NULL PRIMARY KEY COMMENT 'as it was when the job was live',
    queue         VARBINARY(400) NOT NULL,
    state         VARCHAR(10) NOT NULL COMMENT 'done, dead or cancelled',
    ended_at      DATETIME(6) NOT NULL COMMENT 'all times are UTC',
    keep_until    DATETIME(6) COMMENT 'NULL: until it is revived or forgotten',
    payload       MEDIUMTEXT COMMENT 'JSON; NULL: see payload_bytes',
    payload_bytes MEDIUMBLOB,
    result        MEDIUMTEXT COMMENT 'JSON: what it was done with',
    error         MEDIUMTEXT COMMENT 'the last one',
    priority_rank TINYINT NOT NULL COMMENT 'minus the priority',
    due_at        DATETIME(6) NOT NULL,
    job_key       VARBINARY(400),
    job_group     VARBINARY(400),
    tries         INT NOT NULL,
    max_tries     INT NOT NULL COMMENT '0: without limit',
    crashes       INT NOT NULL COMMENT 'claims that expired',
    fencing_token BIGINT NOT NULL COMMENT 'of its last claim',
    holder        VARCHAR(1000) COMMENT 'of its last claim',
    expires_at    DATETIME(6) COMMENT 'of its last claim',
    created_at    DATETIME(6) NOT NULL,
    KEY job_end_state (queue, state, ended_at),
    KEY job_end_keep (keep_until)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4, COMMENT 'jobs that have ended and are kept';
CREATE TABLE IF NOT EXISTS {job} (
    queue         VARBINARY(400) NOT NULL COMMENT 'UTF-8, compared byte by byte, as keys and groups are',
    priority_rank TINYINT NOT NULL COMMENT 'minus the priority: the smallest is taken first',
    due_at        DATETIME(6) NOT NULL COMMENT 'not to be taken before; all times are UTC',
    id            BIGINT NOT NULL AUTO_INCREMENT,
    payload       MEDIUMTEXT COMMENT 'JSON; NULL: see payload_bytes',
    payload_bytes MEDIUMBLOB,
    job_key       VARBINARY(400) COMMENT 'no two live jobs of a queue have the same',
    job_group     VARBINARY(400) COMMENT 'jobs of which only so many are worked at a time',
    tries         INT NOT NULL DEFAULT 0 COMMENT 'claims so far, but for those given back',
    max_tries     INT NOT NULL COMMENT '0: without limit',
    crashes       INT NOT NULL DEFAULT 0 COMMENT 'claims that expired',
    fencing_token BIGINT NOT NULL DEFAULT 0 COMMENT 'of its last claim; it rises with every claim',
    claim_id      VARBINARY(400) COMMENT 'who works it, until expires_at; NULL: nobody',
    holder        VARCHAR(1000) COMMENT 'of its last claim, for people',
    claimed_at    DATETIME(6) COMMENT 'of its last claim',
    expires_at    DATETIME(6) COMMENT 'of its last claim',
    error         MEDIUMTEXT COMMENT 'the last one',
    created_at    DATETIME(6) NOT NULL,
    put_id        VARBINARY(400) COMMENT 'tells a put that is repeated; NULL of a job that was revived',
    put_place     INT COMMENT 'which job of that put',
    PRIMARY KEY (queue, priority_rank, due_at, id),
    KEY job_id (id),
    UNIQUE KEY job_key (queue, job_key),
    UNIQUE KEY job_put (put_id, put_place, queue),
    KEY job_group (queue, job_group, id),
    KEY job_claim (claim_id)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4, COMMENT 'jobs that are to be worked';
"""

IN_FORCE = f"j.claim_id IS NOT NULL AND j.expires_at > {NOW}"
NOT_CLAIMED = f"(j.claim_id IS NULL OR j.expires_at <= {NOW})"


def unix_us(column: str) -> str:
    """A time as microseconds of Unix time."""
    return f"TIMESTAMPDIFF(MICROSECOND, {EPOCH}, {column})"


def at_places(queue: str, places: Sequence[tuple[int, str, int]]) -> str:
    """The condition for rows by their primary keys: the queue (in hexadecimal), and rank, due_at and id of each.

    A list of one tuple would make MariaDB scan the whole table; conditions joined by OR, a thousand times, take it ten
    times as long as a list.
    """
    if len(places) == 1:
        ((rank, due_at, job),) = places
        return f"j.queue = x'{queue}' AND j.priority_rank = {rank:d} AND j.due_at = '{due_at}' AND j.id = {job:d}"
    each = ",".join(f"(x'{queue}',{rank:d},'{due_at}',{job:d})" for rank, due_at, job in places)
    return f"(j.queue, j.priority_rank, j.due_at, j.id) IN ({each})"


# -- put --------------------------------------------------------------------------------------------------------------

PUT = (
    "INSERT INTO {job} (queue, priority_rank, due_at, payload, payload_bytes, job_key, job_group, max_tries,"
    " created_at, put_id, put_place) VALUES %s"
)
# Where the key is a live job's, or the put has been done, that row stays as it is. Nothing else could be waited for.
PUT_UNLESS_THERE = PUT + " ON DUPLICATE KEY UPDATE id = {job}.id"
PUT_PLACES = "SELECT put_place, id FROM {job} FORCE INDEX (job_put) WHERE put_id = x'%s' AND queue = x'%s'"
# In somebody else's transaction: whether that is our server, in each row of what was put, and what takes it back.
_OURS = f"HEX(CONVERT({SERVER} USING utf8mb4)) = '%s'"
OURS = f"SELECT {_OURS}"
PUT_PLACES_AND_OURS = PUT_PLACES.replace("id FROM", f"id, {_OURS} FROM")
UNPUT = "DELETE FROM {job} WHERE put_id = x'%s' AND queue = x'%s'"
WITH_KEYS = (
    f"SELECT j.job_key, j.id, {IN_FORCE} FROM {{job}} AS j FORCE INDEX (job_key)"
    " WHERE j.queue = x'%s' AND j.job_key IN (%s)"
)
LOCK_KEYS = WITH_KEYS + " FOR UPDATE NOWAIT"
# What replaces jobs, a row each, and all of it. One statement for each row took 10,000 of them too long.
REPLACING = (
    "SELECT x'%s' AS job_key, %d AS id, %s AS payload, %s AS payload_bytes, %d AS priority_rank, %s AS due_at,"
    " %s AS job_group, %d AS max_tries, %d AS put_place"
)
REPLACE = f"""\
UPDATE (%s) AS a STRAIGHT_JOIN {{job}} AS j FORCE INDEX (job_key) ON j.queue = x'%s' AND j.job_key = a.job_key
SET j.payload = a.payload, j.payload_bytes = a.payload_bytes, j.priority_rank = a.priority_rank, j.due_at = a.due_at,
j.job_group = a.job_group, j.max_tries = a.max_tries, j.tries = 0, j.crashes = 0, j.error = NULL, j.claim_id = NULL,
j.put_id = x'%s', j.put_place = a.put_place
WHERE j.id = a.id AND {NOT_CLAIMED}"""

# -- take -------------------------------------------------------------------------------------------------------------

# A step in the index, however many jobs there are.
NEXT_RANK = "(SELECT MIN(priority_rank) FROM {job} FORCE INDEX (PRIMARY) WHERE queue = x'%s' AND priority_rank > %d)"
_TAKEN = f"""\
j.id, j.priority_rank, j.due_at, j.payload, j.payload_bytes, j.tries, j.max_tries, j.crashes, j.claim_id IS NOT NULL,
j.fencing_token, {unix_us("j.created_at")}, j.job_key, j.job_group"""
# In the claim order, and without waiting. Nothing, if the claim has jobs already: then it is asked again (TAKEN).
SCAN = f"""\
SELECT {_TAKEN}, {unix_us(NOW)} FROM {{job}} AS j FORCE INDEX (PRIMARY)
WHERE j.queue = x'%s' AND (%s) AND j.due_at <= {NOW} AND {NOT_CLAIMED} AND (
SELECT COUNT(*) FROM {{job}} AS mine FORCE INDEX (job_claim)
WHERE mine.claim_id = x'%s' AND mine.queue = x'%s' AND mine.expires_at > {NOW}) = 0
ORDER BY j.priority_rank, j.due_at, j.id LIMIT %d FOR UPDATE SKIP LOCKED"""
# By the primary key, whose entries the scan has locked, and by nothing else.
CLAIM = f"""\
UPDATE {{job}} AS j FORCE INDEX (PRIMARY) SET j.crashes = j.crashes + (j.id IN (%s)), j.tries = j.tries + 1,
j.fencing_token = %d, j.claim_id = x'%s', j.holder = _utf8mb4 x'%s',
j.claimed_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), j.expires_at = {NOW} + INTERVAL %d MICROSECOND
WHERE %s"""
TAKEN = f"""\
SELECT {_TAKEN}, {unix_us("j.claimed_at")} FROM {{job}} AS j FORCE INDEX (job_claim)
WHERE j.claim_id = x'%s' AND j.queue = x'%s' AND j.expires_at > {NOW} ORDER BY j.priority_rank, j.due_at, j.id"""
# When a job of one priority is due, or a claim on one expires; 0 for one that is ready.
NEXT = f"""\
(SELECT MIN(IF({IN_FORCE}, {unix_us("j.expires_at")} - {unix_us(NOW)}, 0)) FROM {{job}} AS j FORCE INDEX (PRIMARY)
WHERE j.queue = x'%s' AND j.priority_rank = %d AND j.due_at <= {NOW})"""
NEXT_DUE = f"""\
(SELECT {unix_us("MIN(j.due_at)")} - {unix_us(NOW)} FROM {{job}} AS j FORCE INDEX (PRIMARY)
WHERE j.queue = x'%s' AND j.priority_rank = %d AND j.due_at > {NOW})"""

# -- take with a limit ------------------------------------------------------------------------------------------------

# The row that stands for a queue.
LOCK_QUEUE = "SELECT value FROM {meta} WHERE what = x'%s' FOR UPDATE"
# (Servers that all take writes know nothing of each other's locks, but of two who write one row one begins again.)
MARK_LOCK = "UPDATE {meta} SET value = value + 1 WHERE what = x'%s'"
MAKE_LOCK = "INSERT IGNORE INTO {meta} (what, value) VALUES (x'%s', 0)"
_FREE = f"j.due_at <= {NOW} AND {NOT_CLAIMED}"
_IN_ORDER = "ORDER BY j.priority_rank, j.due_at, j.id"
_PLACE = "j.priority_rank, j.due_at, j.id, j.job_group"
# Of so many that are free, those that are among the first of their groups. Nothing, if the claim has jobs already. (To
# MySQL the order of an index is the order of all its columns, or it sorts.)
LOOK = f"""\
SELECT {_PLACE} FROM (
SELECT j.queue, {_PLACE} FROM {{job}} AS j FORCE INDEX (PRIMARY) WHERE %s AND {_FREE} AND (
SELECT COUNT(*) FROM {{job}} AS mine FORCE INDEX (job_claim)
WHERE mine.claim_id = x'%s' AND mine.queue = x'%s' AND mine.expires_at > {NOW}) = 0
{_IN_ORDER} LIMIT %d) AS j
WHERE j.job_group IS NULL OR j.id <= COALESCE((SELECT g.id FROM {{job}} AS g FORCE INDEX (job_group)
WHERE g.queue = j.queue AND g.job_group = j.job_group
ORDER BY g.queue, g.job_group, g.id LIMIT %d, 1), j.id) {_IN_ORDER}"""
# The last of them.
LAST_FREE = f"""\
SELECT {_PLACE} FROM {{job}} AS j FORCE INDEX (PRIMARY) WHERE %s AND {_FREE} {_IN_ORDER} LIMIT %d, 1"""
# Those of these places that are free, without waiting.
LOCK_FREE = f"""\
SELECT {_TAKEN}, {unix_us(NOW)} FROM {{job}} AS j FORCE INDEX (PRIMARY) WHERE %s AND {_FREE} FOR UPDATE SKIP LOCKED"""
# Jobs of these groups that are claimed, and whether that is in force.
WORKED = f"""\
SELECT {_PLACE}, j.expires_at > {NOW} FROM {{job}} AS j FORCE INDEX (job_claim)
WHERE j.claim_id IS NOT NULL AND j.queue = x'%s' AND j.job_group IN (%s)"""
# The first of the group that comes next, and which of them are free; and those without a group.
FIRST_OF_NEXT = f"""\
SELECT {_PLACE}, {_FREE} FROM {{job}} AS j FORCE INDEX (job_group) WHERE j.queue = x'%s' AND j.job_group = (
SELECT MIN(g.job_group) FROM {{job}} AS g FORCE INDEX (job_group) WHERE g.queue = x'%s' AND g.job_group %s)
ORDER BY j.id LIMIT %d"""
UNGROUPED = f"""\
SELECT {_PLACE} FROM {{job}} AS j FORCE INDEX (job_group) WHERE j.queue = x'%s' AND j.job_group IS NULL AND {_FREE}
{_IN_ORDER} LIMIT %d"""
# When the next claim expires.
NEXT_OVER = f"""\
(SELECT {unix_us("MIN(j.expires_at)")} - {unix_us(NOW)} FROM {{job}} AS j FORCE INDEX (job_claim)
WHERE j.claim_id IS NOT NULL AND j.queue = x'%s' AND j.expires_at > {NOW})"""

# -- ends -------------------------------------------------------------------------------------------------------------

# Rows by their ids, or by their primary keys: each is looked up, in the order of the document. A list in a DELETE would
# let MariaDB scan the whole table, and lock all of it, when the planner finds that cheaper, whatever FORCE INDEX says.
BY_IDS = (
    "JSON_TABLE('%s', '$[*]' COLUMNS (id BIGINT PATH '$')) AS a"
    " STRAIGHT_JOIN {job} AS j FORCE INDEX (job_id) ON j.id = a.id"
)
BY_PLACES = (
    "JSON_TABLE('%s', '$[*]' COLUMNS (priority_rank INT PATH '$[0]', due_at DATETIME(6) PATH '$[1]',"
    " id BIGINT PATH '$[2]')) AS a STRAIGHT_JOIN {job} AS j FORCE INDEX (PRIMARY)"
    " ON j.queue = x'%s' AND j.priority_rank = a.priority_rank AND j.due_at = a.due_at AND j.id = a.id"
)
# With one of these, and a condition.
_WHERE = " FROM %s WHERE %s"
LOCK = f"SELECT j.id, j.tries, j.max_tries{_WHERE} {locking('j')}"
LOCK_AT_ONCE = f"{LOCK} NOWAIT"
PLACES = f"SELECT j.priority_rank, j.due_at, j.id{_WHERE}"
REMOVE = f"DELETE j{_WHERE}"
# With an index, and a condition that gives a list of its keys: an UPDATE of one table does as it is told.
_UPDATE = "UPDATE {job} AS j FORCE INDEX (%s) SET "
GIVE_BACK = _UPDATE + "j.claim_id = NULL, j.tries = j.tries - 1 WHERE %s"
TRY_AGAIN = f"{_UPDATE}j.claim_id = NULL, j.error = %s, j.due_at = {NOW} + INTERVAL %d MICROSECOND WHERE %s"
EXTEND = f"{_UPDATE}j.expires_at = GREATEST(j.expires_at, {NOW} + INTERVAL %d MICROSECOND) WHERE %s"
# With the state, the error, the crashes, the result, and until when it is kept.
_SAME = (
    "id, queue, payload, payload_bytes, priority_rank, due_at, job_key, job_group, tries, max_tries, fencing_token,"
    " holder, expires_at, created_at"
)
END = f"""\
INSERT INTO {{job_end}} ({_SAME}, ended_at, state, error, crashes, result, keep_until)
SELECT {", ".join("j." + column for column in _SAME.split(", "))}, {NOW}, %s, %s, %s, %s, %s{_WHERE}"""
KEEP_UNTIL = f"{NOW} + INTERVAL %d MICROSECOND"

# -- what has ended ---------------------------------------------------------------------------------------------------

OVER = f"SELECT id FROM {{job_end}} WHERE keep_until <= {NOW} ORDER BY keep_until LIMIT %d"
ENDED = (
    f"SELECT id FROM {{job_end}} WHERE queue = x'%s' AND ended_at <= {NOW} - INTERVAL %d MICROSECOND%s"
    " AND id > %d ORDER BY id LIMIT %d"
)
# By their ids, looked up as above.
_BY_IDS = (
    "JSON_TABLE('[%s]', '$[*]' COLUMNS (id BIGINT PATH '$')) AS a"
    " STRAIGHT_JOIN {job_end} AS e FORCE INDEX (PRIMARY) ON e.id = a.id"
)
FORGET = f"DELETE e FROM {_BY_IDS}"
ALL_DEAD = "SELECT id FROM {job_end} WHERE queue = x'%s' AND state = 'dead'%s AND id > %d ORDER BY id LIMIT %d"
DEAD = f"SELECT e.id, e.job_key FROM {_BY_IDS} WHERE e.state = 'dead' {locking('e')}"
REVIVE = f"""\
INSERT INTO {{job}} (id, queue, payload, payload_bytes, priority_rank, due_at, job_key, job_group, max_tries,
fencing_token, holder, expires_at, error, created_at)
SELECT id, queue, payload, payload_bytes, priority_rank, {NOW}, job_key, job_group, max_tries,
fencing_token, holder, expires_at, error, created_at FROM {{job_end}} FORCE INDEX (PRIMARY) WHERE id IN (%s)"""

# -- looks ------------------------------------------------------------------------------------------------------------

_STATE = f"IF({IN_FORCE}, 'claimed', IF(j.due_at <= {NOW}, 'ready', 'later'))"


def _shown(state: str, result: str, ended_at: str) -> str:
    return f"""\
j.id, {state}, j.payload, j.payload_bytes, j.priority_rank, j.tries, j.max_tries, j.crashes, j.fencing_token,
{unix_us("j.created_at")}, {unix_us("j.due_at")}, j.job_key, j.job_group, j.holder, {unix_us("j.expires_at")},
j.error, {result}, {ended_at}"""


SHOW_LIVE = f"SELECT {_shown(_STATE, 'NULL', 'NULL')} FROM {{job}} AS j"
SHOW_ENDED = f"SELECT {_shown('j.state', 'j.result', unix_us('j.ended_at'))} FROM {{job_end}} AS j"
FIND_LIVE = SHOW_LIVE + " FORCE INDEX (job_id) WHERE j.id = %d AND j.queue = x'%s'"
FIND_ENDED = SHOW_ENDED + " WHERE j.id = %d AND j.queue = x'%s'"
LIVE_IN = f"""{SHOW_LIVE} FORCE INDEX (PRIMARY) WHERE j.queue = x'%s' AND {_STATE} = '%s'
ORDER BY j.priority_rank, j.due_at, j.id LIMIT %d"""
ENDED_IN = SHOW_ENDED + " WHERE j.queue = x'%s' AND j.state = '%s' ORDER BY j.ended_at DESC, j.id DESC LIMIT %d"
DEPTHS = f"""\
SELECT s.queue, SUM(s.state = 'ready'), SUM(s.state = 'later'), SUM(s.state = 'claimed'),
MAX(IF(s.state = 'ready', s.age, 0)) FROM (SELECT j.queue, {_STATE} AS state,
TIMESTAMPDIFF(MICROSECOND, j.due_at, {NOW}) AS age FROM {{job}} AS j WHERE j.queue >= x'%s' AND j.queue < x'%s') AS s
GROUP BY s.queue"""
DEPTHS_ENDED = "SELECT queue, SUM(state = 'dead') FROM {job_end} WHERE queue >= x'%s' AND queue < x'%s' GROUP BY queue"
# Which queues have something that is free, and whether one of them has something ready among the first that are. Of a
# group only the first job counts: what it is followed by may not have its turn, and a hint that leads to nothing is
# worse than one that is left out.
# (For an EXISTS MariaDB may read all of them first, into a table of its own.)
ANY_FREE = f"""\
SELECT GROUP_CONCAT(a.i) FROM {{asked}} WHERE (
SELECT 1 FROM {{job}} AS j FORCE INDEX (PRIMARY) WHERE j.queue = UNHEX(a.name) AND {_FREE} LIMIT 1) = 1"""
READY = f"""\
(EXISTS (SELECT 1 FROM (
SELECT j.queue, j.id, j.job_group FROM {{job}} AS j FORCE INDEX (PRIMARY) WHERE j.queue = x'%s' AND {_FREE}
{_IN_ORDER} LIMIT %d) AS j
WHERE j.job_group IS NULL OR j.id <= COALESCE((SELECT g.id FROM {{job}} AS g FORCE INDEX (job_group)
WHERE g.queue = j.queue AND g.job_group = j.job_group ORDER BY g.queue, g.job_group, g.id LIMIT 1), j.id)))"""
