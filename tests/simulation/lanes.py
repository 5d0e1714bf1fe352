"""The lanes of a world's clients: what was put there is carried to the store, and does not lie there.

Who was interrupted just when it had put something would else have it done with whatever is asked for next, which may be
hours later. And what is to be renewed does not stand behind what is due later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.hold import HELD, Hold

if TYPE_CHECKING:
    from dibs.session import Session
    from tests.simulation.process import Process
    from tests.simulation.world import World

# Whoever has put something may be held up so long before it is served.
LIES_MAX_S = 1.0


class Lanes:
    def __init__(self, world: World) -> None:
        self._world = world
        self._lanes: list[tuple[Process, Session]] = []
        #: Since when something lies in a lane that nobody serves.
        self._since: dict[Session, float] = {}
        #: What is due: by the renewer, and since when it was seen to be so.
        self._due: dict[Hold, tuple[float, float]] = {}

    def add(self, process: Process, session: Session) -> None:
        """Look at this one, too."""
        self._lanes.append((process, session))

    def clients(self) -> list[tuple[Process, Session]]:
        """Whose they are."""
        return self._lanes

    def look(self, slack_s: float) -> None:
        """Nothing lies in any of them for longer than that."""
        now = self._world.now
        for process, session in self._lanes:
            if process.dead or process.paused or not self._lies(session):
                self._since.pop(session, None)
            elif now - self._since.setdefault(session, now) > LIES_MAX_S + slack_s:
                self._found(process)
            if not process.dead and process.troubled_at < now - slack_s:
                self._look_at_renewals(process, session, slack_s)

    def _look_at_renewals(self, process: Process, session: Session, slack_s: float) -> None:
        renewer, now = session.renewer, process.clock.boot()
        if renewer._batch or renewer._unwanted or session.closed:
            return  # it is at work, and looks when that is over
        for hold in renewer.tracked():
            if hold.due < now and hold.state == HELD and hold.given:
                seen, at = self._due.get(hold, (hold.due, now))
                self._due[hold] = hold.due, at if seen == hold.due else now
                if now - self._due[hold][1] > slack_s:
                    self._world.broken(f"renewal: {hold.claim_id} of {process.name} is due, and not looked at")

    def finish(self) -> None:
        """Everybody is gone, and had time: nothing may be left in any of them."""
        for process, session in self._lanes:
            if not process.dead and self._lies(session):
                self._found(process)

    def _lies(self, session: Session) -> bool:
        lane = session.lane
        if lane._server is not None:
            return False
        return bool(lane._batch) or any(not ask.dropped for ask in lane.pending.asks)

    def _found(self, process: Process) -> None:
        self._world.broken(f"P9 something lies in the lane of {process.name}, and nobody sends it")
