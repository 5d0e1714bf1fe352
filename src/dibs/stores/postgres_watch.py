"""What tells a client of PostgreSQL that it is worth asking again: the notifications that releases and puts send."""

from __future__ import annotations

from hashlib import sha256

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from psycopg.pq.abc import PGconn


def job_channel(schema: str, table: str) -> str:
    """Where everybody who keeps queues in the same tables is told of puts."""
    return "dibs_job_" + sha256(f"{schema}\0{table}".encode()).hexdigest()[:24]


class PostgresWatch:
    """The notifications that releases send to this client's channel, and puts to that of all; each names its own."""

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
