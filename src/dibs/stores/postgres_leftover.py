"""What a connection may leave behind: a statement that the server is at work on, though nobody waits for it any more.

A server that waits for its synchronous standby, or for its disk, does so without end: ``statement_timeout`` does not
count for a commit, and that the client is gone is not noticed. If whoever asks again did so on one connection more each
time, these would soon be all that the server takes, and nobody would get in, whatever for. So nothing is asked on a new
connection while the server is at work on what was asked on the one before.
"""

from __future__ import annotations

from psycopg import pq

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now
from dibs.errors import SetupRequired, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult

# Whether a session of this login is at work on what it was asked before so many seconds, and what it waits for. (With
# the time, another session that got its number is not taken for it.) What cannot tell its answer is as good as done.
_AT_WORK = b"""\
SELECT coalesce(it.wait_event, 'the processor')
FROM pg_stat_get_activity($1::int) AS it, pg_stat_get_activity(pg_backend_pid()) AS we
WHERE it.state = 'active' AND it.wait_event_type IS DISTINCT FROM 'Client'
    AND it.backend_type = we.backend_type AND it.usesysid = we.usesysid
    AND it.query_start < clock_timestamp() - $2 * interval '1 second'
"""


class Leftover:
    def __init__(self) -> None:
        self._pid = 0
        self._host = b""
        self._left_at = 0.0

    def is_on(self, host: bytes) -> bool:
        """Whether there may be one on this host."""
        return self._pid != 0 and self._host == host

    def note(self, pg: PGconn, host: bytes) -> None:
        """A connection to this host, not to a pooler, is about to be closed."""
        if pg.transaction_status == pq.TransactionStatus.ACTIVE:
            self._pid, self._host, self._left_at = pg.backend_pid, host, boot_now()

    def check(self, execute: Callable[[bytes, Sequence[bytes]], PGresult]) -> None:
        """Raise StoreUnavailable if there is one: the connection that it is asked on is of no use yet."""
        gone_s = boot_now() - self._left_at
        try:
            found = execute(_AT_WORK, (b"%d" % self._pid, b"%f" % gone_s))
        except SetupRequired:  # this login may not look
            self._pid = 0
            return
        if found.ntuples:
            waits_for = (found.get_value(0, 0) or b"").decode()
            raise StoreUnavailable(
                f"PostgreSQL is still at work on what it was asked {gone_s:.0f} s ago, and waits for {waits_for}",
                maybe_applied=False,
            )
        self._pid = 0
