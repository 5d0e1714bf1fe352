"""The SQL of the MySQL store: the tables, and the statements of each verb, in what MySQL 8 and MariaDB 10.6 share.

Every statement is a transaction of its own under READ COMMITTED. A conditional write looks at the row that it has
locked, also when it had to wait for it. For locks no transaction spans two statements: a program that is stopped
between them would keep everybody else from the rows it had locked. (Permits need one: see dibs.stores.mysql_pools.)

A row whose ``take`` is not NULL is a slot of a name with permits. Statements for locks leave it alone, and those for
permits leave a lock's row alone, so that a name is never both.

Statements carry their values as literals. Those for many rows mostly take one JSON document, whose rows drive a join:
each is looked up by the primary key, in the order of the document, which is sorted by name, so that two clients never
lock rows in opposite orders. The planner is told so (STRAIGHT_JOIN, FORCE INDEX), since a plan that scans the table
would lock what belongs to others. No assignment reads a column that another one writes: in which order they are
made differs between statements for one table and for several.

``{lease}`` and the other names in braces are replaced once, ``{asked}`` by ``asked()``, ``%s`` by values.
"""

from __future__ import annotations

from dibs.store import ANY_TICKET, LAST_TICKET, LINE_GRACE_S

# Of the tables. Where a later dibs has written a greater one, this one makes no tables.
VERSION = 1
READ_VERSION = "SELECT value FROM {meta} WHERE what = 'version'"
# In this order: whoever finds the leases finds the other tables, too, while another is still making them. (Who finds no
# floor yet makes it.)
SCHEMA = """\
CREATE TABLE IF NOT EXISTS {meta} (
    what  VARBINARY(64) NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
INSERT INTO {meta} (what, value) VALUES ('version', {version}) ON DUPLICATE KEY UPDATE value = value;
CREATE TABLE IF NOT EXISTS {line} (
    name     VARBINARY(400) NOT NULL,
    ticket   BIGINT NOT NULL AUTO_INCREMENT,
    claim_id VARBINARY(400) NOT NULL,
    wake     VARBINARY(400) NOT NULL,       -- the client that waits
    seen_at  DATETIME(6) NOT NULL,
    take     INT NOT NULL DEFAULT 1,
    PRIMARY KEY (name, ticket),
    KEY (ticket)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
CREATE TABLE IF NOT EXISTS {pool} (         -- names with permits: semaphores, locks for readers and writers
    name          VARBINARY(400) NOT NULL PRIMARY KEY,
    permits       INT NOT NULL,
    fencing_token BIGINT NOT NULL           -- the last that was granted
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
CREATE TABLE IF NOT EXISTS {guard} (        -- rows that transactions lock in which a lease is pinned
    name VARBINARY(400) NOT NULL,
    slot INT NOT NULL,
    PRIMARY KEY (name, slot)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
CREATE TABLE IF NOT EXISTS {lease} (
    name          VARBINARY(400) NOT NULL,  -- UTF-8, compared byte by byte: every collation folds something
    slot          INT NOT NULL,
    holder        VARCHAR(1000),
    acquired_at   DATETIME(6) NOT NULL,     -- since; all times are UTC
    expires_at    DATETIME(6) NOT NULL,     -- until; of a released row: when it was released
    fencing_token BIGINT NOT NULL,
    info          TEXT,
    claim_id      VARBINARY(400),           -- NULL: released
    last_ticket   BIGINT NOT NULL DEFAULT 0, -- of the line; 0: nobody waits
    take          INT,                      -- of how many permits, where the name has permits; NULL: it is a lock
    PRIMARY KEY (name, slot)
) ENGINE = InnoDB, ROW_FORMAT = DYNAMIC, DEFAULT CHARACTER SET utf8mb4;
-- What the tokens of new names begin above. Where that was lost, far above all that are known: more were granted.
INSERT INTO {meta} (what, value) SELECT 'token_floor', COALESCE(MAX(token) + 1099511627776, 0) FROM (
    SELECT MAX(fencing_token) AS token FROM {lease} UNION ALL SELECT MAX(fencing_token) FROM {pool}
) AS known WHERE NOT EXISTS (SELECT 1 FROM {meta} AS m WHERE m.what = 'token_floor')
ON DUPLICATE KEY UPDATE {meta}.value = {meta}.value;
"""

