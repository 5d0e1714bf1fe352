"""What operators see of leases on MySQL and MariaDB, break and clear away."""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING
from dibs.store import StoredGrant, StoredLease
from dibs.stores import mysql_sql as sql
from dibs.stores.mysql_values import hexed, keys, us
from dibs.stores.tables import TablesMissing, without_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Deadline
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_link import Connection
    from dibs.stores.mysql_pins import Pins
    from dibs.stores.mysql_pools_purge import IdlePools
    from dibs.stores.mysql_tables import Tables

# Steps of one purge.
PURGE_STEPS_MAX = 100_000


class Operators:
    def __init__(self, connection: Connection, tables: Tables, pools: IdlePools, pins: Pins) -> None:
        self._connection = connection
        self._tables = tables
        self._sql = tables.sql
        self._pools = pools
        self._pins = pins

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        rows = self._connection.rows(self._sql["LIST"], (hexed(first), hexed(before)), deadline)
        return [
            StoredLease(
                name.decode("utf-8", "replace"),
                int(slot),
                (holder or b"").decode(),
                int(token),
                int(since_us) / 1e6,
                int(until_us) / 1e6,
                int(left_us) / 1e6,
                None if info is None else info.decode(),
                int(waiting),
                int(take),
            )
            for name, slot, holder, token, since_us, until_us, left_us, info, waiting, take in rows
        ]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        self._connection.wrote = False
        which = (hexed(name), fencing_token)
        broken = self._connection.write(self._sql["BREAK"], which, deadline)
        if broken and now:  # as a second step, so that a history can tell it from a release
            self._connection.write(self._sql["BREAK_NOW"], which, deadline)
        return bool(broken)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        self._connection.wrote = False
        which = (hexed(name), fencing_token)
        ended = self._connection.write(self._sql["END"], (*which, round(expires_at * 1e6)), deadline)
        if ended:
            self._connection.write(self._sql["BREAK_NOW"], which, deadline)
        return bool(ended)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        self._connection.wrote = False
        within = hexed(first), hexed(before)
        old = (*within, us(older_than))
        self._connection.write(self._sql["PURGE_FLOOR"], old, deadline)
        purged = 0
        for _ in range(PURGE_STEPS_MAX):
            some = self._connection.transaction(partial(self._purge_some, old), deadline)
            self._connection.wrote = self._connection.wrote or some > 0
            purged += some
            if some < sql.PURGE_ROWS:
                break
        purged += self._purge_pools(first, before, us(older_than), deadline)
        self._connection.write(self._sql["PURGE_LINE"], within, deadline)
        for _ in range(PURGE_STEPS_MAX):
            if not self._connection.transaction(self._pins.drop_rest, deadline):
                break
        return purged

    def _purge_some(self, old: tuple[str, str, int], execute: Callable[[str], Answer]) -> int:
        rows = execute(self._sql["PURGE_SOME"] % old).rows
        if rows:
            execute(self._sql["PURGE_THESE"] % keys(rows))
        return len(rows)

    def _purge_pools(self, first: str, before: str, older_than_us: int, deadline: Deadline) -> int:
        purged = 0
        for _ in range(PURGE_STEPS_MAX):
            ask = partial(self._connection.ask, deadline=deadline)
            names = self._pools.idle(ask, older_than_us, first, before)
            if not names:
                break
            first = names[-1] + "\x01"  # a name has no control characters, so this is before the next
            purged += self._connection.transaction(partial(self._pools.purge, names, older_than_us), deadline)
            self._connection.wrote = self._connection.wrote or purged > 0
        return purged

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        self._connection.reopen(deadline)
        try:
            rows = self._connection.attempt(self._tables.history() % (hexed(name), limit), deadline).rows
        except TablesMissing:
            raise without_history() from None
        return [
            StoredGrant(
                int(slot or 0),
                (holder or b"").decode(),
                int(token or 0),
                int(since_us or 0) / 1e6,
                None if until_us is None else int(until_us) / 1e6,
                None if ending is None else ending.decode(),
                None if info is None else info.decode(),
            )
            for slot, holder, token, since_us, until_us, ending, info in rows
        ]
