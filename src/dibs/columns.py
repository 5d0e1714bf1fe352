"""Claims kept in three columns of a table of the user's own: what those are, and how a row of it is named.

``client.claims(…, mode="columns")`` keeps a claim on an item in the item's own row, where the stores of SQL databases
find it instead of in the table of the leases. The columns are

* ``dibs_token``: the fencing token of the last claim, one more with each. It begins again when a row is made anew;
* ``dibs_claim``: who has claimed it, NULL when nobody has;
* ``dibs_until``: until when, by the database's clock. (On SQLite, which has none: in seconds of the machine's boot
  clock, and the claim names the boot.)

They may be NULL, have no default and are in no index: so they are added without writing the table anew, and a claim
changes no index of it (on PostgreSQL it is a HOT update, where the page has room).

To everything between the face and the store, such a claim is a lease like any other. Its name says what it is: behind
that of the item stand the table, the column of the key, and the key, each after a ``ROW_MARK``, which no name of a user
can contain. So one call may carry both kinds, and only the store looks.
"""

from __future__ import annotations

import re

from dibs._typing import NamedTuple
from dibs.door import DIALECTS, MYSQL, POSTGRESQL
from dibs.errors import InvalidOption
from dibs.store import ROW_MARK
from dibs.stores.identifiers import quoted, quoted_part

COLUMNS = ("dibs_token", "dibs_claim", "dibs_until")
_TYPES = {
    POSTGRESQL: ("bigint", "text", "timestamptz"),
    MYSQL: ("BIGINT NULL", "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL", "DATETIME(6) NULL"),
}
_TYPES_OF_SQLITE = ("INTEGER", "TEXT", "REAL")
# Which types do as well: those that keep what is written to them as it is. (A time that is rounded, or told in a time
# zone of the session's, ends a claim before its holder stops to trust it.)
_WIDE = r"\((25[5-9]|2[6-9]\d|[3-9]\d\d|\d{4,})\)"
_FIT = {
    POSTGRESQL: (
        r"bigint( not null)?",
        rf"text|character varying({_WIDE})?",
        r"timestamp(\(6\))? with time zone",
    ),
    MYSQL: (
        r"bigint(\(\d+\))?( unsigned)?( not null)?",
        rf"varchar{_WIDE}|(medium|long)?text",
        r"datetime\(6\)",
    ),
}
_FIT_OF_SQLITE = (
    r"\w*int\w*( not null)?",
    rf"text|(n?var)?char({_WIDE})?",
    r"real|float|double( precision)?",
)


class Place(NamedTuple):
    """A table whose rows are claimed, as the user names it, perhaps with a schema; and the column of its key."""

    table: str
    key: str


def check_place(table: str, key: str) -> Place:
    """The place, or InvalidOption for names that cannot stand in SQL."""
    for what, name in (("table", table), ("key", key)):
        if not isinstance(name, str):
            raise InvalidOption(f"{what} is the name of a {'table' if what == 'table' else 'column'}, not {name!r}")
    quoted(table)
    quoted_part(key, "key")
    if table.count(".") > 1:
        raise InvalidOption(f"table={table!r} has more than one dot: event, or app.event")
    return Place(table, key)


def name_of(item: str, where: Place, key: str) -> str:
    """The name of the lease on this row."""
    return ROW_MARK.join((item, *where, key))


def row_of(name: str) -> tuple[Place, str]:
    """Which row of which table the name is of."""
    _, table, column, key = name.split(ROW_MARK)
    return Place(table, column), key


def misfit(dialect: str, found: dict[str, str]) -> tuple[str, str] | None:
    """Of the columns that a table has, by name: the first whose type does not do, and the one that does."""
    types, fits = _TYPES.get(dialect, _TYPES_OF_SQLITE), _FIT.get(dialect, _FIT_OF_SQLITE)
    for name, wanted, fit in zip(COLUMNS, types, fits, strict=True):
        if not re.fullmatch(fit, found[name].lower()):
            return name, wanted
    return None


def migration_sql(dialect: str, table: str) -> str:
    """The SQL that adds the three columns in which claims with ``mode="columns"`` are kept to a table of yours.

    The columns may be NULL and have no default, so the table is not written anew: PostgreSQL and SQLite only note them,
    MySQL and MariaDB refuse where they could not do that (ALGORITHM=INSTANT). Do not index them. On PostgreSQL it may
    be run twice; elsewhere the second time is an error.

    dialect: "postgresql", "mysql" (MariaDB as well) or "sqlite". table: ``event`` or ``app.event``. `dibs schema
    --claims TABLE` prints the same. Raises InvalidOption for what is wrong with these.
    """
    if dialect not in DIALECTS:
        raise InvalidOption(f"dialect={dialect!r} is none of {', '.join(DIALECTS)}")
    where = quoted(table, "`" if dialect == MYSQL else '"')
    columns = [f"{name} {kind}" for name, kind in zip(COLUMNS, _TYPES.get(dialect, _TYPES_OF_SQLITE), strict=True)]
    note = "-- Three columns that may be NULL, without default: the table is not written anew. Do not index them.\n"
    if dialect == POSTGRESQL:
        return f"{note}ALTER TABLE {where}\n" + ",\n".join(f"    ADD COLUMN IF NOT EXISTS {c}" for c in columns) + ";\n"
    if dialect == MYSQL:
        return (
            f"{note}ALTER TABLE {where}\n"
            + "".join(f"    ADD COLUMN {c},\n" for c in columns)
            + ("    ALGORITHM=INSTANT;\n")
        )
    return note + "".join(f"ALTER TABLE {where} ADD COLUMN {c};\n" for c in columns)


__all__ = ["migration_sql"]
