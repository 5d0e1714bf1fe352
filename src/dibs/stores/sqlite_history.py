"""SQLite's history of grants: a table that triggers on the leases fill, whoever writes there.

A lease's row tells what happened to it. Its claim becomes NULL, or '' with another end: released (and kept). It becomes
'' with the same end: broken. Another token takes its place before its end: transferred. Another one does later, or its
row is deleted: it had expired. A renewal changes none of this, and fires no trigger. (REPLACE deletes a row without a
trigger, so what it takes the place of is looked up before.) An end by expiry is counted on the boot clock, from
before the statement that granted, and so might come out later than the next grant: it is cut there.
"""

from __future__ import annotations

import sqlite3

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now
from dibs.store import StoredGrant
from dibs.stores.identifiers import quoted_table
from dibs.stores.sqlite_sql import WALL_NOW
from dibs.stores.tables import without_history

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.sqlite_file import SQLiteFile

_GRANT = "NEW.claim_id <> ''"  # (false for NULL)
_WRITE = """\
INSERT OR IGNORE INTO {history} (name, fencing_token, slot, holder, info, granted_wall)
        VALUES (NEW.name, NEW.fencing_token, NEW.slot, NEW.holder, NEW.info, NEW.granted_wall);
    DELETE FROM {history} WHERE name = NEW.name AND fencing_token <= (SELECT fencing_token FROM {history}
        WHERE name = NEW.name ORDER BY fencing_token DESC LIMIT 1 OFFSET {keep});"""
_OLD_END = "OLD.granted_wall + OLD.expires_boot - OLD.granted_boot"
_IS_MOVE = "NEW.fencing_token <> OLD.fencing_token AND NEW.boot = OLD.boot AND OLD.expires_boot > NEW.granted_boot"
_TRIGGERS = ("made", "replaced", "ended", "granted", "purged")

# Each statement by itself: those of triggers have semicolons inside.
_KEEP = (
    """\
CREATE TABLE IF NOT EXISTS {history} (
    name          TEXT NOT NULL,
    fencing_token INTEGER NOT NULL,
    slot          INTEGER NOT NULL,
    holder        TEXT,
    info          TEXT,
    granted_wall  REAL NOT NULL,       -- Unix time
    ended_wall    REAL,                -- NULL: it is in force, or has expired and nobody got the name since
    ending        TEXT,                -- released, expired, broken, transferred
    acquired_at   TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', granted_wall, 'unixepoch')) VIRTUAL,
    ended_at      TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', ended_wall, 'unixepoch')) VIRTUAL,
    PRIMARY KEY (name, fencing_token)
) WITHOUT ROWID""",
    *(f"DROP TRIGGER IF EXISTS {{{trigger}}}" for trigger in _TRIGGERS),
    f"""\
CREATE TRIGGER {{made}} AFTER INSERT ON {{lease}} WHEN {_GRANT} BEGIN
    {_WRITE}
END""",
    """\
CREATE TRIGGER {replaced} BEFORE INSERT ON {lease} BEGIN
    UPDATE {history} SET ending = 'expired', ended_wall = (SELECT min(NEW.granted_wall, granted_wall + expires_boot
        - granted_boot) FROM {lease} AS l WHERE l.name = NEW.name AND l.slot = NEW.slot)
    WHERE name = NEW.name AND ended_wall IS NULL AND fencing_token = (SELECT fencing_token
        FROM {lease} AS l WHERE l.name = NEW.name AND l.slot = NEW.slot AND l.fencing_token <> NEW.fencing_token);
END""",
    f"""\
CREATE TRIGGER {{ended}} AFTER UPDATE ON {{lease}}
WHEN OLD.claim_id <> '' AND (NEW.claim_id IS NOT OLD.claim_id OR NEW.fencing_token <> OLD.fencing_token) BEGIN
    UPDATE {{history}} SET
        ending = CASE WHEN {_IS_MOVE} THEN 'transferred' WHEN NEW.fencing_token <> OLD.fencing_token THEN 'expired'
            WHEN NEW.claim_id = '' AND NEW.expires_boot = OLD.expires_boot THEN 'broken' ELSE 'released' END,
        ended_wall = CASE WHEN {_IS_MOVE} THEN NEW.granted_wall
            WHEN NEW.fencing_token <> OLD.fencing_token THEN min(NEW.granted_wall, {_OLD_END}) ELSE {WALL_NOW} END
    WHERE name = OLD.name AND fencing_token = OLD.fencing_token AND ended_wall IS NULL;
END""",
    f"""\
CREATE TRIGGER {{granted}} AFTER UPDATE ON {{lease}} WHEN {_GRANT} AND NEW.fencing_token <> OLD.fencing_token BEGIN
    {_WRITE}
END""",
    f"""\
CREATE TRIGGER {{purged}} AFTER DELETE ON {{lease}} WHEN OLD.claim_id <> '' BEGIN
    UPDATE {{history}} SET ending = 'expired', ended_wall = {_OLD_END}
    WHERE name = OLD.name AND fencing_token = OLD.fencing_token AND ended_wall IS NULL;
END""",
    # Those who hold now.
    """\
INSERT OR IGNORE INTO {history} (name, fencing_token, slot, holder, info, granted_wall)
SELECT name, fencing_token, slot, holder, info, granted_wall FROM {lease} WHERE claim_id <> ''""",
)
_FORGET = (*(f"DROP TRIGGER IF EXISTS {{{trigger}}}" for trigger in _TRIGGERS), "DROP TABLE IF EXISTS {history}")

_READ = """\
SELECT h.slot, coalesce(h.holder, ''), h.fencing_token, h.granted_wall,
    CASE WHEN h.ended_wall IS NOT NULL THEN h.ended_wall
        WHEN l.boot <> :boot OR l.expires_boot <= :now THEN l.granted_wall + l.expires_boot - l.granted_boot END,
    CASE WHEN h.ended_wall IS NOT NULL THEN h.ending
        WHEN l.boot <> :boot OR l.expires_boot <= :now THEN 'expired' END, h.info
FROM {history} AS h LEFT JOIN {lease} AS l
    ON l.name = h.name AND l.slot = h.slot AND l.fencing_token = h.fencing_token
WHERE h.name = :name ORDER BY h.fencing_token DESC LIMIT :limit
"""
_NAMES = {
    "history": "_history",
    "made": "_hist_made",
    "replaced": "_hist_repl",
    "ended": "_hist_ends",
    "granted": "_hist_next",
    "purged": "_hist_purg",
}


def keeping(table: str, keep: int) -> list[str]:
    """What makes the history of a table of leases keep so many grants of each name; 0: what drops it."""
    names = _names(table)
    return [statement.format(**names, keep=keep) for statement in (_KEEP if keep else _FORGET)]


def keep(file: SQLiteFile, keep: int, deadline: Deadline) -> None:
    """Run that."""

    def write(db: sqlite3.Connection) -> None:
        for statement in keeping(file.table, keep):
            db.execute(statement)

    file.transaction(file.open(deadline), write)


def read(file: SQLiteFile, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
    """The last grants of a name, newest first."""
    db, names = file.open(deadline), _names(file.table)
    values = {"name": name, "limit": limit, "boot": file.boot, "now": boot_now()}
    try:
        if not file.has_table(db, file.table + _NAMES["history"]):
            raise without_history()
        return [StoredGrant(*row) for row in db.execute(_READ.format(**names), values)]
    except sqlite3.Error as error:
        raise file.translated(error) from error


def _names(table: str) -> dict[str, str]:
    return {"lease": quoted_table(table), **{key: quoted_table(table + end) for key, end in _NAMES.items()}}
