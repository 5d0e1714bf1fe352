"""How MySQL and MariaDB carry out a statement: what both tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# MySQL, which reads what stands in the comment, has several ways to tell, and two columns more.
EXPLAIN = "EXPLAIN /*!80000 FORMAT=TRADITIONAL */ "


class Step(NamedTuple):
    """A table that is read: in which way, by which key, and what is done besides."""

    table: str
    how: str
    key: str
    besides: str


def steps(rows: Sequence[Sequence[Any]]) -> list[Step]:
    """The answer to EXPLAIN."""
    told = []
    for row in rows:
        texts = [(value.decode() if isinstance(value, bytes) else str(value or "")) for value in row]
        table, how, key, besides = (2, 4, 6, 11) if len(texts) == 12 else (2, 3, 5, 9)
        told.append(Step(texts[table], texts[how], texts[key], texts[besides]))
    return told
