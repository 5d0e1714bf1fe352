"""A store that is away, for whoever waits until it is back: whether to wait, and what is said of it meanwhile.

A store that was reached is waited for without limit. One that never was has the session's patience: at boot a program
may be there before its database, but an address that is wrong must end it in the end. With the patience in between, a
supervisor that starts it again at once does not see it fail too often to go on.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.errors import StoreUnavailable
    from dibs.session import Session

# Whoever found the store away tries again after this, and says so this often.
AWAY_S = 1.0
AWAY_TOLD_EVERY_S = 60.0


class Absence:
    """``tell`` is given a sentence at once, once a minute while it lasts, and when it is over."""

    def __init__(self, session: Session, tell: Callable[[str], object]) -> None:
        self._session = session
        self._tell = tell
        #: Since when the store is away.
        self.since: float | None = None
        self._told_at = 0.0

    def borne(self, error: StoreUnavailable) -> bool:
        """Say that it is away; whether to try again, after AWAY_S."""
        session = self._session
        now = session.clock.now()
        if self.since is None:
            self.since = self._told_at = now
            self._tell(f"the store is away, trying again: {error}")
        elif now - self._told_at >= AWAY_TOLD_EVERY_S:
            self._told_at = now
            self._tell(f"the store is still away, for {now - self.since:.0f} s now: {error}")
        return session.lane.reached or now - self.since < session.patience_s

    def over(self) -> None:
        """It has answered."""
        if self.since is not None:
            away_s, self.since = self._session.clock.now() - self.since, None
            self._tell(f"the store is back, {away_s:.0f} s after it was missed")
