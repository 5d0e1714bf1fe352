"""What stands in for a signal on MySQL: a look, every now and then, at all the names that a client waits for.

A name may be a lease's or a queue's. Nothing tells which, so both are looked for. Of a queue the first free jobs are
looked at. Where all of these wait for others of their groups, nothing is told: whoever waits asks again by himself, and
finds what is behind them. Jobs are looked for the less often the longer it takes.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.clock import Deadline, RealClock, boot_now
from dibs.errors import SetupRequired
from dibs.jobs import LOOK_BACK_PART
from dibs.stores.mysql_values import document, hexed
from dibs.stores.tables import TablesMissing

if TYPE_CHECKING:
    from collections.abc import Collection

    from dibs.stores.mysql_link import Connection

# A look: at how many names, and how long it may take.
LOOK_NAMES_MAX = 200
LOOK_LIMIT_S = 1.0
# Free jobs of a queue that are looked at.
LOOK_JOBS_MAX = 200
# Where no queues are kept, it is seen this much later that they are now.
NO_QUEUES_S = 1.0


class MySQLWatch:
    """Looks whether names are free with a waiter of this client first in line, and which queues have something ready.

    That is one SELECT each for all of them; of very many names it looks at some each time, in turns.
    """

    interval_s: float | None = 0.002

    def __init__(self, connection: Connection, look: str, any_free: str, ready: str, *, address: str) -> None:
        self._connection = connection
        self._look = look
        self._any_free, self._ready = any_free, ready
        #: By the boot clock.
        self._jobs_at = float("-inf")
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
        return [*(some[int(i) - 1] for i in found), *self._with_jobs(some, asked, deadline)]

    def _with_jobs(self, names: list[str], asked: str, deadline: Deadline) -> list[str]:
        """Which of them are queues with something ready."""
        began = boot_now()
        if began < self._jobs_at:
            return []
        try:
            ((joined,),) = self._connection.attempt(self._any_free % asked, deadline).rows
            some = [names[int(i) - 1] for i in joined.split(b",")] if joined else []
            if some:
                each = ",".join(self._ready % (hexed(name), LOOK_JOBS_MAX) for name in some)
                (ready,) = self._connection.attempt(f"SELECT {each}", deadline).rows
                some = [name for name, is_ready in zip(some, ready, strict=True) if is_ready == b"1"]
        except (TablesMissing, SetupRequired):  # or none that this login may read
            self._jobs_at = began + NO_QUEUES_S
            return []
        now = boot_now()
        self._jobs_at = now + LOOK_BACK_PART * (now - began)
        return some

    def close(self) -> None:
        self._connection.close()
