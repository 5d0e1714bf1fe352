"""What the store must be told before it is told that a hold has ended."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.ask import Ask

if TYPE_CHECKING:
    from dibs.lane import Lane
    from dibs.store import Request
    from dibs.waiting import Waiting


class Before(Ask):
    """What must be answered before the release of a hold is sent, whatever the answer."""

    def __init__(self, request: Request, release: Ask, lane: Lane, waiting: Waiting) -> None:
        super().__init__(request, release.give_up_at)
        self._release = release
        self._lane = lane
        self._waiting = waiting

    # Both are called under the mutex by whoever serves the lane, who also serves what is put into it here.

    def received(self, outcome: object) -> None:
        self._go_on()
        self.settle(outcome)

    def failed(self, error: BaseException) -> None:
        self._go_on()
        self.settle(None, error)

    def _go_on(self) -> None:
        if not self.settled:  # after a Ctrl-C perhaps for the second time: a release sent twice does no harm
            self._lane.put(self._release)
            self._waiting.nudge(self._release.request.name)
