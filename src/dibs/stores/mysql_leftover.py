"""What a connection may leave behind: a statement that the server is at work on, though nobody waits for it any more.

As on PostgreSQL (``dibs.stores.postgres_leftover``): a commit that waits for a replica (semi-synchronous replication)
or for room on the disk does so for long, and that the client is gone is not noticed. So nothing is asked on a new
connection while the server is at work on what was asked on the one before.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The sessions of this login (and others, for who may see them): Id, User, Host, db, Command, Time, State, …
SESSIONS = "SHOW PROCESSLIST"
_AT_WORK = b"Query"
# The server counts whole seconds.
ROUNDED_S = 1.0


class Leftover:
    def __init__(self) -> None:
        self._session = 0
        self._left_at = 0.0

    def __bool__(self) -> bool:
        return self._session != 0

    def note(self, session: int) -> None:
        """The connection with this number is about to be closed, with an answer still owed."""
        self._session, self._left_at = session, boot_now()

    def check(self, shown: str, session: int, rows: Callable[[str], Sequence[Sequence[bytes | None]]]) -> None:
        """Raise StoreUnavailable if there is one: the connection with this number, where it is asked, is of no use yet.

        The server may be another one by now, or have begun anew, and have given the number to somebody else: to another
        login, or to one that has not been at work for so long. A proxy has numbers of its own, which tell nothing.
        """
        gone_s = boot_now() - self._left_at
        sessions = {int(row[0] or 0): row for row in rows(SESSIONS)}
        left, ours = sessions.get(self._session), sessions.get(session)
        if left is not None and ours is not None:
            _, user, _, _, command, time, state, *_ = left
            if user == ours[1] and command == _AT_WORK and int(time or 0) + ROUNDED_S >= gone_s:
                waits_for = (state or b"").decode("utf-8", "replace") or "nothing that it names"
                text = f"{shown} is still at work on what it was asked {gone_s:.0f} s ago: {waits_for}"
                raise StoreUnavailable(text, maybe_applied=False)
        self._session = 0
