"""What some stores can besides the contract of ``dibs.store``, where their capabilities say so."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.store import Pin, Release, Renew, StoredGrant


class Historian(Protocol):
    """What a store can besides whose capabilities say ``history``: write down every grant, by whichever client."""

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        """From now on keep the last ``keep`` grants of each name; 0: none, and forget those that were kept."""
        ...

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        """The last grants of a name, newest first. Raises SetupRequired while none are kept."""
        ...

    def history_schema(self, keep: int) -> str:
        """What ``keep_history`` would run, as ``schema``."""


class Pinning(Protocol):
    """What a store has besides that can pin (``Capabilities.guard``)."""

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        """How to pin this lease on a connection of that dialect; ``files`` are those that an SQLite connection has.

        InvalidOption when that connection cannot be to this database.
        """
        ...

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        """Whether the pin that brought these rows is there, as this connection sees it."""
        ...

    def ending(self, request: Release) -> str:
        """A statement for that connection which ends a lease that nobody pins, if its transaction is committed.

        Only where ``Pin.release`` is None; elsewhere that does it.
        """
        ...


class Observed(Protocol):
    """What a store can besides whose leases may be watched (``Capabilities.observe``).

    There every renewal moves the ``expires_at`` that ``leases`` shows, if only by the smallest step, also when the
    store's clock went back meanwhile.
    """

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        """Free a lock at once that still has this token and this end, as ``leases`` has shown it; False if not."""
        ...