# The clock: when the server began with the statement, in UTC whatever the time zone (see dibs.stores.mysql).
NOW = "UTC_TIMESTAMP(6)"
EPOCH = "'1970-01-01 00:00:00'"
CLOCK = f"SELECT TIMESTAMPDIFF(MICROSECOND, {EPOCH}, {NOW})"

# What our sessions differ in from how the server is set up. Strict, so that nothing is ever cut short. A COMMIT that
# began the next transaction at once (completion_type) would leave uncommitted what follows in autocommit. The others
# refuse, or cut short, what reads or writes many rows (the greatest sql_select_limit is none; DEFAULT, the global one).
SETTINGS = (
    "SET SESSION autocommit = 1, SESSION completion_type = 0,"
    " SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', SESSION sql_safe_updates = 0,"
    " SESSION sql_big_selects = 1, SESSION sql_select_limit = 18446744073709551615,"
    " SESSION innodb_lock_wait_timeout = %d, SESSION lock_wait_timeout = %d, SESSION group_concat_max_len = 1048576"
)
# MariaDB makes a join of a long list, and would scan the table for it. And it can end a transaction whose client sends
# nothing any more. MySQL cannot, but it can end a connection: those that have had a transaction are ended when idle.
ON_MARIADB = "SET SESSION in_predicate_conversion_threshold = 0, SESSION idle_transaction_timeout = %d"
ON_MYSQL = "SET SESSION wait_timeout = %d"
# MariaDB 11.6 began to refuse a lock on a row that has changed since the statement, or the transaction, first looked. A
# conditional write looks at the row that it has locked, and that is what we want to write.
NO_SNAPSHOT = "SET SESSION innodb_snapshot_isolation = OFF"
NO_SNAPSHOT_FOR = "SET STATEMENT innodb_snapshot_isolation = OFF FOR "
# MariaDB takes a DELETE that joins for one without a key, whichever it uses.
UNSAFE_FOR = "SET STATEMENT sql_safe_updates = OFF FOR "
UNSAFE_NO_SNAPSHOT_FOR = "SET STATEMENT sql_safe_updates = OFF, innodb_snapshot_isolation = OFF FOR "
# Of several servers that take writes one tells what it has applied, and may be seconds behind what others committed:
# a client that comes from one of those would not find its leases and jobs. So each statement, reading or writing, waits
# for that. (Of a group with one primary a new one may be behind; as shipped, it lets nobody in then.)
CAUSAL_GALERA = "SET SESSION wsrep_sync_wait = 7"
CAUSAL_GROUP = "SET SESSION group_replication_consistency = 'BEFORE'"
# (Whether transactions may write is called tx_read_only by MariaDB before 11.1, transaction_read_only by others. It is
# a default: what keeps writers from a server is read_only.)
ISOLATION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE"
FACTS = (
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'innodb_doublewrite',"
    " 'sync_binlog', 'log_bin', 'binlog_format', 'read_only', 'super_read_only', 'wsrep_on', 'wsrep_cluster_address',"
    " 'group_replication_group_name', 'group_replication_single_primary_mode', 'group_replication_consistency',"
    " 'max_allowed_packet', 'auto_increment_increment', 'innodb_snapshot_isolation', 'lower_case_table_names',"
    " 'hostname', 'port', 'server_id')"
)
TLS = "SHOW SESSION STATUS WHERE Variable_name = 'Ssl_cipher' AND Value <> ''"
REPLICAS = (
    "SHOW GLOBAL STATUS WHERE Variable_name IN ('Slaves_connected', 'Rpl_semi_sync_master_status',"
    " 'Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_status', 'Rpl_semi_sync_source_clients',"
    " 'wsrep_cluster_size')"
)
ENGINES = "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE()"

