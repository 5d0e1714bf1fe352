"""Locks that several threads or tasks use: their ``on_lost`` does not say whose lease was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.hold import LOST
from tests.simulation.checker import Checker

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.hold import Hold
    from tests.simulation.process import Process
    from tests.simulation.programs import SimSession
    from tests.simulation.remembered import Tenure
    from tests.simulation.world import World


class SeveralChecker(Checker):
    """Each call of such an ``on_lost`` is for a lease that was lost."""

    ENDS_ALONE = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: When, and where, it was called of a lease whose acquire had not returned yet.
        self._early: dict[Callable[[], object], list[tuple[float, Process]]] = {}

    def _given(self, process: Process, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> Tenure:
        tenure = super()._given(process, session, hold, min_hold, told)
        on_lost = hold.terms.on_lost
        if on_lost is not None and hold.state == LOST and self._early.get(on_lost):
            told.append(self._early[on_lost].pop()[0])
        return tenure

    def told_lost(self, on_lost: Callable[[], object]) -> None:
        """It was called."""
        for tenure in self.tenures:
            if tenure.hold.terms.on_lost is on_lost and tenure.hold.state == LOST and not tenure.told:
                tenure.told.append(self.world.now)
                return
        assert self.world.current is not None
        self._early.setdefault(on_lost, []).append((self.world.now, self.world.current.process))

    def finish(self) -> None:
        super().finish()
        early = [process for calls in self._early.values() for _, process in calls if not process.dead]
        if early and not self.interrupts:
            self.world.broken("loss is loud: on_lost of a lock with several users is called, and nothing was lost")
