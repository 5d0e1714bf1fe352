"""What MySQL and MariaDB are told to run a caller's query, and how values go into it and come out.

The key is the query's first column, whose name the server is asked for, as neither database can name the columns of a
subquery from outside without knowing how many there are.
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption
from dibs.queries import filled
from dibs.stores.mysql_values import hexed

if TYPE_CHECKING:
    from dibs.queries import Query

# Codes of column types, as the protocol has them.
_INTEGERS = frozenset((1, 2, 3, 8, 9, 13))
_DECIMALS = frozenset((0, 246))
_FLOATS = frozenset((4, 5))
_DATES = frozenset((10, 14))
_MOMENTS = frozenset((7, 12))

_HELD = """\
SELECT 1 FROM {lease} AS l WHERE l.name = CONCAT(x'{prefix}', CONVERT(q.{key} USING utf8mb4)) AND l.claim_id IS NOT NULL
    AND l.expires_at > UTC_TIMESTAMP(6) LIMIT 1"""


def columns(query: Query) -> str:
    """The statement that tells the names of the columns."""
    return f"SELECT * FROM (\n{filled(query, literal)}) AS q LIMIT 0"


def held(query: Query, lease: str, key: str) -> str:
    """What brings a row where somebody has the lease on the row of a query, ``q``, by its quoted first column."""
    return _HELD.format(lease=lease, prefix=hexed(query.prefix), key=key)


def statement(query: Query, held: str, key: str) -> str:
    """The statement that finds what is asked for, by the quoted first column."""
    found = f"SELECT * FROM (\n{filled(query, literal)}) AS q\n"
    if query.only is not None:
        return f"{found}WHERE q.{key} IN ({', '.join(map(literal, query.only))})"
    return f"{found}WHERE ({held}) IS NULL\nLIMIT {query.limit:d}"


def literal(value: object) -> str:
    """A value as it stands in a statement: texts in hexadecimal, so that no sql_mode has a say in it."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, (float, Decimal)):
        return format(value)
    if isinstance(value, (bytes, bytearray)):
        return f"x'{value.hex()}'"
    if isinstance(value, (datetime, date, time)):
        value = value.isoformat(" ") if isinstance(value, datetime) else value.isoformat()
    elif isinstance(value, timedelta):
        raise InvalidOption("a timedelta cannot be a parameter of a query: pass seconds")
    elif isinstance(value, (list, tuple, set, frozenset)):
        return f"({', '.join(map(literal, value))})"
    return f"_utf8mb4 x'{hexed(str(value))}'" if str(value) else "''"


def read(value: bytes | None, kind: int) -> Any:
    """A value as Python has it, by the type of its column; what is no text stays bytes."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    try:
        if kind in _INTEGERS:
            return int(text)
        if kind in _DECIMALS:
            return Decimal(text)
        if kind in _FLOATS:
            return float(text)
        if kind in _DATES:
            return date.fromisoformat(text)
        if kind in _MOMENTS:
            return datetime.fromisoformat(text)
    except ValueError:  # 0000-00-00, for one
        pass
    return text