# The rows of a JSON document as a table: its columns, and where in each of the document's arrays they stand. Texts are
# in hexadecimal, NULL where there is none.
_COLUMNS = {
    "name": "name VARCHAR(800) CHARACTER SET latin1 PATH '$[{}]'",
    "claim_id": "claim_id VARCHAR(800) CHARACTER SET latin1 PATH '$[{}]'",
    "wake": "wake VARCHAR(800) CHARACTER SET latin1 PATH '$[{}]'",
    "holder": "holder TEXT CHARACTER SET latin1 PATH '$[{}]'",
    "info": "info TEXT CHARACTER SET latin1 PATH '$[{}]'",
    "us": "us BIGINT PATH '$[{}]'",
    "ticket": "ticket BIGINT PATH '$[{}]'",
    "slot": "slot INT PATH '$[{}]'",
    "take": "take INT PATH '$[{}]'",
    "permits": "permits INT PATH '$[{}]'",
}


def quoted(name: str) -> str:
    """A table's or a trigger's name as it stands in a statement."""
    return "`" + name.replace("`", "``") + "`"


def asked(*columns: str) -> str:
    """The document as a table of these columns, called ``a``; ``i`` is the row's number from 1."""
    paths = ", ".join(_COLUMNS[column].format(index) for index, column in enumerate(columns))
    return f"JSON_TABLE('%s', '$[*]' COLUMNS (i FOR ORDINALITY, {paths})) AS a"


def locking(table: str) -> str:
    """What locks the rows of this table that a SELECT with a document finds, which MySQL refuses to lock, too.

    (The table is named in a comment that MySQL reads and MariaDB does not; there it locks what can be locked.)
    """
    return f"FOR UPDATE /*!80000 OF {table} */"


_TEXT = "CONVERT(UNHEX(a.{0}) USING utf8mb4)"
# Given back, or over and with no row that may be locked by a transaction in which it is pinned (see PIN).
UNPINNED = "NOT EXISTS (SELECT 1 FROM {guard} AS g WHERE g.name = {lease}.name AND g.slot = {lease}.slot)"
_FREE = f"(l.claim_id IS NULL OR l.expires_at <= {NOW} AND {{unpinned}})"
GRACE = f"{NOW} - INTERVAL {round(LINE_GRACE_S * 1e6)} MICROSECOND"
_LEASE = "{lease} AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(a.name) AND l.slot = 1"

# -- acquire ----------------------------------------------------------------------------------------------------------

# A name that is free, and for which nobody waits, or in line nobody before the asker. ``last_ticket`` is the greatest
# ticket in line, so that newcomers need not look there, which would cost them half as much again. It is raised after
# the place was taken, and set to 0 by a grant to a ticket as great: so it is not 0 while somebody waits who has been
# told his ticket. A claim that holds already is left to REPEAT. A lease that is pinned has one that is not 0 either, so
# that newcomers need not look at pins.

# One name. The new token comes back in the OK packet, so this is the only round trip of most acquires.
_GRANT_ONE = f"""\
UPDATE {{lease}} AS l SET l.claim_id = x'%s', l.holder = _utf8mb4 x'%s', l.info = %s,
l.fencing_token = LAST_INSERT_ID(l.fencing_token + 1),
l.acquired_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), l.expires_at = {NOW} + INTERVAL %d MICROSECOND"""
_FREE_ONE = f"""
WHERE l.name = x'%s' AND l.slot = 1 AND l.take IS NULL
AND (l.claim_id IS NULL OR l.expires_at <= {NOW} AND l.claim_id <> x'%s'"""
GRANT_ONE = _GRANT_ONE + _FREE_ONE + ") AND l.last_ticket = 0"
GRANT_ONE_IN_LINE = f"""\
{_GRANT_ONE}, l.last_ticket = IF(l.last_ticket <= %d, 0, l.last_ticket){_FREE_ONE}
AND {{unpinned}}) AND NOT EXISTS (
SELECT 1 FROM {{line}} AS w WHERE w.name = x'%s' AND w.ticket < %d AND w.claim_id <> x'%s'
AND GREATEST(w.seen_at, l.expires_at) > {GRACE})"""

