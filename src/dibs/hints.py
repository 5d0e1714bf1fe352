"""The hints of a store to those who wait in one client: listened to while somebody does, and again when that broke.

Used by the waiting thread alone. Nothing rests on a hint: without any, everybody polls.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dibs.clock import Clock
    from dibs.lane import Lane
    from dibs.store import Store, Watch

# Pause before a watch that broke is opened again; polling goes on meanwhile.
WATCH_RETRY_S = 2.0


class Hints:
    def __init__(
        self, clock: Clock, lane: Lane, open_store: Callable[[], Store], address: str, request_timeout_s: float
    ) -> None:
        self._clock = clock
        self._lane = lane
        self._open_store = open_store
        self._address = address
        self._request_timeout_s = request_timeout_s
        self._store: Store | None = None
        self._watch: Watch | None = None
        self._possible = True
        self._open_at = float("-inf")
        self._outages = 0

    @property
    def interval_s(self) -> float | None:
        """How often to look for some; None where the descriptor tells, or nothing is watched."""
        return None if self._watch is None else self._watch.interval_s

    def fileno(self) -> int | None:
        """What becomes readable when there are some."""
        return None if self._watch is None else self._watch.fileno()

    def missing(self, now: float) -> bool:
        """Whether to open a watch now.

        One that was opened before the store was away may be to a server that is frozen, or gone without a word, while
        another has taken over.
        """
        needed = self._watch is None or self._outages != self._lane.outages
        return needed and self._possible and now >= self._open_at

    def open(self, now: float) -> bool:
        """Try to open one; whether that is settled, so that what happened before is to be asked for once more."""
        self._drop()
        self._outages = self._lane.outages
        try:
            self._store = self._store or self._open_store()
            self._watch = self._store.watch(self._address, Deadline(self._clock, now + self._request_timeout_s))
            self._possible = self._watch is not None
        except Exception:  # noqa: BLE001 - everybody polls, and the next look tries again
            self._open_at = now + WATCH_RETRY_S
            return False
        return True

    def changed(self, names: Collection[str]) -> Collection[str]:
        """What may be worth asking for; nothing when it breaks."""
        if self._watch is None:
            return ()
        try:
            return self._watch.changed(names)
        except Exception:  # noqa: BLE001 - as above
            self._drop()
            self._open_at = self._clock.now() + WATCH_RETRY_S
            return ()

    def close(self) -> None:
        self._drop()
        if self._store is not None:
            _close(self._store)

    def _drop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            _close(watch)


def _close(thing: Store | Watch) -> None:
    try:
        thing.close()
    except Exception:  # noqa: BLE001 - a hint source that cannot even be closed is no loss
        pass
