"""How a caller's query runs on the SQLite connection of dibs: its tables lie in the same file as the leases."""

from __future__ import annotations

import sqlite3
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.queries import bare
from dibs.stores.sqlite_errors import primary_code

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.queries import Query
    from dibs.stores.sqlite_columns import SQLiteRows
    from dibs.stores.sqlite_file import SQLiteFile

# Steps of SQLite's machine after which it is looked whether the time is over: some milliseconds.
STEPS = 100_000
# A mistake in the statement; a value of the wrong type, too large, or too many of them.
_MISTAKES = frozenset((1, 18, 20, 25))
_HELD = """\
SELECT 1 FROM {lease} AS l WHERE l.name = {prefix} || q.{key} AND l.claim_id IS NOT NULL AND l.boot = {boot:d}
    AND l.expires_boot > {now!r} LIMIT 1"""


def find(
    file: SQLiteFile, db: sqlite3.Connection, query: Query, deadline: Deadline, rows: SQLiteRows | None
) -> list[Any]:
    """The rows that are asked for; of a table whose columns keep claims, ``rows``."""
    text = bare(query.text)
    db.set_progress_handler(lambda: deadline.remaining() <= 0, STEPS)
    try:
        described = db.execute(f"SELECT * FROM (\n{text}) AS q LIMIT 0", query.params).description
        key = '"' + described[0][0].replace('"', '""') + '"'
        found = f"SELECT * FROM (\n{text}) AS q\n"
        if query.only is not None:
            sql = f"{found}WHERE q.{key} IN ({', '.join(map(_literal, query.only))})"
        else:
            lease, prefix = file.names["lease"], _literal(query.prefix)
            held = (
                _HELD.format(lease=lease, prefix=prefix, key=key, boot=file.boot, now=boot_now())
                if rows is None
                else rows.held(key)
            )
            sql = f"{found}WHERE ({held}) IS NULL\nLIMIT {query.limit:d}"
        return db.execute(sql, query.params).fetchall()
    except sqlite3.Error as error:
        if deadline.remaining() <= 0:
            raise StoreUnavailable("the query took longer than request_timeout", maybe_applied=False) from error
        if primary_code(error) in _MISTAKES:
            raise InvalidOption(f"SQLite refuses the query: {error}") from error
        raise file.translated(error) from error
    finally:
        with suppress(sqlite3.ProgrammingError):  # it was closed after an error
            db.set_progress_handler(None, 0)


def _literal(value: object) -> str:
    if isinstance(value, int):
        return int.__repr__(value)
    return "'" + str(value).replace("'", "''") + "'"
