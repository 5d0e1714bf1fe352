"""Plain row locks, for work that fits into one short transaction of the caller's own.

Where the rows are in a database, and the work on them is a few statements there, no lease is needed: the database's own
locks on the rows are held exactly as long as the transaction, and whoever comes at the same time gets other rows. dibs
keeps nothing of it. For work that takes longer, or is done elsewhere, claim the rows (``client.claims``) or queue them.
"""

from __future__ import annotations

from dibs import guarding
from dibs._typing import TYPE_CHECKING, Any
from dibs.door import POSTGRESQL, SQLITE, VALUE, Said, door_to
from dibs.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.door import Answer, Door
    from dibs.guarding import Talk

ROWS_MAX = 100_000


def lock(connection: Any, query: str, params: Sequence[Any] = (), *, n: int | None = None) -> list[tuple[Any, ...]]:
    """The rows of a query that nobody else has locked, locked until the transaction on ``connection`` ends.

    ``SELECT … LIMIT n FOR UPDATE SKIP LOCKED``: rows that another transaction has locked are passed over. What you do
    to the rows is committed with the locks' end, and undone by a rollback, also when your process dies.

    connection: as for ``lease.guard``, with a transaction begun. query: a SELECT from one table, without LIMIT, FOR or
    a semicolon. params: what stands in it for ``%s`` (SQLite: ``?``). n: as many rows at most.

    SQLite has no locks on rows: there the transaction becomes the only writer of the whole file, which others wait for.
    PostgreSQL 9.5, MySQL 8.0 and MariaDB 10.6 or newer. Raises InvalidOption for what is wrong with these, also for a
    connection without a transaction where that can be told (not on MySQL), and whatever the driver raises.
    """
    door = door_to(connection)
    return guarding.converse(_locking(door, query, params, n), door)


async def lock_async(
    connection: Any, query: str, params: Sequence[Any] = (), *, n: int | None = None
) -> list[tuple[Any, ...]]:
    """The same for asyncio; connections as for ``AsyncLease.guard``."""
    door = door_to(connection)
    return await guarding.converse_async(_locking(door, query, params, n), door)


def _locking(door: Door, query: object, params: Any, n: object) -> Talk[list[tuple[Any, ...]]]:
    text = _marked(door.dialect, query, params)
    if n is not None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= ROWS_MAX:
            raise InvalidOption(f"n is a whole number from 1 to {ROWS_MAX:,}, or None for all rows, not {n!r}")
        text += f" LIMIT {n}"
    if door.dialect == SQLITE:
        # The only lock there is, on the file: taken before the rows are read, so that what is read is what is locked.
        # (A write of the number that is there already; a transaction that has not begun is begun by it or before it.)
        version: Answer = yield Said("PRAGMA user_version")
        if door.in_transaction() is not True:
            yield Said("BEGIN IMMEDIATE")
        yield Said(f"PRAGMA user_version = {int(version.rows[0][0])}")
        found: Answer = yield Said(text, params)
        return found.rows
    found = yield Said(text + " FOR UPDATE SKIP LOCKED", params)
    if door.dialect == POSTGRESQL and found.rows:
        kept: Answer = yield Said("SELECT txid_current_if_assigned() IS NOT NULL")
        if not kept.rows[0][0]:
            raise InvalidOption(
                f"{door} has no transaction open (autocommit), so the rows are not locked any more: begin one first"
            )
    return found.rows


def _marked(dialect: str, query: object, params: Any) -> str:
    """The query with a ``VALUE`` for each parameter."""
    if not isinstance(query, str) or not query.strip():
        raise InvalidOption(f"query is the text of a SELECT, not {query!r}")
    if isinstance(params, (str, bytes)) or not hasattr(params, "__len__") or hasattr(params, "items"):
        raise InvalidOption(f"params is a list or tuple of the query's parameters, not {params!r}")
    text = query.strip().rstrip(";").rstrip()
    if not params:
        return text
    mark = "?" if dialect == SQLITE else "%s"
    parts = text.split(mark)
    if len(parts) != len(params) + 1:
        raise InvalidOption(f"the query has {len(parts) - 1} times {mark!r}, and {len(params)} parameters were given")
    return VALUE.join(part.replace("%%", "%") if dialect != SQLITE else part for part in parts)


__all__ = ["lock", "lock_async"]
