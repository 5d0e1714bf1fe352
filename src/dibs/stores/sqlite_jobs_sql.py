"""The SQL of queues on SQLite: the tables, and every statement.

``dibs.stores.sqlite_jobs`` says what they are for. A value stands in a statement as ``VALUE``, so that the same text
can be run on somebody else's connection (``dibs.door``).
"""

from __future__ import annotations

from dibs.door import VALUE
from dibs.stores.identifiers import quoted_table

# Of the live jobs those wait that nobody has claimed; ``ready`` has them in the order in which they are taken, also
# those that are due later. A claim moves its jobs to ``over``, where the first to expire comes first.
SCHEMA = """\
CREATE TABLE IF NOT EXISTS {job} (
    id            INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice, or an old claim could end a new job
    name          TEXT NOT NULL,       -- of the queue
    priority      INTEGER NOT NULL,    -- the greatest is taken first
    due_wall      REAL NOT NULL,       -- Unix time: not taken before
    tries         INTEGER NOT NULL DEFAULT 0,    -- counted when it is claimed
    max_tries     INTEGER NOT NULL,    -- 0: without limit
    crashes       INTEGER NOT NULL DEFAULT 0,    -- claims that were found expired
    unique_key    TEXT,
    group_name    TEXT,
    claim_id      TEXT,                -- NULL: nobody has claimed it
    fencing_token INTEGER NOT NULL DEFAULT 0,    -- of the last claim, as all that follows
    holder        TEXT,
    claimed_wall  REAL,                -- Unix time, to be read by people
    expires_wall  REAL,                -- Unix time, to be read by people
    boot          INTEGER,             -- of which boot the next one is
    expires_boot  REAL,                -- seconds on the boot clock: when the claim is over
    error         TEXT,                -- of the last try
    put_id        TEXT NOT NULL,
    created_wall  REAL NOT NULL,       -- Unix time
    payload       NOT NULL,            -- TEXT: JSON; BLOB: bytes. Last, as the rest is read without it
    due_at        TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', due_wall, 'unixepoch')) VIRTUAL,
    created_at    TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', created_wall, 'unixepoch')) VIRTUAL,
    expires_at    TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', expires_wall, 'unixepoch')) VIRTUAL
);
CREATE INDEX IF NOT EXISTS {ready} ON {job_here} (name, priority DESC, due_wall) WHERE claim_id IS NULL;
CREATE INDEX IF NOT EXISTS {over} ON {job_here} (name, boot, expires_boot) WHERE claim_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS {claim} ON {job_here} (claim_id) WHERE claim_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS {put} ON {job_here} (put_id);
CREATE UNIQUE INDEX IF NOT EXISTS {key} ON {job_here} (name, unique_key) WHERE unique_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS {group} ON {job_here} (name, group_name) WHERE group_name IS NOT NULL;
CREATE TABLE IF NOT EXISTS {end} (
    id            INTEGER PRIMARY KEY, -- these are jobs that have ended and are kept
    name          TEXT NOT NULL,
    state         TEXT NOT NULL,       -- done, dead, cancelled
    ended_wall    REAL NOT NULL,       -- Unix time
    keep_until    REAL,                -- Unix time; NULL: until somebody revives or forgets it
    result        TEXT,                -- JSON, of a job that is done
    priority      INTEGER NOT NULL,
    due_wall      REAL NOT NULL,
    tries         INTEGER NOT NULL,
    max_tries     INTEGER NOT NULL,
    crashes       INTEGER NOT NULL,
    unique_key    TEXT,
    group_name    TEXT,
    fencing_token INTEGER NOT NULL,
    holder        TEXT,                -- of the last claim, if there was one, as the next two
    claimed_wall  REAL,
    expires_wall  REAL,
    error         TEXT,
    put_id        TEXT NOT NULL,
    created_wall  REAL NOT NULL,
    payload       NOT NULL,
    ended_at      TEXT GENERATED ALWAYS AS (strftime('%Y-%m-%d %H:%M:%f', ended_wall, 'unixepoch')) VIRTUAL
);
CREATE INDEX IF NOT EXISTS {ended} ON {end_here} (name, state, ended_wall);
CREATE INDEX IF NOT EXISTS {keep} ON {end_here} (keep_until) WHERE keep_until IS NOT NULL;
"""

