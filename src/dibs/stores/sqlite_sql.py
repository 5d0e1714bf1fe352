"""The SQL of the SQLite store: the tables, and every statement.

Times are seconds on the boot clock of the boot that the row names; ``dibs.stores.sqlite`` says why.
"""

from __future__ import annotations

import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs.stores.identifiers import quoted_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Unix time, to the millisecond, which is what SQLite has. Not the caller's: a statement asks once it may write, so who
# comes next is later by this clock, however long a thread stood still between looking at a clock and writing.
WALL_NOW = "round((julianday('now') - 2440587.5) * 86400.0, 3)"

# Of the tables.
VERSION = 2

SCHEMA = """\
CREATE TABLE IF NOT EXISTS {lease} (
    name          TEXT NOT NULL,
    slot          INTEGER NOT NULL,
    claim_id      TEXT,                -- NULL: released
    holder        TEXT,
    fencing_token INTEGER NOT NULL,
    boot          INTEGER NOT NULL,    -- of which boot the times are
    granted_wall  REAL NOT NULL,       -- Unix time, to be read by people
    granted_boot  REAL NOT NULL,       -- seconds on the boot clock
    expires_boot  REAL NOT NULL,       -- seconds on the boot clock: when it is, or was, free
    info          TEXT,
    take          INTEGER,             -- of how many permits, where the name has permits; NULL: the name is a lock
    acquired_at   TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', granted_wall, 'unixepoch')) VIRTUAL,
    expires_at    TEXT GENERATED ALWAYS AS
        (strftime('%Y-%m-%d %H:%M:%f', granted_wall + expires_boot - granted_boot, 'unixepoch')) VIRTUAL,
    PRIMARY KEY (name, slot)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS {line} (
    ticket    INTEGER PRIMARY KEY AUTOINCREMENT,
    name      TEXT NOT NULL,
    claim_id  TEXT NOT NULL,
    seen_boot REAL NOT NULL,           -- when it last asked, on the boot clock
    take      INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS {line_index} ON {line} (name);
CREATE TABLE IF NOT EXISTS {pool} (
    name          TEXT PRIMARY KEY,    -- a name with permits: a semaphore, or a lock for readers and writers
    permits       INTEGER NOT NULL,
    fencing_token INTEGER NOT NULL     -- no slot that has no row any more had a greater one
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS {meta} (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""

# Free for long enough, and not kept for anybody in line.
_OLD = (
    "name >= :first AND name < :end"
    " AND (boot <> :boot OR expires_boot <= :before"
    " AND (expires_boot <= :alive OR name NOT IN (SELECT name FROM {line}))"
    " AND name NOT IN (SELECT name FROM {line} WHERE seen_boot > :alive))"
)
# Pools that nobody has held for long enough, and nobody who is alive waits for.
_EMPTY = (
    "name >= :first AND name < :end AND name NOT IN (SELECT name FROM {lease})"
    " AND name NOT IN (SELECT name FROM {line} WHERE seen_boot > :alive)"
)
# Somebody holds this slot.
_HOLDS = "claim_id IS NOT NULL AND boot = ?5 AND expires_boot > ?6"
# Of many, ?1 has the claims by their names (dibs.stores.sqlite_many). What a grant writes, and where it may be written:
# the name has a row that is free, or this claim's already, and nobody waits for it.
# 2 slot, 3 holder, 4 info, 5 boot, 6 now, 7 until, 8 floor
_MINE = "l.claim_id = a.value AND l.boot = ?5"
_TOKEN = f"CASE WHEN {_MINE} THEN l.fencing_token ELSE max(l.fencing_token, ?8) + 1 END"
_SINCE = f"CASE WHEN {_MINE} THEN l.granted_wall ELSE {{wall_now}} END"
_UNTIL = f"CASE WHEN {_MINE} THEN max(l.expires_boot, ?7) ELSE ?7 END"
_GRANTABLE = (
    f"l.name = a.key AND l.slot = 1 AND l.take IS NULL AND ({_MINE}"
    " OR (l.claim_id IS NULL OR l.boot <> ?5 OR l.expires_boot <= ?6)"
    " AND NOT EXISTS (SELECT 1 FROM {in_line} WHERE name = a.key))"
)
# Which of them are held. An UPDATE … FROM would leave to the planner what it reads first, and where ANALYZE saw few
# rows, that is all of the table.
# 2 boot, 3 now
_THEIRS = (
    "FROM json_each(?1) AS a CROSS JOIN {lease} AS l"
    " WHERE l.name = a.key AND l.slot = 1 AND l.claim_id = a.value AND l.boot = ?2 AND l.expires_boot > ?3"
)


def _by_number(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values, 1)}


# What is given to a statement whose parameters are ?1, ?2 … Python 3.12.0 to 3.12.3 take that for a name, and warn of
# each that is given a value without one (gh-117995).
numbered: Callable[[Sequence[Any]], Any] = _by_number if (3, 12) <= sys.version_info < (3, 12, 4) else tuple

_STATEMENTS = {
    # All that a plain acquire needs. What it writes is a statement of its own, without a RETURNING: each table that a
    # statement makes for itself, be it for one row, takes 90 KB, which cost up to 20 µs in a process whose memory ends
    # there, and is given back to the system each time.
    "read": (
        "SELECT claim_id, fencing_token, holder, boot, granted_wall, expires_boot, take,"
        " EXISTS (SELECT 1 FROM {in_line} WHERE name = ?), {wall_now} FROM {lease} WHERE name = ? AND slot = 1"
    ),
    "wall_now": "SELECT {wall_now}",
    "grant_many": (
        "INSERT INTO {lease} (name, slot, claim_id, holder, fencing_token, boot, granted_wall, granted_boot,"
        f" expires_boot, info) SELECT l.name, ?2, a.value, ?3, {_TOKEN}, ?5, {_SINCE}, ?6, {_UNTIL}, ?4"
        " FROM json_each(?1) AS a CROSS JOIN {lease} AS l"
        f" WHERE {_GRANTABLE} ON CONFLICT (name, slot) DO UPDATE SET claim_id = excluded.claim_id,"
        " holder = excluded.holder, fencing_token = excluded.fencing_token, boot = excluded.boot,"
        " granted_wall = excluded.granted_wall, granted_boot = excluded.granted_boot,"
        " expires_boot = excluded.expires_boot, info = excluded.info"
    ),
    "granted_many": (
        "SELECT json_group_array(l.name), json_group_array(l.fencing_token), json_group_array(l.granted_wall) "
        f"{_THEIRS} AND l.take IS NULL"
    ),
    "held_many": f"SELECT json_group_array(l.name) {_THEIRS}",
    "release_many": (
        "INSERT INTO {lease} (name, slot, fencing_token, boot, granted_wall, granted_boot, expires_boot)"
        f" SELECT l.name, 1, l.fencing_token, l.boot, l.granted_wall, l.granted_boot, ?3 {_THEIRS}"
        " ON CONFLICT (name, slot) DO UPDATE SET claim_id = NULL, holder = NULL, info = NULL,"
        " expires_boot = excluded.expires_boot"
    ),
    "renew_many": (
        "INSERT INTO {lease} (name, slot, fencing_token, boot, granted_wall, granted_boot, expires_boot)"
        " SELECT l.name, 1, l.fencing_token, l.boot, l.granted_wall, l.granted_boot, max(l.expires_boot, ?4)"
        f" {_THEIRS} ON CONFLICT (name, slot) DO UPDATE SET expires_boot = excluded.expires_boot"
    ),
    # A lease in force, of the one claim or, when this is repeated, of the other already.
    "transfer": (
        # 1 name, 2 slot, 3 claim, 4 from, 5 holder, 6 info, 7 boot, 8 now, 9 until, 10 floor, 11 lock
        "UPDATE {lease} SET claim_id = ?3, holder = ?5, info = ?6,"
        " expires_boot = CASE WHEN claim_id = ?3 THEN max(expires_boot, ?9) ELSE ?9 END,"
        " granted_boot = CASE WHEN claim_id = ?3 THEN granted_boot ELSE ?8 END,"
        " granted_wall = CASE WHEN claim_id = ?3 THEN granted_wall ELSE {wall_now} END,"
        " fencing_token = CASE WHEN claim_id = ?3 THEN fencing_token ELSE max(fencing_token, ?10) + 1 END"
        " WHERE name = ?1 AND slot = ?2 AND claim_id IN (?3, ?4) AND boot = ?7 AND expires_boot > ?8"
        " AND (take IS NULL) = ?11 RETURNING fencing_token, granted_wall"
    ),
    "grant": (
        "INSERT OR REPLACE INTO {lease} (name, slot, claim_id, holder, fencing_token, boot, granted_wall, granted_boot,"
        " expires_boot, info) VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?, ?)"
    ),
    "renew": (
        "UPDATE {lease} SET expires_boot = max(expires_boot, ?)"
        " WHERE name = ? AND slot = ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    "release": (
        "UPDATE {lease} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = ?"
        " WHERE name = ? AND slot BETWEEN ? AND ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    # Under a claim that nobody has, so that nothing renews it.
    "release_later": (
        "UPDATE {lease} SET claim_id = '', expires_boot = ?, info = coalesce(?, info)"
        " WHERE name = ? AND slot BETWEEN ? AND ? AND claim_id = ? AND boot = ? AND expires_boot > ?"
    ),
    # What was kept (or broken) in the last boot is kept on in this one, for what the wall clock says is left of it:
    # there is no other clock that goes on while the machine is off. If it was set back, for the whole time once more.
    "carry_over": (
        # 1 boot, 2 now, 3 Unix time, 4 the boot before
        "UPDATE {lease} SET boot = ?1, granted_boot = ?2 + granted_wall - ?3,"
        " expires_boot = ?2 + min(expires_boot - granted_boot, granted_wall + expires_boot - granted_boot - ?3)"
        " WHERE claim_id = '' AND boot = ?4 AND granted_wall + expires_boot - granted_boot > ?3"
    ),
    "ahead": "SELECT 1 FROM {in_line} WHERE name = ? AND ticket < ? AND claim_id <> ? AND seen_boot > ? LIMIT 1",
    "anybody_before": "SELECT 1 FROM {in_line} WHERE name = ? AND ticket < ? LIMIT 1",
    "place": "SELECT ticket FROM {in_line} WHERE name = ? AND claim_id = ?",
    "enter": "INSERT INTO {line} (name, claim_id, seen_boot, take) VALUES (?, ?, ?, ?)",
    "seen": "INSERT OR REPLACE INTO {line} (ticket, name, claim_id, seen_boot, take) VALUES (?, ?, ?, ?, ?)",
    "leave": "DELETE FROM {line} WHERE ticket = ?",
    # With those who ask no more.
    "leave_claim": "DELETE FROM {in_line} WHERE name = ? AND (claim_id = ? OR seen_boot <= ?)",
    "read_pool": (
        "SELECT permits, max(fencing_token,"
        " coalesce((SELECT max(l.fencing_token) FROM {lease} l WHERE l.name = p.name), 0)) FROM {pool} p WHERE name = ?"
    ),
    "last_token": "SELECT coalesce(max(fencing_token), 0) FROM {lease} WHERE name = ?",
    "write_pool": "INSERT OR REPLACE INTO {pool} (name, permits, fencing_token) VALUES (?, ?, ?)",
    "lift_pools": "UPDATE {pool} SET fencing_token = max(fencing_token, ?)",
    # The boot and the greatest token that are known without the table of such things.
    "last_known": (
        "SELECT coalesce((SELECT max(boot) FROM {lease}), 0), (SELECT coalesce(max(token), 0) FROM"
        " (SELECT fencing_token AS token FROM {lease} UNION ALL SELECT fencing_token FROM {pool}))"
    ),
    # Before rows are purged: their tokens.
    "raise_pools": (
        "UPDATE {pool} SET fencing_token = max(fencing_token, coalesce((SELECT max(l.fencing_token) FROM {lease} l"
        " WHERE l.name = {pool}.name), 0)) WHERE name IN (SELECT name FROM {lease} WHERE take IS NOT NULL AND {old})"
    ),
    # The same for a plain acquire of permits.
    "look_at_pool": (
        # 1 name, 2 claim, 3 and 4 how many it takes, of how many, 5 boot, 6 now
        "SELECT coalesce(sum(take), 0) + ?3 <= ?4 AND max(claim_id = ?2) IS NOT TRUE"
        " AND (SELECT permits FROM {pool} WHERE name = ?1) = ?4"
        " AND NOT EXISTS (SELECT 1 FROM {in_line} WHERE name = ?1),"
        " CASE WHEN count(*) = coalesce(max(slot), 0) THEN count(*) + 1 END,"
        " max((SELECT fencing_token FROM {pool} WHERE name = ?1),"
        " coalesce((SELECT max(fencing_token) FROM {lease} WHERE name = ?1), 0)),"
        " {wall_now} FROM {lease} WHERE name = ?1 AND {holds}"
    ),
    "held_slots": (
        "SELECT slot FROM {lease} WHERE name = ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ?"
        " ORDER BY slot"
    ),
    "holdings": (
        "SELECT slot, claim_id, take, coalesce(holder, ''), fencing_token, granted_wall, expires_boot - ? FROM {lease}"
        " WHERE name = ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ?"
    ),
    "read_line": "SELECT ticket, claim_id, take, ? - seen_boot FROM {in_line} WHERE name = ?",
    "grant_permits": (
        "INSERT OR REPLACE INTO {lease} (name, slot, claim_id, holder, fencing_token, boot, granted_wall, granted_boot,"
        " expires_boot, info, take)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    ),
    "leave_until": "DELETE FROM {in_line} WHERE name = ? AND ticket <= ?",
    "clear_line": "DELETE FROM {line}",
    "peek": (
        "SELECT claim_id IS NULL OR boot <> :boot OR expires_boot <= :now,"
        " (SELECT claim_id FROM {in_line} WHERE name = :name ORDER BY ticket LIMIT 1), take IS NOT NULL"
        " FROM {lease} WHERE name = :name AND slot = 1"
    ),
    # Of those in line who are alive: whether enough is left for each, beside all who are before it.
    "peek_pool": (
        "SELECT sum(w.take) OVER (ORDER BY w.ticket) <= p.permits - (SELECT coalesce(sum(take), 0) FROM {lease}"
        " WHERE name = :name AND claim_id IS NOT NULL AND boot = :boot AND expires_boot > :now), w.claim_id"
        " FROM {pool} p JOIN {line} w INDEXED BY {line_index} ON w.name = p.name"
        " WHERE p.name = :name AND w.seen_boot > :alive"
        " ORDER BY w.ticket LIMIT :most"
    ),
    "list": (
        "SELECT l.name, slot, holder, fencing_token, granted_wall, expires_boot, info,"
        " (SELECT count(*) FROM {line} w INDEXED BY {line_index} WHERE w.name = l.name), coalesce(take, 1)"
        " FROM {lease} l WHERE name >= ? AND name < ? AND claim_id IS NOT NULL AND boot = ? AND expires_boot > ?"
        " ORDER BY name, slot"
    ),
    # A broken lease keeps its row until it would have expired, under a claim that nobody has.
    "break": (
        "UPDATE {lease} SET claim_id = '' WHERE name = :name AND fencing_token = :token AND claim_id IS NOT NULL"
        " AND boot = :boot AND expires_boot > :now"
    ),
    "break_now": (
        "UPDATE {lease} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = :now WHERE name = :name"
        " AND fencing_token = :token AND claim_id IS NOT NULL AND boot = :boot AND expires_boot > :now"
    ),
    "purge_floor": "SELECT max(fencing_token) FROM {lease} WHERE {old}",
    "purge_line": "DELETE FROM {line} WHERE name IN (SELECT name FROM {lease} WHERE {old})",
    "purge": "DELETE FROM {lease} WHERE {old}",
    "purge_pool_floor": "SELECT max(fencing_token) FROM {pool} WHERE {empty}",
    "purge_pool": "DELETE FROM {pool} WHERE {empty}",
    "get_meta": "SELECT value FROM {meta} WHERE key = ?",
    "set_meta": "INSERT OR REPLACE INTO {meta} (key, value) VALUES (?, ?)",
}


def names(table: str) -> dict[str, str]:
    """The tables, and what belongs to them, by what the statements call them."""
    return {
        "lease": quoted_table(table),
        "line": quoted_table(table + "_line"),
        "line_index": quoted_table(table + "_line_name"),
        "pool": quoted_table(table + "_pool"),
        "meta": quoted_table(table + "_meta"),
    }


def statements(names: dict[str, str]) -> dict[str, str]:
    """Every statement by its name, with these names in it."""
    # Said, because ANALYZE, when it finds all in one line or hardly anybody in any, makes SQLite read the whole table.
    in_line = "{line} INDEXED BY {line_index}".format(**names)
    conditions = {"old": _OLD.format(**names), "empty": _EMPTY.format(**names)}
    more = {**names, **conditions, "in_line": in_line, "holds": _HOLDS, "wall_now": WALL_NOW}
    return {verb: text.format(**more) for verb, text in _STATEMENTS.items()}
