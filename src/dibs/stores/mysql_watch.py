"""What stands in for a signal on MySQL: a look, every now and then, at all the names that a client waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.clock import Deadline, RealClock, boot_now
from dibs.stores.mysql_values import document, hexed

if TYPE_CHECKING:
    from collections.abc import Collection

    from dibs.stores.mysql_link import Connection

# A look: at how many names, and how long it may take.
LOOK_NAMES_MAX = 200
LOOK_LIMIT_S = 1.0


class MySQLWatch:
    """Looks whether names are free with a waiter of this client first in line: one SELECT for all of them.

    Of very many names it looks at some each time, in turns.
    """

    interval_s: float | None = 0.002

    def __init__(self, connection: Connection, look: str, address: str) -> None:
        self._connection = connection
        self._look = look
        self._address = hexed(address)
        self._turn = 0

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        if not names:
            return ()
        some = list(names)
        if len(some) > LOOK_NAMES_MAX:
            self._turn = (self._turn + LOOK_NAMES_MAX) % len(some)
            some = (some[self._turn :] + some[: self._turn])[:LOOK_NAMES_MAX]
        asked = document(f'["{hexed(name)}"]' for name in some)
        deadline = Deadline(RealClock(), boot_now() + LOOK_LIMIT_S)
        found = self._connection.pieces(self._look, (asked, self._address, self._address), deadline)
        return [some[int(i) - 1] for i in found]

    def close(self) -> None:
        self._connection.close()