# Many names: what they write differs from row to row, so each of these values is a search tree by name. A join with the
# document takes half as long again. That is left to the line, where the tickets differ, too.
GRANT_MANY = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET claim_id = %s, holder = %s, info = %s,
fencing_token = fencing_token + 1, acquired_at = {NOW}, expires_at = {NOW} + INTERVAL %s MICROSECOND
WHERE name IN (%s) AND slot = 1 AND take IS NULL AND last_ticket = 0
AND (claim_id IS NULL OR expires_at <= {NOW} AND claim_id NOT IN (%s))"""
_TICKET = f"COALESCE(a.ticket, {LAST_TICKET})"
GRANT_MANY_IN_LINE = f"""\
UPDATE {{asked}} STRAIGHT_JOIN {_LEASE}
SET l.claim_id = UNHEX(a.claim_id), l.holder = {_TEXT.format("holder")}, l.info = {_TEXT.format("info")},
l.fencing_token = l.fencing_token + 1, l.acquired_at = {NOW}, l.expires_at = {NOW} + INTERVAL a.us MICROSECOND,
l.last_ticket = IF(l.last_ticket <= {_TICKET}, 0, l.last_ticket)
WHERE l.take IS NULL AND (l.claim_id IS NULL OR l.expires_at <= {NOW} AND l.claim_id <> UNHEX(a.claim_id)
AND {{unpinned}}) AND NOT EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = l.name AND w.ticket < {_TICKET}
AND w.claim_id <> UNHEX(a.claim_id) AND GREATEST(w.seen_at, l.expires_at) > {GRACE})"""

# A lease in force changes hands; the token comes back in the OK packet. The second is for the repetition by the claim
# that holds already: however late, it never shortens what a renewal gave.
TRANSFER = f"""\
UPDATE {{lease}} AS l SET l.fencing_token = LAST_INSERT_ID(l.fencing_token + 1),
l.acquired_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), l.expires_at = {NOW} + INTERVAL %d MICROSECOND,
l.holder = _utf8mb4 x'%s', l.info = %s, l.claim_id = x'%s'
WHERE l.name = x'%s' AND l.slot = 1 AND l.take IS NULL AND l.claim_id = x'%s' AND l.expires_at > {NOW}
AND {{unpinned}}"""
TRANSFERRED = f"""\
UPDATE {{lease}} AS l SET l.expires_at = GREATEST(l.expires_at, {NOW} + INTERVAL %d MICROSECOND)
WHERE l.name = x'%s' AND l.slot = 1 AND l.take IS NULL AND l.claim_id = x'%s' AND l.expires_at > {NOW}"""

# Which of the claims hold their names now. One row comes back for all: a row each would take as long to read as to
# grant.
OURS = f"""\
SELECT GROUP_CONCAT(a.i, ' ', l.fencing_token, ' ', TIMESTAMPDIFF(MICROSECOND, {EPOCH}, l.acquired_at))
FROM {{asked}} STRAIGHT_JOIN {_LEASE} WHERE l.claim_id = UNHEX(a.claim_id) AND l.take IS NULL"""

# An acquire repeated by the claim that holds. However late, it never shortens what a renewal gave.
REPEAT = f"""\
UPDATE {{asked}} STRAIGHT_JOIN {_LEASE}
SET l.holder = {_TEXT.format("holder")}, l.info = {_TEXT.format("info")},
l.expires_at = GREATEST(l.expires_at, {NOW} + INTERVAL a.us MICROSECOND)
WHERE l.claim_id = UNHEX(a.claim_id) AND l.take IS NULL"""

# Whoever is granted takes the line before it along.
CLEAR = """\
DELETE w FROM {asked} STRAIGHT_JOIN {line} AS w FORCE INDEX (PRIMARY) ON w.name = UNHEX(a.name)
AND w.ticket <= a.ticket"""

# What was refused: who holds it, for how long, where the asker stands, and what tells that it is no lock. Nothing is
# locked.
SEEN = f"""\
SELECT a.i, l.fencing_token, l.holder, TIMESTAMPDIFF(MICROSECOND, {EPOCH}, l.acquired_at), {_FREE},
TIMESTAMPDIFF(MICROSECOND, {NOW}, l.expires_at), l.claim_id = UNHEX(a.claim_id),
(SELECT w.ticket FROM {{line}} AS w WHERE w.name = UNHEX(a.name) AND w.claim_id = UNHEX(a.claim_id)
AND (a.ticket IS NULL OR w.ticket = a.ticket) ORDER BY w.ticket LIMIT 1),
EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = UNHEX(a.name) AND w.claim_id <> UNHEX(a.claim_id)
AND (a.ticket IS NULL OR w.ticket < a.ticket) AND GREATEST(w.seen_at, l.expires_at) > {GRACE}),
l.take, (SELECT p.permits FROM {{pool}} AS p WHERE p.name = UNHEX(a.name))
FROM {{asked}} LEFT JOIN {_LEASE}"""

# The rows of new names. The floor is locked against a purge that would raise it between its reading here and the new
# row; it alone, since MySQL refuses to lock the document. Where somebody else has made the row, be it a lock's or a
# pool's first slot, that one stays as it is.
MAKE = f"""\
INSERT INTO {{lease}} (name, slot, claim_id, holder, fencing_token, acquired_at, expires_at, info)
SELECT UNHEX(a.name), 1, UNHEX(a.claim_id), {_TEXT.format("holder")}, m.value + 1, {NOW},
{NOW} + INTERVAL a.us MICROSECOND, {_TEXT.format("info")}
FROM {{asked}} STRAIGHT_JOIN (SELECT value FROM {{meta}} WHERE what = 'token_floor' LOCK IN SHARE MODE) AS m
WHERE TRUE ON DUPLICATE KEY UPDATE slot = {{lease}}.slot"""

LINE_UP = f"""\
INSERT INTO {{line}} (name, claim_id, wake, seen_at)
SELECT UNHEX(a.name), UNHEX(a.claim_id), UNHEX(a.wake), {NOW} FROM {{asked}}"""
# Which places they got, as OURS.
PLACES = """\
SELECT GROUP_CONCAT(a.i, ' ', w.ticket) FROM {asked} STRAIGHT_JOIN {line} AS w FORCE INDEX (PRIMARY)
ON w.name = UNHEX(a.name) AND w.claim_id = UNHEX(a.claim_id)"""
# A waiter is seen alive; one that was passed over while it slept comes back to the place it had.
STILL_THERE = f"""\
INSERT INTO {{line}} (name, ticket, claim_id, wake, seen_at)
SELECT UNHEX(a.name), a.ticket, UNHEX(a.claim_id), UNHEX(a.wake), {NOW} FROM {{asked}}
ON DUPLICATE KEY UPDATE seen_at = {NOW}"""
# After either, and before anybody is told.
LAST_TICKETS = f"UPDATE {{asked}} STRAIGHT_JOIN {_LEASE} SET l.last_ticket = GREATEST(l.last_ticket, a.ticket)"

# -- renew, release ---------------------------------------------------------------------------------------------------

_SLOT = "{lease} AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(a.name) AND l.slot = a.slot"
_IN_FORCE = f"l.claim_id = UNHEX(a.claim_id) AND l.expires_at > {NOW}"

# Each moves the end, if only by the smallest step: who watches a lease sees that it was renewed (END).
RENEW = f"""\
UPDATE {{asked}} STRAIGHT_JOIN {_SLOT}
SET l.expires_at = GREATEST(l.expires_at + INTERVAL 1 MICROSECOND, {NOW} + INTERVAL a.us MICROSECOND)
WHERE {_IN_FORCE}"""
IN_FORCE = f"SELECT GROUP_CONCAT(a.i) FROM {{asked}} STRAIGHT_JOIN {_SLOT} WHERE {_IN_FORCE}"

_RELEASED = f"claim_id = NULL, holder = NULL, info = NULL, expires_at = {NOW}"
RELEASE_ONE = f"""\
UPDATE {{lease}} SET {_RELEASED}
WHERE name = x'%s' AND slot = %d AND claim_id = x'%s' AND expires_at > {NOW}"""
# In which slots the claims are that were never told theirs, as OURS.
SLOTS = f"""\
SELECT GROUP_CONCAT(a.i, ' ', l.slot)
FROM {{asked}} STRAIGHT_JOIN {{lease}} AS l FORCE INDEX (PRIMARY) ON l.name = UNHEX(a.name) WHERE {_IN_FORCE}"""
# What all of them write is the same, so that no join is needed, which takes twice as long. By name again, so that every
# planner sees ranges of the primary key, which it visits in order.
_THESE = f"WHERE name IN (%s) AND (name, slot, claim_id) IN (%s) AND expires_at > {NOW}"
RELEASE = f"UPDATE {{lease}} FORCE INDEX (PRIMARY) SET {_RELEASED} {_THESE}"
# Kept for a while: under a claim that nobody has.
KEEP = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET claim_id = '', info = COALESCE(%s, info),
expires_at = {NOW} + INTERVAL %s MICROSECOND {_THESE}"""
DEPART = f"""\
DELETE w FROM {{asked}} STRAIGHT_JOIN {{line}} AS w FORCE INDEX (PRIMARY) ON w.name = UNHEX(a.name)
AND w.claim_id = UNHEX(a.claim_id) AND (w.ticket = a.ticket OR a.ticket = {ANY_TICKET})"""

