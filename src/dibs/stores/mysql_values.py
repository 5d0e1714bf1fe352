"""Values as they stand in statements: literals, documents, and the rows of requests as either.

Texts are written as hexadecimal, so no escaping rule of any ``sql_mode`` has a say in them.
"""

from __future__ import annotations

from math import ceil

from dibs._typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dibs.store import Release
    from dibs.stores.rounds import Row

# Rows of one statement; it keeps them locked until it is done. And how much text of `info` they may carry together.
ROWS_MAX = 1000
INFO_BYTES_MAX = 1_000_000


def hexed(text: str) -> str:
    """A text as it stands between x' and ', or in a document."""
    return text.encode().hex()


def literal(text: str | None) -> str:
    """A text, or NULL."""
    return "NULL" if text is None else f"_utf8mb4 x'{hexed(text)}'"


def us(seconds: float) -> int:
    """Microseconds, rounded up."""
    return ceil(seconds * 1e6)


def optional(value: int | str | None) -> str:
    """A number or text of a document, or null."""
    if value is None:
        return "null"
    return f'"{hexed(value)}"' if isinstance(value, str) else str(value)


def document(rows: Iterable[str]) -> str:
    """The rows that ``asked()`` makes a table of."""
    return f"[{','.join(rows)}]"


def keys(rows: Iterable[Sequence[Any]]) -> str:
    """A document of names and slots, as the server told them."""
    return document(f'["{name.hex()}",{int(slot)}]' for name, slot in rows)


def quoted(name: str) -> str:
    """A name, or a claim, as a literal."""
    return f"x'{hexed(name)}'"


def quoted_all(names: Iterable[str]) -> str:
    return ",".join([quoted(name) for name in names])


def by_key(keys: list[str], values: list[str], of: str = "name") -> str:
    """An expression for the value that belongs to a row with one of these keys: halves, until what is left has one.

    The keys are literals, sorted, each once; ``of`` is the column, or columns, that they are compared with.
    """
    if values.count(values[0]) == len(values):
        return values[0]
    half = len(keys) // 2
    before, after = by_key(keys[:half], values[:half], of), by_key(keys[half:], values[half:], of)
    return f"IF({of} < {keys[half]}, {before}, {after})"


# -- rows -------------------------------------------------------------------------------------------------------------


def claim_of(row: Row) -> str:
    return f'["{hexed(row[2].name)}","{hexed(row[2].claim_id)}"]'


def listed(requests: list[Release]) -> tuple[str, str]:
    """The names, and what has to fit in the rows."""
    names = [quoted(r.name) for r in requests]
    claims = [f"({name},{r.slot:d},{quoted(r.claim_id)})" for name, r in zip(names, requests, strict=True)]
    return ",".join(names), ",".join(claims)


def acquires(rows: list[Row]) -> str:
    """Acquires with everything that a grant writes."""
    return document(
        f'["{hexed(r.name)}","{hexed(r.claim_id)}",{us(r.ttl)},"{hexed(r.holder)}",'
        f"{optional(r.info)},{optional(r.ticket)}]"
        for _, _, r in rows
    )


def grants(rows: list[Row]) -> tuple[str, ...]:
    """What a grant writes to many rows, for GRANT_MANY. The rows are sorted by name."""
    names = [quoted(name) for name, _, _ in rows]
    claims = [quoted(r.claim_id) for _, _, r in rows]
    return (
        by_key(names, claims),
        by_key(names, [literal(r.holder) for _, _, r in rows]),
        by_key(names, [literal(r.info) for _, _, r in rows]),
        by_key(names, [str(us(r.ttl)) for _, _, r in rows]),
        ",".join(names),
        ",".join(claims),
    )


def parts(rows: list[Row]) -> Iterator[tuple[list[Row], int]]:
    """The rows in parts that one statement may carry, each with the place of its first row."""
    first = size = 0
    for place, row in enumerate(rows):
        size += len(getattr(row[2], "info", None) or "")
        if place - first >= ROWS_MAX or size > INFO_BYTES_MAX:
            yield rows[first:place], first
            first, size = place, len(getattr(row[2], "info", None) or "")
    yield rows[first:], first
