"""Worlds of locks whose grants operators stop for a while: what they do there, and what may not happen.

Programs take locks as ever. Operators pause the names, one by one or together, extend a pause, resume, or let it end by
itself. From the return of a pause on, nobody asks the store for a new grant until it is over; whoever holds is left
alone, and whoever waits has the name soon after.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dibs import pausing
from dibs.errors import StoreUnavailable
from dibs.pauses import PAUSES_FRESH_S
from dibs.pausing import PAUSE_MIN_S, Pause
from dibs.steps import run
from dibs.store import Acquire, Held
from tests.simulation.checker import Checker
from tests.simulation.programs import NAMES, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.store import Outcome, Request
    from tests.simulation.network import Call
    from tests.simulation.world import World

PAUSE_MAX_S = 4.0
# Which names a pause is of.
COVERS = {"red": ("red",), "r*": ("red",), "*": NAMES}
# A list of pauses is this old at most when somebody is asked for by it, on the slowest clock; messages come on top.
LIST_MAX_S = PAUSES_FRESH_S / 0.95
_KEPT = "default~paused"


class PauseProgram(Program):
    """One thread of a process, which takes locks; some are operators instead."""

    checker: PauseChecker

    def __call__(self) -> None:
        rand = self.world.random
        if rand() >= 0.3:
            super().__call__()
            return
        for _ in range(1 + int(2 * rand())):
            self.process.clock.sleep(rand())
            try:
                self._operate(tuple(COVERS)[int(rand() * len(COVERS))])
            except StoreUnavailable as error:
                self.world.note(self.process.name, "does not know: %s", str(error))

    def _operate(self, name: str) -> None:
        rand, world, desk = self.world.random, self.world, self.host.desk
        ttl = PAUSE_MIN_S + (PAUSE_MAX_S - PAUSE_MIN_S) * rand()
        world.note(self.process.name, "pauses %s for %.2f s", name, ttl)
        pause = run(pausing.pausing(desk, name, None, ttl, "ada"))
        world.note(self.process.name, "has paused %s until %s", name, pause.until)
        self.checker.has_paused(pause)
        self.process.clock.sleep(2.0 * rand())
        if rand() < 0.3:
            world.note(self.process.name, "sees pauses of %s", [pause.name for pause in run(pausing.listing(desk))])
        if rand() < 0.7:
            world.note(self.process.name, "resumes %s", name)
            world.note(self.process.name, "has resumed %s: %s", name, run(pausing.resuming(desk, name)))


class PauseChecker(Checker):
    """What a pause promises."""

    #: Nobody tells of the end of a pause.
    TOLD = False

    pauses = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: Claims whose last request was answered, and not by a grant.
        self._refused: set[str] = set()
        self._sent: set[str] = set()
        #: When a name was seen to be paused.
        self._paused_at: dict[str, float] = {}

    def sent(self, call: Call, requests: Sequence[Request]) -> None:
        leases = [request for request in requests if not _is_pause(request)]
        super().sent(call, leases)
        for request in leases:
            if not isinstance(request, Acquire):
                continue
            anew = request.claim_id in self._refused or request.claim_id not in self._sent
            self._sent.add(request.claim_id)
            self._refused.discard(request.claim_id)
            since = min(self._since(request.name), default=self.world.now)
            if anew and self.prompt and self.world.now - since > LIST_MAX_S + self._network().latency_max_s:
                self.world.broken(
                    f"pause: {request.claim_id} is asked for, and {request.name} paused since {since:.4f}"
                )

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        if not _is_pause(request):
            super().applied(call, request, holder, outcome)

    def answered(self, call: Call) -> None:
        super().answered(call)
        if call.error is None and call.requests:
            for request, outcome in zip(call.requests, call.answer, strict=True):
                if isinstance(request, Acquire) and type(outcome) is Held:
                    self._refused.add(request.claim_id)

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        if name != _KEPT:
            super().lease_broken(name, token, now)

    def _since(self, name: str) -> list[float]:
        """Since when a name is paused, by each pause in force."""
        pool = self._network().shelf.pools.get(_KEPT)
        rows = [] if pool is None else [row for _, row in pool.holdings.values() if row.expires_at > self.world.now]
        return [row.acquired_at for row in rows if name.partition(":")[2] in COVERS[json.loads(row.info or "")["name"]]]

    def has_paused(self, pause: Pause) -> None:
        """pause() is back."""
        if self.world.now - pause.since.timestamp() < LIST_MAX_S:
            self.world.broken(f"pause: {pause} is told to be in force, and others have older lists")

    def _free_at(self, name: str) -> float | None:
        free_at = super()._free_at(name)
        if self._since(name):
            self._paused_at[name] = self.world.now
        return None if free_at is None else max(free_at, self._paused_at.get(name, 0.0))


def _is_pause(request: Request) -> bool:
    return request.name == _KEPT