# -- pins -------------------------------------------------------------------------------------------------------------

# MySQL has no locks for a transaction but those on rows. So a lease that is to be pinned gets a row of its own, made
# beforehand, which the caller's transaction locks; it reads the row as it is now, whatever its snapshot is. While the
# row is there, an expired lease is not taken; whoever wants it tries whether the row is locked, and if not, deletes it.
# The clock is what makes that hold: a statement that did not see the row began before the row was made, so before the
# renewal that the guard ends with, and by its own time that lease is not over.
GUARD = "INSERT IGNORE INTO {guard} (name, slot) VALUES (x'%s', %d)"
# From here on newcomers go where pins are looked at.
MARK = """\
UPDATE {lease} SET last_ticket = GREATEST(last_ticket, 1)
WHERE name = x'%s' AND slot = %d AND claim_id = x'%s' AND take IS NULL"""
SERVER = "CONCAT_WS(' ', @@hostname, @@port, @@server_id)"
PIN = f"SELECT {SERVER} FROM {{database}}.{{guard}} WHERE name = x'%s' AND slot = %d LOCK IN SHARE MODE"
# The row, unless it is locked.
UNLOCKED = "SELECT 1 FROM {guard} WHERE name = x'%s' AND slot = %d FOR UPDATE SKIP LOCKED"
UNLOCKED_OF = "SELECT name, slot FROM {guard} WHERE name IN (%s) ORDER BY name, slot FOR UPDATE SKIP LOCKED"
# (Told in a list, MariaDB may scan the table for them, and wait for what others have pinned.)
_LISTED = "{asked} STRAIGHT_JOIN {%s} AS x FORCE INDEX (PRIMARY) ON x.name = UNHEX(a.name) AND x.slot = a.slot"
# Of these rows, those whose leases are over. Asked once they are locked: nobody is granted what they stand for before
# they are deleted, so what is over then stays so.
_OVER = f"l.name IS NULL OR l.claim_id IS NULL OR l.expires_at <= {NOW}"
PINS_OVER = f"SELECT UNHEX(a.name), a.slot FROM {{asked}} LEFT JOIN {_SLOT} WHERE {_OVER}"
UNGUARD = "DELETE x FROM " + _LISTED % "guard"
# Those of leases that are no more.
UNLOCKED_REST = """\
SELECT g.name, g.slot FROM {guard} AS g
WHERE NOT EXISTS (SELECT 1 FROM {lease} AS l WHERE l.name = g.name AND l.slot = g.slot)
ORDER BY g.name, g.slot LIMIT 1000 FOR UPDATE SKIP LOCKED"""

