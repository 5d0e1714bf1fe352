"""Fencing tokens, compared where the resource is: for resources in another database than the leases.

Every grant of a name has a token greater than all before it (``lease.fencing_token``). A row that keeps the greatest
token it was shown, in a column of 64 bits, can refuse a holder that was superseded, however long that one had been
stopped. ``advance`` shows a token to a row inside your transaction; ``trigger_sql`` prints a trigger by which the table
itself refuses smaller tokens, whoever writes. Where the leases are in the same database, ``lease.guard(connection)``
needs no column.
"""

from __future__ import annotations

from collections.abc import Mapping

from dibs import guarding
from dibs._typing import TYPE_CHECKING, Any
from dibs.door import DIALECTS, MYSQL, POSTGRESQL, SQLITE, VALUE, Said, door_to
from dibs.errors import InvalidOption, LeaseLost
from dibs.stores.identifiers import dollar_quote, quoted, quoted_part

if TYPE_CHECKING:
    from dibs.door import Answer
    from dibs.guarding import Talk

TOKEN_MAX = 2**63 - 1


def advance(connection: Any, table: str, *, key: Mapping[str, object], token: int, column: str = "fence") -> None:
    """Show a fencing token to a row, in the transaction that is open on ``connection``; LeaseLost if it is too old.

    ``UPDATE table SET column = token WHERE key AND (column IS NULL OR column <= token)``: from then on, no smaller
    token is taken by this row, and until the transaction has ended nobody else shows it one. Do it before you read what
    you are going to change. Roll the transaction back when it raises.

    connection: as for ``lease.guard``, to any database of these kinds. table: ``account`` or ``sales.account``. key:
    the columns that tell the row, and their values. token: ``lease.fencing_token``. column: where the row keeps its
    greatest token, a nullable number of 64 bits.

    Raises InvalidOption for what is wrong with these, LookupError where there is no such row, and whatever the driver
    raises.
    """
    door = door_to(connection)
    guarding.converse(_advance(door.dialect, table, key, token, column), door)


async def advance_async(
    connection: Any, table: str, *, key: Mapping[str, object], token: int, column: str = "fence"
) -> None:
    """The same for asyncio; connections as for ``AsyncLease.guard``."""
    door = door_to(connection)
    await guarding.converse_async(_advance(door.dialect, table, key, token, column), door)


def _advance(dialect: str, table: str, key: Any, token: int, column: str) -> Talk[None]:
    if type(token) is not int or not 0 < token <= TOKEN_MAX:
        raise InvalidOption(f"token is lease.fencing_token, an int from 1 to 2**63 - 1, not {token!r}")
    if not isinstance(key, Mapping):
        raise InvalidOption(f"key is a dict of the columns that tell the row, and their values, not {key!r}")
    if not key or any(value is None for value in key.values()):
        raise InvalidOption(f"key={dict(key)!r} tells no row: give its key columns, none of them None")
    where = _quoted(dialect, table)
    fence = _quoted_part(dialect, column, "column")
    values = list(key.values())
    row = " AND ".join(f"{_quoted_part(dialect, name, 'column')} = {VALUE}" for name in key)
    update = f"UPDATE {where} SET {fence} = {VALUE} WHERE {row} AND ({fence} IS NULL OR {fence} <= {VALUE})"
    shown: Answer = yield Said(update, [token, *values, token])
    if shown.affected > 0:
        return
    # MySQL counts rows that changed: there is none when this token was shown before. SQLite has no FOR UPDATE, and
    # needs none: nobody else writes meanwhile.
    lock = "" if dialect == SQLITE else " FOR UPDATE"
    seen: Answer = yield Said(f"SELECT {fence} FROM {where} WHERE {row}{lock}", values)
    if not seen.rows:
        raise LookupError(f"{table} has no row with {dict(key)!r}, so nothing was fenced")
    (kept,) = seen.rows[0]
    if kept is None or int(kept) != token:
        raise LeaseLost(
            f"{table} {dict(key)!r} has been shown the fencing token {kept}; {token} is of an earlier holder. "
            "Roll this transaction back and stop"
        )


def trigger_sql(dialect: str, table: str, column: str = "fence") -> str:
    """The SQL of a trigger by which a table refuses every UPDATE that makes ``column`` smaller, or NULL again.

    Writes then carry the token themselves (``UPDATE … SET …, fence = :token``), and one of a superseded holder is an
    error of the database. A write that leaves the column alone is not seen by it, and neither is a DELETE or INSERT.

    dialect: "postgresql", "mysql" (MariaDB as well) or "sqlite". The text is to be run by somebody who may make
    triggers: on MySQL as one statement (the ``mysql`` program needs DELIMITER around it; `dibs schema --fence` prints
    it so). Running it twice is harmless except on MySQL, where the second time is an error.
    """
    if dialect not in DIALECTS:
        raise InvalidOption(f"dialect={dialect!r} is none of {', '.join(DIALECTS)}")
    where, fence = _quoted(dialect, table), _quoted_part(dialect, column, "column")
    *schema, last = table.split(".")
    name = ".".join(_quoted_part(dialect, part, "table") for part in (*schema, f"{last}_{column}"))
    text = f"dibs: {table}.{column} has a greater fencing token: this writer is an earlier holder".replace("'", "''")
    smaller = f"NEW.{fence} < OLD.{fence} OR (NEW.{fence} IS NULL AND OLD.{fence} IS NOT NULL)"
    if dialect == SQLITE:
        on = _quoted_part(dialect, last, "table")  # always in the schema of the trigger
        return (
            f"CREATE TRIGGER IF NOT EXISTS {name} BEFORE UPDATE ON {on} FOR EACH ROW\n"
            f"WHEN {smaller}\nBEGIN\n    SELECT RAISE(ABORT, '{text}');\nEND;\n"
        )
    if dialect == MYSQL:
        text = text.replace("\\", "\\\\")[:128]
        return (
            f"CREATE TRIGGER {name} BEFORE UPDATE ON {where} FOR EACH ROW\n"
            f"IF {smaller} THEN\n    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{text}';\nEND IF\n"
        )
    trigger = _quoted_part(dialect, f"{last}_{column}", "table")
    text = text.replace("%", "%%")
    quote = dollar_quote("dibs", text)
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS {quote}\n"
        f"BEGIN\n    RAISE EXCEPTION '{text}' USING ERRCODE = 'integrity_constraint_violation';\nEND {quote};\n"
        f"DROP TRIGGER IF EXISTS {trigger} ON {where};\n"
        f"CREATE TRIGGER {trigger} BEFORE UPDATE ON {where} FOR EACH ROW\n"
        f"WHEN ({smaller}) EXECUTE FUNCTION {name}();\n"
    )


def _quoted(dialect: str, table: str) -> str:
    return quoted(table, _mark(dialect))


def _quoted_part(dialect: str, name: str, what: str) -> str:
    return quoted_part(name, what, _mark(dialect))


def _mark(dialect: str) -> str:
    return "`" if dialect == MYSQL else '"'


__all__ = ["POSTGRESQL", "MYSQL", "SQLITE", "advance", "advance_async", "trigger_sql"]
