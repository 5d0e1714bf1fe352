"""Worlds of elections: who campaigns there, resigns and hands over, and what may not happen.

Each name is an election, each program a candidate whose value is its own name. Some stand by in one of two seats, and
are turned away or replace others where there are more; some are reserves; leaders resign, now and then for a candidate
they name, who may not be there. A term is a lock's lease, of which everything is checked that is checked of locks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dibs.campaign import ElectionCore
from dibs.election import Term
from dibs.errors import LeaseLost, NotHeld, StoreUnavailable
from dibs.hold import HELD
from dibs.steps import run
from dibs.store import Granted, Held, Transfer
from dibs.succession import OFFER, SPARE_S, VALUE
from tests.simulation.checker import BACKOFF_S, POLL_S, Checker
from tests.simulation.programs import NAMES, TTLS_S, Program, SimLease, SimSession

if TYPE_CHECKING:
    from dibs.store import Outcome, Request
    from dibs.wishes import AcquireAsk
    from tests.simulation.network import Call
    from tests.simulation.remembered import Tenure
    from tests.simulation.world import World

SEATS = 2
OFFER_MAX_S = 3.0
# A reserve sees nobody lead for this long before it asks, having looked; and looks once more where it is too early.
RESERVE_S = 1.5 / 0.95 + POLL_S
# What is offered to a candidate who is not there, by a leader who dies, lasts this long.
OFFERED_MAX_S = OFFER_MAX_S + SPARE_S


class SimTerm(SimLease, Term):
    """The shipped term; the checker hears when it is made."""

    __slots__ = ()


class ElectionProgram(Program):
    """One thread of a process, which is a candidate."""

    checker: ElectionChecker

    def _round(self) -> None:
        world, habits, desk = self.world, self.habits, self.host.desk
        rand = world.random
        chance = rand()
        timeout = None if chance < habits.patience else 0.0 if chance < 0.8 else 3.0 * rand()
        told: list[float] = []
        ttl, info = TTLS_S[int(rand() * len(TTLS_S))], {VALUE: self.name}
        terms = desk.terms(ttl, True, None, False, 0.0, None, lambda: told.append(world.now), "raise", info)
        name = NAMES[int(rand() * habits.names)]
        reserve = rand() < 0.2
        seats = SEATS if not reserve and rand() < 0.4 else None
        core: ElectionCore[SimTerm] = ElectionCore(
            desk, name, terms, SimTerm, self.name, -1 if reserve else 0, seats, seats is not None and rand() < 0.5
        )
        self.checker.candidates.add(self.name)
        self._maybe_interrupt()
        term = self._campaign(core, timeout)
        if term is None:
            return
        tenure = self.checker.acquired(self.name, self.host.session, term._hold, 0.0, told)
        try:
            world.note(self.process.name, "leads %s under %s", name, tenure.claim_id)
            self._lead(core, term, tenure)
        except StoreUnavailable as error:
            world.note(self.process.name, "does not know: %s", str(error))
        except (LeaseLost, NotHeld) as error:
            world.note(self.process.name, "is told: %s", str(error))
        finally:
            tenure.dropped = tenure.hold.state == HELD
            del core, term

    def _campaign(self, core: ElectionCore[SimTerm], timeout: float | None) -> SimTerm | None:
        kind = "reserve" if core.priority else "candidate" if core.standby_max is None else "standby"
        self.world.note(self.process.name, "campaigns for %s as a %s, waits %s", core.name, kind, timeout)
        self.checker.campaigns[self.name] = core
        try:
            return self._attempt(core.campaign(self.name, timeout), timeout, refused=core.standby_max is not None)
        finally:
            del self.checker.campaigns[self.name]  # it keeps the term, which may be dropped

    def _lead(self, core: ElectionCore[SimTerm], term: SimTerm, tenure: Tenure) -> None:
        world, clock, habits = self.world, self.process.clock, self.habits
        rand = world.random
        for _ in range(int(3 * rand()) + 1):
            clock.sleep(habits.work_max_s * rand())
            term.check()
        if rand() < habits.drop:
            world.note(self.process.name, "drops %s", tenure.claim_id)
            return
        self._meet_renewal(term)
        self.checker.releasing(tenure)
        others = sorted(self.checker.candidates - {self.name})
        if others and rand() < 0.5:
            to = others[int(rand() * len(others))]
            world.note(self.process.name, "resigns for %s", to)
            given = run(core.resign(self.name, to, OFFER_MAX_S * rand()))
            self.checker.export_returned(tenure)
            self.checker.resigned(tenure, to, given)
        else:
            given = run(core.resign(self.name, None, 5.0)) if rand() < 0.5 else term.release()
            self.checker.release_returned(tenure, given)
        world.note(self.process.name, "has resigned: %s", given)


class ElectionChecker(Checker):
    """What an election promises besides what its terms promise as leases."""

    WANTS_ONE = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        #: Everybody who has ever campaigned, by what they say they are.
        self.candidates: set[str] = set()
        #: The value of each claim of a candidate.
        self._values: dict[str, str] = {}
        #: To whom each claim of an offer is offered; and that claim, by the one that led.
        self._offers: dict[str, str] = {}
        self._offered: dict[str, str] = {}
        #: What candidates campaign by. (Known of those that are alone with it.)
        self.campaigns: dict[object, ElectionCore[SimTerm]] = {}
        #: By which claims each has asked for seats; and when it was told that a seat is taken.
        self._seekers: dict[str, object] = {}
        self._told_taken: dict[tuple[object, str], float] = {}

    def wished(self, who: object, ask: AcquireAsk) -> None:
        if not ask.request.name.startswith("default:"):
            self._seekers[ask.request.claim_id] = who
        else:
            self._values[ask.request.claim_id] = json.loads(ask.request.info)[VALUE]
            super().wished(who, ask)

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        super().applied(call, request, holder, outcome)
        if not request.name.startswith("default:"):
            claim = self.claims[request.claim_id]
            claim.made = claim.excused = True  # a seat: no program has it in hand
            if type(outcome) is Held:
                self._told_taken[self._seekers[request.claim_id], request.name] = self.world.now
        if isinstance(request, Transfer) and type(outcome) is Granted:
            self.claims[request.from_claim].followed_up = True  # by whoever has taken it up
            info = json.loads(request.info or "{}")
            if OFFER in info:
                self._offers[request.claim_id] = info[OFFER]["to"]
                self._offered[request.from_claim] = request.claim_id
            elif self._offers.get(request.from_claim) != info[VALUE]:
                to = self._offers.get(request.from_claim)
                self.world.broken(f"elections: {info[VALUE]} takes up as {request.claim_id} what was offered to {to}")

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        super().lease_broken(name, token, now)
        self.claims[self.claims_by_token[name, token]].followed_up = True  # it may be an offer, which then is over

    def refused(self, who: object, session: SimSession, error: Exception | None = None) -> None:
        super().refused(who, session, error)
        core, attempt = self.campaigns.get(who), self.attempts[who]
        if error is not None or core is None or core._refusal is None or session.closed or not self.calm:
            return
        if "replaced" in core._refusal:
            claims = [claim for claim, seeker in self._seekers.items() if seeker == who]
            if not any(self.claims[claim].broken for claim in claims if claim in self.claims):
                self.world.broken(f"elections: {who} is told: {core._refusal}; nobody has taken its seat")
            return
        told = [at for (seeker, _), at in self._told_taken.items() if seeker == who and at >= attempt.since]
        if len(told) < SEATS:
            self.world.broken(f"elections: {who} is told: {core._refusal}; it asked {len(told)} of them")

    def _look_for_waiters(self, now: float) -> None:
        super()._look_for_waiters(now)
        for who, attempt in self.attempts.items():
            core, process = self.campaigns.get(who), attempt.process
            if core is None or not core.priority or attempt.timeout == 0 or process.dead or process.paused:
                continue
            free_at = self._free_at(core._key)
            if free_at is None:
                continue
            quiet_since = max(free_at, attempt.since, process.troubled_at, self.world.trouble_until + BACKOFF_S)
            if now - quiet_since > self.taken_within_s + RESERVE_S + self.slack_s:
                self.world.broken(
                    f"P7 {who} is a reserve of {core.name}, which nobody has led since {free_at:.3f}, in peace and "
                    f"quiet for {now - quiet_since:.2f} s"
                )

    def _value_of(self, claim_id: str) -> str | None:
        """The value of the candidate who has asked by this claim, which may be its second."""
        value = self._values.get(claim_id)
        if value is None:
            infos = (ask.request.info for ask in self._asks.values() if ask.request.claim_id == claim_id)
            value = next((json.loads(info)[VALUE] for info in infos if info is not None), None)
        return value

    def resigned(self, tenure: Tenure, to: str, given: bool) -> None:
        """A leader resigned for a candidate, and is told whether that one leads."""
        offer = self._offered.get(tenure.claim_id)
        if offer is not None and (tenure.key, offer) not in self._left_in_store():
            self.claims[offer].followed_up = True  # it has ended, and somebody else may lead by now
        token = self.claims[tenure.claim_id].token
        terms = sorted(number for name, number in self.claims_by_token if name == tenure.key and number > token)
        elected = [self._value_of(self.claims_by_token[tenure.key, number]) for number in terms]
        if given and to not in elected:
            self.world.broken(
                f"elections: {tenure.claim_id} resigned for {to}, who is said to lead, and after it came {elected}"
            )
