"""What tells a client of PostgreSQL that a name it waits for is free: the notifications that releases send."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from psycopg.pq.abc import PGconn


class PostgresWatch:
    """The notifications that releases send to this client's channel; each names what became free."""

    interval_s: float | None = None

    def __init__(self, pg: PGconn, close: Callable[[], None]) -> None:
        self._pg = pg
        self._close = close

    def fileno(self) -> int:
        return self._pg.socket

    def changed(self, names: Collection[str]) -> Collection[str]:
        self._pg.consume_input()
        told = []
        while (notification := self._pg.notifies()) is not None:
            told.append(notification.extra.decode())
        return told

    def close(self) -> None:
        self._close()
