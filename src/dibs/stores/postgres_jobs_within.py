"""Puts and ends of jobs as statements for somebody else's connection, whatever driver it belongs to.

The texts are those of our own connections. A value goes as text, with the type it is to have: drivers differ in how
they would send an array.
"""

from __future__ import annotations

import re

from dibs._typing import TYPE_CHECKING, Any
from dibs.door import VALUE, Said
from dibs.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from dibs.door import Answer

_PARAMETER = re.compile(r"\$(\d+)::")
# An element of an array that is NULL; or a text that looks so, which only costs a look.
_NULL = re.compile(rb"[{,]NULL[,}]")


def check_nulls(parameters: Sequence[bytes | None]) -> Generator[Said, Answer, None]:
    """Refuse a connection that would read what is NULL as a text of four letters (its settings are the caller's)."""
    if any(value and _NULL.search(value) for value in parameters):
        answer = yield Said("SELECT current_setting('array_nulls')")
        if rows_of(answer)[0][0] != "on":
            raise InvalidOption(
                "array_nulls is off on that connection, and these jobs do not all have a key, a group or the like: "
                "SET LOCAL array_nulls = on first, or put them in several calls"
            )


def rows_of(answer: Answer) -> list[tuple[Any, ...]]:
    """Its rows, with texts for the bytes that psycopg leaves them as in a connection whose encoding is SQL_ASCII."""
    return [tuple(value.decode() if isinstance(value, bytes) else value for value in row) for row in answer.rows]


def said(sql: bytes, parameters: Sequence[bytes | None]) -> Said:
    """The statement, each place of a parameter with its value."""
    text = sql.decode()
    places = [int(number) - 1 for number in _PARAMETER.findall(text)]
    values: list[Any] = [None if (value := parameters[place]) is None else value.decode() for place in places]
    return Said(_PARAMETER.sub(f"CAST({VALUE} AS text)::", text), values)