# -- hints ------------------------------------------------------------------------------------------------------------

# Which names are free while a waiter of this client is first in line, or have so many permits left that it comes to the
# first of its waiters, or are not known any more although somebody waits for them.
LOOK = f"""\
SELECT GROUP_CONCAT(a.i) FROM {{asked}} LEFT JOIN {_LEASE} LEFT JOIN {{pool}} AS p ON p.name = UNHEX(a.name)
WHERE l.name IS NULL AND p.name IS NULL AND EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = UNHEX(a.name))
OR l.take IS NULL AND {_FREE} AND
(SELECT w.wake FROM {{line}} AS w WHERE w.name = l.name ORDER BY w.ticket LIMIT 1) = x'%s'
OR p.permits - (SELECT COALESCE(SUM(h.take), 0) FROM {{lease}} AS h
WHERE h.name = p.name AND h.claim_id IS NOT NULL AND h.expires_at > {NOW}) >=
(SELECT SUM(v.take) FROM {{line}} AS v WHERE v.name = p.name AND v.seen_at > {GRACE} AND v.ticket <=
(SELECT MIN(w.ticket) FROM {{line}} AS w WHERE w.name = p.name AND w.seen_at > {GRACE} AND w.wake = x'%s'))"""

# -- see and mend -----------------------------------------------------------------------------------------------------

