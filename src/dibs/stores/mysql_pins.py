"""The rows by which leases are pinned on MySQL and MariaDB: making them, and deleting those that nobody has locked.

See PIN in dibs.stores.mysql_sql for why that is enough.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.stores import mysql_sql as sql
from dibs.stores.mysql_values import hexed, keys, quoted_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from dibs.store import Renew
    from dibs.stores.mysql_drivers import Answer

    Execute = Callable[[str], Answer]


class Pins:
    """The statements, with the tables of one store in them."""

    def __init__(self, text: Callable[..., str]) -> None:
        self._guard, self._mark, self._lock = text(sql.GUARD), text(sql.MARK), text(sql.PIN)
        self._unlocked, self._unlocked_of, self._rest = (
            text(sql.UNLOCKED),
            text(sql.UNLOCKED_OF),
            text(sql.UNLOCKED_REST),
        )
        self._over = text(sql.PINS_OVER, "name", "slot")
        self._unguard = text(sql.UNGUARD, "name", "slot")

    def make(self, request: Renew, execute: Execute) -> str:
        """Make the row of a lease that is to be pinned; the statement that pins it."""
        where = hexed(request.name), request.slot
        execute(self._guard % where)
        execute(self._mark % (*where, hexed(request.claim_id)))
        return self._lock % where

    def there(self, request: Renew, rows: Sequence[tuple[Any, ...]], execute: Execute) -> bool:
        """Whether somebody has locked the row, on the server that sent these rows to whoever was to lock it."""
        ((server,),) = execute(f"SELECT {sql.SERVER}").rows
        told = [row[0] if isinstance(row[0], bytes) else str(row[0]).encode() for row in rows]
        return told == [server] and not execute(self._unlocked % (hexed(request.name), request.slot)).rows

    def drop(self, names: Iterable[str], execute: Execute) -> set[str]:
        """Inside a transaction: delete what nobody has locked, and whose lease is over; the names of what was deleted.

        A row of a lease in force is left alone, although nobody has locked it: its holder's transaction is about to.
        """
        listed = quoted_all(sorted(names))
        return self._drop_over(execute(self._unlocked_of % listed).rows, execute)

    def drop_rest(self, execute: Execute) -> set[str]:
        """Inside a transaction: the same, some of those whose leases are no more."""
        return self._drop_over(execute(self._rest % ()).rows, execute)

    def drop_ended(self, name: str, slot: int, execute: Execute) -> bool:
        """Inside a transaction: delete this row, whatever its lease, unless it is locked; whether it did."""
        where = hexed(name), slot
        if not execute(self._unlocked % where).rows:
            return False
        execute(self._unguard % keys([(name.encode(), slot)]))
        return True

    def _drop_over(self, rows: Sequence[tuple[Any, ...]], execute: Execute) -> set[str]:
        over: Sequence[tuple[Any, ...]] = execute(self._over % keys(rows)).rows if rows else ()
        if over:
            execute(self._unguard % keys(over))
        return {name.decode() for name, _ in over}
