"""Observing an election: from one leader to the next, in steps for either face."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.names import check_seconds

if TYPE_CHECKING:
    from dibs.ask import Ask
    from dibs.campaign import ElectionCore, Leader
    from dibs.names import Seconds
    from dibs.steps import Steps

# An observer reads the store at most this often; its pauses are up to OBSERVE_JITTER longer, so that observers that
# were started together do not read together for ever.
OBSERVE_MIN_S = 1.0
OBSERVE_JITTER = 0.3


class Over(Exception):
    """There will be no more leaders to tell of: the observer or its client was closed."""


class Watch:
    """Tells of each leader once."""

    def __init__(self, core: ElectionCore[Any], interval: Seconds) -> None:
        self._desk = core._desk
        self._core = core
        self._interval_s = check_seconds("interval", interval, least=OBSERVE_MIN_S)
        self._look_at = float("-inf")
        #: Whom the last step told of, in a tuple; empty before the first.
        self._told: tuple[Leader | None, ...] = ()
        self._pause: Ask | None = None
        self._closed = False

    def next(self) -> Steps[Leader | None]:
        """Who leads, once that is another than last time. Raises Over at the end."""
        while not (self._closed or self._desk.closed):
            session = self._desk.session()
            if session.closed:
                break
            pause_s = self._look_at - session.clock.now()
            if pause_s > 0:
                self._pause = session.pause()
                if not self._closed:
                    yield session, self._pause, pause_s
                self._pause = None
                continue
            self._look_at = session.clock.now() + self._interval_s * (1 + OBSERVE_JITTER * session.clock.jitter())
            try:
                leader = yield from self._core.leader()
            except StoreUnavailable:
                if self._desk.closed:
                    break
                raise
            if not self._told or _term(leader) != _term(self._told[0]):
                self._told = (leader,)
                return leader
        raise Over

    def close(self) -> None:
        self._closed = True
        pause = self._pause
        if pause is not None:
            pause.settle(None)


def _term(leader: Leader | None) -> object:
    """What tells one term from another, also where numbers are best effort."""
    return leader and (leader.number, leader.holder)