# What a job takes with it when it ends.
_COPIED = (
    "id, name, priority, due_wall, tries, max_tries, crashes, unique_key, group_name, fencing_token, holder,"
    " claimed_wall, expires_wall, put_id, created_wall, payload"
)
# As it is when it has come back to life.
_REVIVED = _COPIED.replace("due_wall, tries, max_tries, crashes", f"{VALUE}, 0, max_tries, 0")
_SHOWN = (
    "payload, priority, tries, max_tries, crashes, fencing_token, created_wall, due_wall, unique_key, group_name,"
    " holder, expires_wall, error"
)
_TAKEN = "id, payload, tries, max_tries, crashes, created_wall, unique_key, group_name, fencing_token"
_OF_IDS = f"id IN (SELECT value FROM json_each({VALUE}))"
# The claim of whoever sends these ids, name, token, boot and moment is in force. (A + keeps an index from being used.)
_MINE = (
    f"{_OF_IDS} AND +name = {VALUE} AND fencing_token = {VALUE}"
    f" AND claim_id IS NOT NULL AND +boot = {VALUE} AND expires_boot > {VALUE}"
)
_EXHAUSTED = "max_tries > 0 AND tries >= max_tries"
_OVER = f"name = {VALUE} AND claim_id IS NOT NULL AND (boot, expires_boot) <= ({VALUE}, {VALUE})"
_WAITING = f"name = {VALUE} AND claim_id IS NULL"
_IN_ORDER = "ORDER BY priority DESC, due_wall, id"
_READY = f"{_WAITING} AND priority = {VALUE} AND due_wall <= {VALUE}"


def _ended(where: str, error: str, jobs: str = "{job}") -> str:
    """A copy of these jobs for the table of those that have ended, of which they are deleted next."""
    return (
        f"INSERT INTO {{end}} ({_COPIED}, error, state, ended_wall, keep_until, result)"
        f" SELECT {_COPIED}, {error}, {VALUE}, {VALUE}, {VALUE}, {VALUE} FROM {jobs} WHERE {where}"
    )


def _left(where: str, jobs: str = "{job}") -> str:
    return f"DELETE FROM {jobs} WHERE {where} RETURNING id"


