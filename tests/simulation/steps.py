"""Worlds in which somebody sets the store's clock, and locks that are taken over only by who has watched them.

With ``takeover="observe"`` no such step lets two in. With the default, ``"expiry"``, it does, and is not promised not
to: that is the control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.store import Granted, Released, Renewed
from tests.simulation.checker import Checker
from tests.simulation.programs import NAMES, TTL_MAX_S, Program

if TYPE_CHECKING:
    from dibs.store import Outcome, Request
    from tests.simulation.network import Call, Network
    from tests.simulation.world import World

STEPS_MAX = 3
FORWARD_S = (5.0, 60.0, 1e6)
BACK_S = 10.0
# A watcher may have seen a renewal late, on the slowest clock.
WATCHED_S = 1.5 * TTL_MAX_S / 0.95


class StepChecker(Checker):
    """What ends is not told by the store's clock here, so it is told by what was done to a name last."""

    #: By whoever has watched it for a whole ttl.
    TOLD = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.taken_within_s += WATCHED_S
        self.set_back = False
        self._changed: dict[str, float] = {}

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        super().applied(call, request, holder, outcome)
        if type(outcome) in (Granted, Renewed, Released):
            self._changed[request.name] = self.world.now

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        super().lease_broken(name, token, now)
        self._changed[name] = self.world.now

    def lease_ended(self, name: str, token: int) -> None:
        """A watcher has ended a lease."""
        claim_id = self.claims_by_token[name, token]
        for tenure in self.live:
            if tenure.claim_id == claim_id and self._counts(tenure) and self._held(tenure):
                self.world.broken(f"P5 the lease of {claim_id}, who trusts it, is ended by a watcher")
        self.holders[name].pop(claim_id, None)
        self._changed[name] = self.world.now

    def _left_in_store(self) -> list[tuple[str, str]]:
        shelf = self._network().shelf
        now = shelf.now()
        return [
            (name, p.claim_id) for name, p in shelf.permits.items() if p.claim_id is not None and p.expires_at > now
        ]

    def _free_at(self, name: str) -> float | None:
        if self.set_back:
            return None  # a place in line is kept by the store's clock
        left = any(name == of for of, _ in self._left_in_store())
        return None if name not in self._changed else self._changed[name] + (WATCHED_S if left else 0.0)


class Sweeper(Program):
    """Takes every name when all others are gone: none is lost."""

    def __call__(self) -> None:
        for name in NAMES:
            terms = self.host.desk.terms(1.0, True, None, False, 0.0, None, None, "raise", None)
            lease = None
            while lease is None:  # the way to the store may take longer than it has patience
                lease = self._acquire(self._core(name, terms), None)
            tenure = self.checker.acquired(self.name, self.host.session, lease._hold, 0.0, [])
            self.checker.releasing(tenure)
            self.checker.release_returned(tenure, lease.release())


def set_clock(world: World, network: Network) -> None:
    """Set the store's clock, forward or back."""
    back = world.random() < 0.3
    seconds = -BACK_S * world.random() if back else FORWARD_S[int(world.random() * len(FORWARD_S))] * world.random()
    world.note("store", "has its clock set by %+.3f s", seconds)
    network.stepped_s += seconds
    checker = network.checker
    if back and isinstance(checker, StepChecker):
        checker.set_back = True
