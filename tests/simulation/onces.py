"""Worlds of work that is done once: what programs do there, and what may not happen.

Each name is a work that is to be done at most once in ``keep`` seconds. A program begins it, works for a while, and
ends it well, by an exception, or not at all; or it is told that it was done before. The runs are leases of locks, of
which everything is checked that is checked of locks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from dibs.errors import LeaseLost, StoreUnavailable
from dibs.once import Once, OnceCore, OnceRun, once_options
from dibs.store import Granted, Release, Released
from tests.simulation.checker import Checker
from tests.simulation.network import TOLD_S
from tests.simulation.programs import NAMES, TTLS_S, Program, SimLease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dibs.lease import Lease
    from dibs.once_record import OnceRecord
    from dibs.steps import Steps
    from dibs.store import Acquire, Outcome, Request, Transfer
    from tests.simulation.network import Call
    from tests.simulation.world import World

KEEPS_S = (1.0, 2.0, 4.0, 8.0)
# Whoever waits looks again after this part of the time waited so far, and between these; written here once more.
PAUSE_PART = 0.5
PAUSE_MIN_S, PAUSE_MAX_S = 0.3, 1.0
RATE_MIN = 0.95


class Failed(Exception):
    """The work of a run did not succeed."""


class OnceProgram(Program):
    """One thread of a process, which does works that are to be done once."""

    checker: OnceChecker

    def _round(self) -> None:
        world, habits, desk = self.world, self.habits, self.host.desk
        rand = world.random
        ttl, keep_s = TTLS_S[int(rand() * len(TTLS_S))], KEEPS_S[int(rand() * len(KEEPS_S))]
        chance = rand()
        timeout = None if chance < habits.patience else 0.0 if chance < 0.8 else 3.0 * rand()
        told: list[float] = []
        options = once_options(
            desk, keep_s, True, ttl, timeout, world.max_hold(), lambda: told.append(world.now), "raise", None
        )
        name = NAMES[int(rand() * habits.names)]
        core: OnceCore[Lease, OnceRun] = OnceCore(desk, name, None, options, SimLease, OnceRun)
        self._maybe_interrupt()
        begun = self._begin(core, timeout, core.begin(self.name))
        if begun is None or not begun:
            return
        self._do(begun, begun, told)

    def _do(self, block: Once | OnceRun, begun: OnceRun, told: list[float]) -> None:
        """As in ``with`` of the one or the other, of which the once was entered."""
        world, lease, name = self.world, begun.lease, begun._core.name
        tenure = self.checker.acquired(self.name, self.host.session, lease._hold, 0.0, told)
        world.note(self.process.name, "does %s under %s", name, lease.claim_id)
        try:
            tenure.release_called = block is begun  # by who is interrupted on the way in
            with begun if block is begun else self._entered(block):
                tenure.release_called = False
                try:
                    self._work(begun)
                finally:
                    self.checker.releasing(tenure)
                self.checker.succeeds(lease.claim_id)
            self.checker.told_done(lease.claim_id)
            world.note(self.process.name, "has done %s", name)
        except Failed:
            world.note(self.process.name, "has failed at %s", name)
        except LeaseLost as error:
            self.checker.run_lost(lease.claim_id)
            world.note(self.process.name, "is told: %s", str(error))
        except StoreUnavailable as error:
            world.note(self.process.name, "does not know: %s", str(error))
        finally:
            # The block is over, and with it the run: who was interrupted on the way in has given it back, too.
            tenure.release_called = True
            del lease, block, begun

    @contextmanager
    def _entered(self, once: Once | OnceRun) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            once.__exit__(type(error))
            raise
        else:
            once.__exit__(None)

    def _work(self, begun: OnceRun) -> None:
        habits, rand = self.habits, self.world.random
        for _ in range(int(3 * rand()) + 1):
            self.process.clock.sleep(habits.work_max_s * rand())
            if rand() < 0.5:
                begun.lease.check()
        if rand() < 0.3:
            raise Failed
        self._meet_renewal(begun.lease)
        begun.result = begun.lease.claim_id

    def _begin(
        self, core: OnceCore[Lease, OnceRun], timeout: float | None, steps: Steps[OnceRun], *also: type[Exception]
    ) -> OnceRun | None:
        """What was begun, or found to be done."""
        world = self.world
        world.note(self.process.name, "is to do %s once, waits %s", core.name, timeout)
        since = world.now
        begun = self._attempt(steps, timeout, *also, refused=True)
        if begun is not None and not begun:
            self.checker.not_acquired(self.name, self.host.session)
        if begun is not None and begun.done is not None:
            world.note(self.process.name, "finds %s done by %s", core.name, begun.result)
            self.checker.found_done(core.name, begun.done, since)
        elif begun is not None and not begun and timeout is None:
            world.broken(f"P12 who waits for {core.name} without limit is told that it is neither free nor done")
        return begun


class Mark(NamedTuple):
    """The mark of a successful run, as the store was given it."""

    claim_id: str
    token: int
    applied_at: float
    kept_until: float


class OnceChecker(Checker):
    """What a once promises besides what its locks promise."""

    #: It looks once more whether that is done, when its time is over.
    WANTS_ONE = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.marks: dict[str, list[Mark]] = {}
        #: Claims of runs that left their blocks well, and of those that were told that they had lost the lease.
        self._well: set[str] = set()
        self._lost: set[str] = set()
        #: Tokens of marks that an operator has taken away.
        self._forgotten: set[int] = set()

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        super().applied(call, request, holder, outcome)
        if not isinstance(request, Release) or not request.keep or type(outcome) is not Released:
            return
        claim_id, now = request.claim_id, self.world.now
        if claim_id not in self._well:
            self.world.broken(f"once: {claim_id} is marked as done, and its run has not succeeded")
        if claim_id in self._lost:
            self.world.broken(f"once: {claim_id} is marked as done after it was told that it had lost its lease")
        mark = Mark(claim_id, self.claims[claim_id].token, now, now + request.keep)
        self.marks.setdefault(request.name, []).append(mark)

    def _let_in(self, request: Acquire | Transfer, outcome: Granted, trusting: Any) -> None:
        super()._let_in(request, outcome, trusting)
        for mark in self.marks.get(request.name, ()):
            if self.world.now < mark.kept_until and mark.token not in self._forgotten:
                self.world.broken(f"once: {request.claim_id} may begin what {mark.claim_id} has done")

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        self._forgotten.add(token)
        super().lease_broken(name, token, now)

    # -- the programs ---------------------------------------------------------------------------------------------

    def succeeds(self, claim_id: str) -> None:
        """The work of a run is done; its block is about to be left."""
        self._well.add(claim_id)

    def told_done(self, claim_id: str) -> None:
        """The block of a run was left without an exception: others will find that it was done."""
        if not any(mark.claim_id == claim_id for marks in self.marks.values() for mark in marks):
            self.world.broken(f"once: {claim_id} is told that it is kept as done, and it is not")

    def run_lost(self, claim_id: str) -> None:
        """The block of a run raised LeaseLost: nobody will find that it was done."""
        self._lost.add(claim_id)
        if any(mark.claim_id == claim_id for marks in self.marks.values() for mark in marks):
            self.world.broken(f"once: {claim_id} is told that its lease was lost, and it is kept as done")

    def found_done(self, name: str, done: OnceRecord, since: float) -> None:
        """A begin that was called at ``since`` says that this was done."""
        for mark in self.marks.get(f"default:{name}", ()):
            if mark.token == done.fencing_token:
                if done.result != mark.claim_id or mark.kept_until < since:
                    self.world.broken(f"once: {name} was done by {mark.claim_id}, and is shown as {done}")
                if self.calm and not self.world.switched:
                    self._told_soon(name, mark, since)
                return
        self.world.broken(f"once: {name} is said to have been done with token {done.fencing_token}, and was not")

    def _told_soon(self, name: str, mark: Mark, since: float) -> None:
        """A short wait ends soon after what it waited for; a longer one, after part of the time that it took."""
        waited_s, late_s = max(0.0, mark.applied_at - since), self.world.now - max(since, mark.applied_at)
        pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S + waited_s * PAUSE_PART)
        # (A look may stand behind those of a few others, and a pause is no shorter than the look before it was.)
        if late_s > pause_s / RATE_MIN + TOLD_S + 30 * self._network().latency_max_s:
            self.world.broken(f"P12 {name} was done after {waited_s:.2f} s, and who waits is told {late_s:.2f} s later")