# Each statement names the index that it goes by. What ANALYZE found at some moment (one queue, one claim, one group)
# would make SQLite read whole tables ever after. A search for several ids has no index to name; one for one needs none.
_STATEMENTS = {
    # Put. Results are numbers only: a connection of the caller's may turn text into whatever it likes.
    "known": f"SELECT id FROM {{by_put}} WHERE put_id = {VALUE} AND +name = {VALUE} ORDER BY id",
    "with_keys": (
        "WITH new(place, unique_key) AS (VALUES {rows}) SELECT new.place, job.id, job.claim_id IS NOT NULL"
        f" AND job.boot = {VALUE} AND job.expires_boot > {VALUE} FROM new CROSS JOIN {{job}} AS job"
        f" INDEXED BY {{key_here}} ON job.name = {VALUE} AND job.unique_key = new.unique_key"
    ),
    "insert": (
        "INSERT INTO {job} (name, put_id, created_wall, payload, priority, due_wall, unique_key, group_name, max_tries)"
        " VALUES {rows} RETURNING id"
    ),
    "replace": (
        f"UPDATE {{job}} SET payload = {VALUE}, priority = {VALUE}, due_wall = {VALUE}, group_name = {VALUE},"
        f" max_tries = {VALUE}, put_id = {VALUE}, tries = 0, crashes = 0, claim_id = NULL, error = NULL"
        f" WHERE id = {VALUE}"
    ),
    # Take.
    "repeated": (
        f"SELECT {_TAKEN}, claimed_wall FROM {{by_claim}} WHERE claim_id = {VALUE} AND +name = {VALUE}"
        f" AND +boot = {VALUE} AND expires_boot > {VALUE} {_IN_ORDER}"
    ),
    "over": f"SELECT 1 FROM {{by_over}} WHERE {_OVER} LIMIT 1",
    "count_crashes": f"UPDATE {{by_over}} SET crashes = crashes + 1 WHERE {_OVER}",
    "bury": _ended(f"{_OVER} AND {_EXHAUSTED}", VALUE, "{by_over}"),
    "buried": _left(f"{_OVER} AND {_EXHAUSTED}", "{by_over}"),
    "free": f"UPDATE {{by_over}} SET claim_id = NULL WHERE {_OVER}",
    # Each priority at which jobs wait, and when the first of them is due: a step in the index each, however many wait.
    "priorities": (
        "WITH RECURSIVE of_queue(name, priority) AS ("
        f" SELECT {VALUE}, {2**31} UNION ALL SELECT name,"
        " (SELECT max(priority) FROM {job} AS job INDEXED BY {ready_here}"
        " WHERE job.name = of_queue.name AND claim_id IS NULL AND job.priority < of_queue.priority)"
        " FROM of_queue WHERE priority IS NOT NULL)"
        " SELECT priority, (SELECT min(due_wall) FROM {job} AS job INDEXED BY {ready_here}"
        " WHERE job.name = of_queue.name AND claim_id IS NULL AND job.priority = of_queue.priority)"
        f" FROM of_queue WHERE priority < {2**31} ORDER BY priority DESC"
    ),
    "take": f"SELECT {_TAKEN} FROM {{by_ready}} WHERE {_READY} ORDER BY due_wall, id",
    # Where only the first of a group may be taken: the groups that are worked now, once for each of their jobs ...
    "worked": (
        f"SELECT group_name FROM {{by_over}} WHERE name = {VALUE} AND claim_id IS NOT NULL AND +group_name IS NOT NULL"
    ),
    # ... of the first jobs in the order, whether they are among the first of their group ...
    "turns": (
        "SELECT id, group_name, group_name IS NULL OR (SELECT count(*) FROM"
        " (SELECT 1 FROM {job} AS before INDEXED BY {group_here}"
        " WHERE before.name = waiting.name AND before.group_name = waiting.group_name AND before.id < waiting.id"
        f" LIMIT {VALUE})) < {VALUE} FROM (SELECT id, name, group_name FROM {{by_ready}} WHERE {_READY}"
        f" ORDER BY due_wall, id LIMIT {VALUE}) AS waiting"
    ),
    # ... the first of each group, found by a step in the index from one group to the next ...
    "firsts": (
        "WITH RECURSIVE groups(of_group) AS (SELECT (SELECT min(group_name) FROM {by_group}"
        f" WHERE name = {VALUE} AND group_name IS NOT NULL)"
        f" UNION ALL SELECT (SELECT min(group_name) FROM {{by_group}} WHERE name = {VALUE} AND group_name > of_group)"
        " FROM groups WHERE of_group IS NOT NULL)"
        " SELECT -priority, due_wall, id, group_name FROM groups CROSS JOIN {job} AS job INDEXED BY {group_here}"
        f" ON job.name = {VALUE} AND job.group_name = of_group AND job.id IN (SELECT id FROM {{by_group}}"
        f" WHERE name = {VALUE} AND group_name = of_group ORDER BY id LIMIT {VALUE})"
        f" WHERE +claim_id IS NULL AND +due_wall <= {VALUE}"
    ),
    # ... and the first that have none.
    "ungrouped": (
        f"SELECT -priority, due_wall, id, group_name FROM {{by_ready}} WHERE {_READY} AND group_name IS NULL"
        f" ORDER BY due_wall, id LIMIT {VALUE}"
    ),
    # ... and what is taken of them.
    "this": f"SELECT {_TAKEN} FROM {{job}} WHERE id = {VALUE}",
    "claim": (
        f"UPDATE {{job}} SET claim_id = {VALUE}, holder = {VALUE}, fencing_token = {VALUE}, boot = {VALUE},"
        f" claimed_wall = {VALUE}, expires_wall = {VALUE}, expires_boot = {VALUE}, tries = tries + 1 WHERE id = {VALUE}"
    ),
    "next_due": (
        f"SELECT min(due_wall) FROM {{by_ready}} WHERE {_WAITING} AND priority = {VALUE} AND due_wall > {VALUE}"
    ),
    "next_over": (
        f"SELECT min(expires_boot) FROM {{by_over}} WHERE name = {VALUE} AND claim_id IS NOT NULL AND boot = {VALUE}"
    ),
    # Extend, and each way to finish.
    "extend": (
        f"UPDATE {{job}} SET expires_wall = max(expires_wall, {VALUE}), expires_boot = max(expires_boot, {VALUE})"
        f" WHERE {_MINE} RETURNING id"
    ),
    "done": _left(_MINE),
    "keep_done": _ended(_MINE, "error"),
    "keep_failed": _ended(_MINE, VALUE),
    "keep_exhausted": _ended(f"{_MINE} AND {_EXHAUSTED}", VALUE),
    "exhausted": _left(f"{_MINE} AND {_EXHAUSTED}"),
    "retry": f"UPDATE {{job}} SET claim_id = NULL, error = {VALUE}, due_wall = {VALUE} WHERE {_MINE} RETURNING id",
    "back": f"UPDATE {{job}} SET claim_id = NULL, tries = tries - 1 WHERE {_MINE} RETURNING id",
    "old": f"SELECT id FROM {{by_keep}} WHERE keep_until <= {VALUE} ORDER BY keep_until LIMIT {VALUE}",
    "drop_old": f"DELETE FROM {{end}} WHERE id = {VALUE}",
    # Before anything is read on a connection of the caller's: from here on nobody else writes.
    "lock": "UPDATE {job} SET tries = tries WHERE id = 0",
    "version": "SELECT max(CAST(value AS INTEGER)) FROM {meta} WHERE key = 'version'",
    # The number of this boot, if it has begun for this file.
    "boot": (
        "SELECT CAST(value AS INTEGER) FROM {meta} WHERE key = 'boot'"
        f" AND EXISTS (SELECT 1 FROM {{meta}} WHERE key = 'boot_id' AND value = {VALUE})"
    ),
    # See and mend.
    "waiting_depths": (
        f"SELECT name, sum(due_wall <= {VALUE}), sum(due_wall > {VALUE}), min(due_wall) FROM {{by_ready}}"
        f" WHERE name >= {VALUE} AND name < {VALUE} AND claim_id IS NULL GROUP BY name"
    ),
    "claimed_depths": (
        f"SELECT name, boot = {VALUE} AND expires_boot > {VALUE}, due_wall FROM {{by_over}}"
        f" WHERE name >= {VALUE} AND name < {VALUE} AND claim_id IS NOT NULL"
    ),
    "ended_depths": (
        f"SELECT name, sum(state = 'dead') FROM {{by_ended}} WHERE name >= {VALUE} AND name < {VALUE} GROUP BY name"
    ),
    "find_live": (
        f"SELECT id, claim_id IS NOT NULL AND boot = {VALUE} AND expires_boot > {VALUE}, {_SHOWN}"
        f" FROM {{job}} WHERE id = {VALUE} AND +name = {VALUE}"
    ),
    "find_ended": f"SELECT id, state, {_SHOWN}, result, ended_wall FROM {{end}} WHERE id = {VALUE} AND +name = {VALUE}",
    "list_waiting": (
        f"SELECT id, 0, {_SHOWN} FROM {{by_ready}} WHERE {_WAITING} AND (due_wall <= {VALUE}) = {VALUE}"
        f" {_IN_ORDER} LIMIT {VALUE}"
    ),
    "list_claimed": (
        f"SELECT id, boot = {VALUE} AND expires_boot > {VALUE}, {_SHOWN} FROM {{by_over}}"
        f" WHERE name = {VALUE} AND claim_id IS NOT NULL {_IN_ORDER}"
    ),
    "list_ended": (
        f"SELECT id, state, {_SHOWN}, result, ended_wall FROM {{by_ended}} WHERE name = {VALUE} AND state = {VALUE}"
        f" ORDER BY ended_wall DESC, id DESC LIMIT {VALUE}"
    ),
    "keep_cancelled": _ended(f"id = {VALUE} AND +name = {VALUE}", "error"),
    "cancel": _left(f"id = {VALUE} AND +name = {VALUE}"),
    # One after the other, so that of two with the same key the older is revived.
    "revive": (
        f"INSERT OR IGNORE INTO {{job}} ({_COPIED}, error) SELECT {_REVIVED}, error FROM {{by_ended}}"
        f" WHERE name = {VALUE} AND state = 'dead' AND ({VALUE} OR {_OF_IDS}) ORDER BY id"
    ),
    "revived_left": (
        f"DELETE FROM {{by_ended}} WHERE name = {VALUE} AND state = 'dead' AND id IN (SELECT id FROM {{job}})"
    ),
    "forget": f"DELETE FROM {{by_ended}} WHERE name = {VALUE} AND ended_wall <= {VALUE} AND ({VALUE} OR {_OF_IDS})",
}