LIST = f"""\
SELECT l.name, l.slot, l.holder, l.fencing_token, TIMESTAMPDIFF(MICROSECOND, {EPOCH}, l.acquired_at),
TIMESTAMPDIFF(MICROSECOND, {EPOCH}, l.expires_at), TIMESTAMPDIFF(MICROSECOND, {NOW}, l.expires_at), l.info,
(SELECT COUNT(*) FROM {{line}} AS w WHERE w.name = l.name), COALESCE(l.take, 1)
FROM {{lease}} AS l
WHERE l.name >= x'%s' AND l.name < x'%s' AND l.claim_id IS NOT NULL AND l.expires_at > {NOW}
ORDER BY l.name, l.slot"""

# A broken lease keeps its row until it would have expired, under a claim that nobody has.
BREAK = f"""\
UPDATE {{lease}} SET claim_id = ''
WHERE name = x'%s' AND fencing_token = %d AND claim_id IS NOT NULL AND expires_at > {NOW}"""
# The same for a lock that still is as it was seen (dibs.observing), whether or not it has been broken.
END = f"""\
UPDATE {{lease}} SET claim_id = ''
WHERE name = x'%s' AND slot = 1 AND take IS NULL AND fencing_token = %d AND claim_id IS NOT NULL
AND expires_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH})"""
# At once, that is, unless it is pinned: so it is as one that has expired, not as one that was given back.
BREAK_NOW = f"""\
UPDATE {{lease}} SET claim_id = '', holder = NULL, info = NULL, expires_at = {NOW}
WHERE name = x'%s' AND fencing_token = %d AND claim_id IS NOT NULL AND expires_at > {NOW}"""

# A purge raises the floor first, then deletes rows whose tokens lie under it: between the two, and whatever happens to
# either, no name can begin below a token that was granted. Not those with somebody in line for whom they are kept.
# (Pools go as a whole: see dibs.stores.mysql_pools.)
PURGE_ROWS = 5000
_OLD = f"""\
l.name >= x'%s' AND l.name < x'%s'
AND l.take IS NULL AND l.expires_at <= {NOW} - INTERVAL %d MICROSECOND AND {_FREE} AND NOT EXISTS (
SELECT 1 FROM {{line}} AS w WHERE w.name = l.name AND GREATEST(w.seen_at, l.expires_at) > {GRACE})"""
PURGE_FLOOR = f"""\
UPDATE {{meta}} SET value = GREATEST(value, (SELECT COALESCE(MAX(l.fencing_token), 0) FROM {{lease}} AS l WHERE {_OLD}))
WHERE what = 'token_floor'"""
# (What a transaction of somebody's has changed is left for another time.)
PURGE_SOME = f"""\
SELECT l.name, l.slot FROM {{lease}} AS l WHERE {_OLD}
AND l.fencing_token <= (SELECT value FROM {{meta}} WHERE what = 'token_floor')
ORDER BY l.name, l.slot LIMIT {PURGE_ROWS} {locking("l")} SKIP LOCKED"""
PURGE_THESE = "DELETE x FROM " + _LISTED % "lease"
# The places of waiters that died in line for rows that are gone.
PURGE_LINE = f"""\
DELETE w FROM {{line}} AS w LEFT JOIN {{lease}} AS l ON l.name = w.name
WHERE w.name >= x'%s' AND w.name < x'%s' AND l.name IS NULL AND w.seen_at <= {GRACE}"""
