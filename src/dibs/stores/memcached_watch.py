"""How a waiter learns that a lease on memcached is gone: it looks often, and never waits for the answer."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.stores.memcached_values import key_of
from dibs.stores.memcached_wire import RECEIVE_BYTES, RECORD_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Collection

    from dibs.stores.memcached_wire import Connection


class MemcachedWatch:
    """Looks whether the items are still there. A look asks, the next one reads what was answered: it never waits.

    Of many names each look asks for some, in turns.
    """

    interval_s: float | None = 0.01

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turn = 0
        self._asked: list[str] = []
        self._answers = b""
        self._left = b""

    def fileno(self) -> int | None:
        return self._connection.inlet.fileno()

    def changed(self, names: Collection[str]) -> Collection[str]:
        if not self._asked:
            if names:
                self._ask(list(names))
                self._left = self._connection.inlet.send(self._left)
            return ()
        if self._left:
            self._left = self._connection.inlet.send(self._left)
        self._answers += self._connection.inlet.receive(RECEIVE_BYTES)
        lines = self._answers.split(b"\r\n")
        if len(lines) <= len(self._asked):
            return ()
        asked, self._asked, self._answers = self._asked, [], b""
        return [name for name, line in zip(asked, lines, strict=False) if line == b"EN"]

    def _ask(self, names: list[str]) -> None:
        size = 0
        for number in range(len(names)):
            name = names[(self._turn + number) % len(names)]
            command = b"mg %b\r\n" % key_of(name)
            size += len(command)
            if size > RECORD_BYTES_MAX:
                self._turn += number
                break
            self._asked.append(name)
            self._left += command

    def close(self) -> None:
        self._connection.close()