# By the table that each is of.
_INDEXES = {"job": ("ready", "over", "claim", "put", "key", "group"), "end": ("ended", "keep")}


def names(table: str, alias: str | None = None) -> dict[str, str]:
    """The tables and indexes by what the statements call them; in the schema that a connection has as ``alias``."""
    schema = "" if alias is None else quoted_table(alias, "schema") + "."
    here = {"job": table + "_job", "end": table + "_job_end", "meta": table + "_meta"}
    here |= {kind: f"{table}_job_{kind}" for kinds in _INDEXES.values() for kind in kinds}
    here = {kind: quoted_table(name) for kind, name in here.items()}
    there = {kind: schema + name for kind, name in here.items()}
    return {
        **there,
        **{kind + "_here": name for kind, name in here.items()},
        **{
            f"by_{kind}": f"{there[of]} INDEXED BY {here[kind]}"  # an index is in the schema of its table, unsaid
            for of, kinds in _INDEXES.items()
            for kind in kinds
        },
        "rows": "{rows}",  # filled in by whoever knows how many
    }


def schema(names: dict[str, str]) -> str:
    return SCHEMA.format(**names)


def statements(names: dict[str, str], mark: str = VALUE) -> dict[str, str]:
    """Every statement by its name, with these names in it, and ``mark`` where a value goes."""
    return {verb: text.format(**names).replace(VALUE, mark) for verb, text in _STATEMENTS.items()} | {"mark": mark}


def with_rows(sql: dict[str, str], verb: str, rows: int, columns: int) -> str:
    """A statement that brings so many rows of values along."""
    row = f"({', '.join([sql['mark']] * columns)})"
    return sql[verb].replace("{rows}", ", ".join([row] * rows))


def exists(alias: str) -> str:
    """A statement that says 1 or 0 of the table with a name."""
    schema = quoted_table(alias, "schema")
    return f"SELECT count(*) FROM {schema}.sqlite_master WHERE type = 'table' AND name = {VALUE}"


def begin(alias: str) -> str:
    """A statement that takes the lock a write takes, whatever tables there are, and writes nothing.

    (At most it gives back one of the pages that are free, where somebody wanted that: ``auto_vacuum`` is on.)
    """
    return f"PRAGMA {quoted_table(alias, 'schema')}.incremental_vacuum(1)"
