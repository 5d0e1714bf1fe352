"""What may not happen. The checker sees everything at once: every store act, every call, every lease by its own clock.

It believes nobody: tokens and claims are what the store answered, but order, ownership and time are its own. A lease's
trust is asked of the shipped ``Keeper.is_held`` after every step of the world, for processes that are paused, too.
Promises are numbered as in ``docs/explanation/safety.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.errors import StoreUnavailable
from dibs.hold import HELD, LOST, RELEASED, Hold
from dibs.store import Acquire, Granted, Held, Release, Released, Renew, Renewed, Transfer
from dibs.wishes import AcquireAsk
from tests.simulation.lanes import Lanes
from tests.simulation.remembered import Attempt, Claim, Tenure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.jobs import JobOutcome, JobRequest
    from dibs.session import Session
    from dibs.store import Outcome, Request
    from tests.simulation.network import Call, Network
    from tests.simulation.process import Process
    from tests.simulation.programs import SimSession
    from tests.simulation.world import World

# A waiter's slowest poll, on the slowest clock; written here once more, so that a change of the code is noticed.
POLL_S = 1.0 / 0.95
# A claim lane that met faults pauses at most this long before it tries again.
BACKOFF_S = 1.6
# Threads, on a good day; messages come on top.
SLACK_S = 0.3
# Without trouble a free name is taken by somebody who waits within this, also when those ahead in line are dead.
TAKEN_WITHIN_S = 2.0 + POLL_S
# Messages that take no longer are no reason to lose a lease.
QUICK_S = 0.03
# A crowd of tasks has its calls answered within this then, one after the other.
ANSWERED_WITHIN_S = 1.0
# Over leases are looked at in every such step.
OVER_EVERY = 16


def is_held(process: Process, session: Session, hold: Hold) -> bool:
    """The shipped answer; in the middle of its trust nothing could be wrong with it but that it is no."""
    in_force = hold.state == HELD and process.clock.boot() < hold.trusted_until
    return in_force or session.keeper.is_held(hold)


class Checker:
    #: Who releases a lease, or ends an item, is the only one who has it.
    ENDS_ALONE = True
    #: What a program wants is one name, and nothing else decides whether it has it.
    WANTS_ONE = True
    #: Whoever waits for what becomes free is told of it, where hints are sent.
    TOLD = True

    #: Of what an operator breaks leases.
    operated = "red"
    #: Clients look for pauses.
    pauses = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.network: Network | None = None
        self.claims: dict[str, Claim] = {}
        self.last_tokens: dict[str, int] = {}
        #: Claims that are to be asked for once. (A wish that waits may travel as one that does not: dibs.along.)
        self._once: set[str] = set()
        #: Which claim was granted a token of a name; and who has the name, with how many permits, until its release.
        self.claims_by_token: dict[tuple[str, int], str] = {}
        self.holders: dict[str, dict[str, int]] = {}
        #: Who waits at the store, by name and claim: as which arrival of all.
        self.lines: dict[str, dict[str, int]] = {}
        #: What stands for a ticket of a name: that arrival, and whose it is.
        self._arrivals: dict[tuple[str, int], tuple[int, Process]] = {}
        self.tenures: list[Tenure] = []
        self.live: list[Tenure] = []
        self.over: list[Tenure] = []
        self.attempts: dict[object, Attempt] = {}
        #: When the store told each claim last that it has to wait.
        self._told_at: dict[str, float] = {}
        self._asks: dict[str, AcquireAsk] = {}
        #: Names with a place in line that came with a request whose caller had gone by then.
        self._lined_up_late: set[str] = set()
        #: Nothing goes wrong in this world: promises that faults suspend are checked, too.
        self.calm = False
        self.in_order = False
        #: Threads are never held up, so what is to be told is told on time.
        self.prompt = False
        #: Programs are interrupted.
        self.interrupts = False
        self.slack_s = SLACK_S
        self.taken_within_s = TAKEN_WITHIN_S
        self.grants = 0
        self.lanes = Lanes(world)
        self._next_look = 0.0
        world.observe = self.look

    # -- the store ------------------------------------------------------------------------------------------------

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        """A request was tried. ``holder`` is the claim the row showed before."""
        claim = self._claim(request.claim_id, call.process)
        if isinstance(request, Acquire):
            if type(outcome) is Granted:
                self._granted(call, request, claim, holder, outcome)
            elif type(outcome) is Held and request.wake is not None:
                if call.over:
                    self._lined_up_late.add(request.name)
                self._lines_up(request, claim, outcome)
            return
        if isinstance(request, Transfer):
            if type(outcome) is Granted:
                if holder not in (request.claim_id, request.from_claim):
                    self.world.broken(f"P8 {request.claim_id} takes over from {request.from_claim} what {holder} holds")
                self._granted(call, request, claim, holder, outcome)
            return
        current = self.holders.setdefault(request.name, {})
        if type(outcome) in (Renewed, Released) and request.claim_id not in current:
            whose = ", ".join(current) or "nobody"
            self.world.broken(f"P8 ownership: {request.claim_id} ended or renewed the lease of {whose}")
        if isinstance(request, Release):
            claim.followed_up = True
            if type(outcome) is Released:
                current.pop(request.claim_id, None)
            tenure = self._tenure(request.claim_id)
            # (What a downgrade that came too late was granted once more has another token, and is nobody's.)
            if (
                tenure is not None
                and tenure.hold.granted.fencing_token == claim.token
                and not (tenure.release_called or tenure.session.closed)
            ):
                self.world.broken(f"P5 the store is told of the end of {request.claim_id} before its holder has let go")
        elif type(outcome) is Renewed:
            claim.renewed = claim.renewed or call.task_name == "dibs-renew"
            tenure = self._tenure(request.claim_id)
            if tenure is not None and tenure.released_at is not None and not call.over:
                self.world.broken(f"P10 a renewal of {request.claim_id} reaches the store after its release returned")

    def _granted(
        self, call: Call, request: Acquire | Transfer, claim: Claim, holder: str | None, outcome: Granted
    ) -> None:
        name, claim_id = request.name, request.claim_id
        token = outcome.fencing_token
        claim.late = claim.late or call.over
        holders = self.holders.setdefault(name, {})
        if claim_id in holders and holder == claim_id:
            if token != claim.token:
                self.world.broken(f"P2 {claim_id} had token {claim.token} and is told {token}")
            if isinstance(request, Acquire):  # a transfer leaves as many permits as there are
                holders[claim_id] = min(holders[claim_id], request.take)
            return
        self.grants += 1
        last = self.last_tokens.get(name, 0)
        if token <= last:
            self.world.broken(f"P2 token {token} is granted after token {last}")
        self.last_tokens[name] = token
        self.claims_by_token[name, token] = claim_id
        claim.token = token
        claim.unanswered = True
        if not call.over:
            claim.granted = True
            claim.followed_up = False
        if self.calm and not self.world.switched and isinstance(request, Acquire) and not request.permits:
            self._look_if_kept(name, claim_id)
        trusting = [t for t in self.live if t.key == name and t.claim_id != claim_id]
        self._let_in(request, outcome, [t for t in trusting if self._counts(t) and self._held(t)])
        if isinstance(request, Acquire):  # a transfer passes nobody in line
            self._passes(request, claim)

    def _look_if_kept(self, name: str, claim_id: str) -> None:
        """A lock is granted: whoever released it before had it for its min_hold."""
        last = next((tenure for tenure in reversed(self.tenures) if tenure.key == name), None)
        if last is None or last.hold.state != RELEASED or last.dropped or last.hold.exported or last.process.dead:
            return
        # Counted on its own clock from when it was asked for: a message and a stall before it was given.
        least_s = last.min_hold / 1.05 - 2 * self._network().latency_max_s - SLACK_S
        if self.world.now < last.given_at + least_s:
            self.world.broken(
                f"min_hold: {claim_id} is granted {name} within the {last.min_hold:.2f} s of {last.claim_id}"
            )

    def _let_in(self, request: Acquire | Transfer, outcome: Granted, trusting: Sequence[Tenure]) -> None:
        """P5: a claim is granted the name while these others trust their leases."""
        for tenure in trusting:
            self.world.broken(f"P5 the store grants {request.claim_id} while {tenure.claim_id} trusts its lease")
        self.holders[request.name] = {request.claim_id: 1}

    def _lines_up(self, request: Acquire, claim: Claim, outcome: Held) -> None:
        """A claim that waits was told Held."""
        self._told_at[request.claim_id] = self._network().shelf.now()
        if outcome.ticket is None:
            return  # it is asked for along with another
        arrival, _ = self._arrivals.setdefault((request.name, outcome.ticket), (len(self._arrivals), claim.process))
        if claim.withdrawn_at is None:
            self.lines.setdefault(request.name, {})[request.claim_id] = arrival

    def _passes(self, request: Acquire, claim: Claim) -> None:
        """P13: a claim that was granted leaves the line, with whoever was before it."""
        claim_id = request.claim_id
        # Who takes a claim back is told a moment later that it has: of that one, nobody waits any more.
        line = {other: at for other, at in self.lines.get(request.name, {}).items() if not self._is_dropped(other)}
        place = line.pop(claim_id, len(self._arrivals))
        if request.ticket is not None and (request.name, request.ticket) in self._arrivals:
            place = min(place, self._arrivals[request.name, request.ticket][0])
        self.lines[request.name] = {other: at for other, at in line.items() if at > place}
        if self.in_order and claim.withdrawn_at is None and not self._is_dropped(claim_id):
            for other, at in line.items():
                if at < place:
                    self.world.broken(f"P13 {claim_id} is granted before {other}, who came first")

    def _is_dropped(self, claim_id: str) -> bool:
        ask = self._asks.get(claim_id)
        return ask is not None and ask.dropped

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        """An operator broke a lease; ``now`` takes the promise of exclusion away from it, as documented."""
        claim_id = self.claims_by_token[name, token]
        claim = self.claims[claim_id]
        if claim.token == token:  # else the claim has been granted another since it was broken for the first time
            self.holders[name].pop(claim_id, None)
            if (name, claim_id) in self._left_in_store():
                self.world.broken(f"P8 token {token} was broken, and {claim_id}, whose it was, still has the name")
        claim.broken = True
        claim.broken_at_once = claim.broken_at_once or now

    # -- the calls ------------------------------------------------------------------------------------------------

    def sent(self, call: Call, requests: Sequence[Request]) -> None:
        """A call begins."""
        for request in requests:
            claim = self._claim(request.claim_id, call.process)
            if claim.granted:
                claim.followed_up = True
            if isinstance(request, Acquire):
                if request.ticket is not None and not request.permits:
                    _, whose = self._arrivals.get((request.name, request.ticket), (0, None))
                    if whose is not call.process:
                        self.world.broken(f"P13 {request.claim_id} asks with a ticket that its process never drew")
                if claim.withdrawn_at is not None:
                    claim.sent_after += 1
                    if claim.sent_after > 1:
                        self.world.broken(f"P9 {request.claim_id} was withdrawn and is asked for again")
                if claim.refused and not self.interrupts:
                    self.world.broken(f"P11 {request.claim_id} was to ask once, was told Held, and asks again")
            elif isinstance(request, Renew):
                if request.ttl <= 0:
                    self.world.broken(f"max_hold of {request.claim_id} is over, and it is renewed for {request.ttl} s")
                if claim.withdrawn_at is not None and not claim.excused:
                    # Once that can be, when this thread was held up after it had looked what there is to renew.
                    claim.renewed_after += 1
                    if claim.renewed_after > 1:
                        self.world.broken(f"P9 {request.claim_id} is renewed, but whoever asked for it has gone")
                tenure = self._tenure(request.claim_id)
                if tenure is not None and tenure.released_at is not None:
                    self.world.broken(f"P10 a renewal of {request.claim_id} is sent after its release returned")

    def answered(self, call: Call) -> None:
        """A call's answer is in its client's hands."""
        if call.error is not None or not call.requests:
            return
        for request, outcome in zip(call.requests, call.answer, strict=True):
            if isinstance(request, (Acquire, Transfer)) and request.claim_id in self.claims:
                claim = self.claims[request.claim_id]
                claim.answered_at = call.process.clock.boot()
                claim.unanswered = claim.unanswered and type(outcome) is not Granted
                claim.refused = type(outcome) is Held and request.claim_id in self._once

    def lease_ended(self, name: str, token: int) -> None:
        """A watcher has ended a lease; see ``StepChecker``."""

    def applied_to_jobs(self, call: Call, request: JobRequest, outcome: JobOutcome) -> None:
        """A request on jobs was carried out; see ``JobChecker``."""

    def applied_cancel(self, cancelled: Sequence[int]) -> None:
        """An operator has cancelled these jobs; see ``JobChecker``."""

    def _claim(self, claim_id: str, process: Process) -> Claim:
        claim = self.claims.get(claim_id)
        if claim is None:
            claim = self.claims[claim_id] = Claim(process)
        return claim

    def _tenure(self, claim_id: str) -> Tenure | None:
        return next((tenure for tenure in reversed(self.tenures) if tenure.claim_id == claim_id), None)

    # -- the programs ---------------------------------------------------------------------------------------------

    def attempt(self, who: object, process: Process, timeout: float | None) -> Attempt:
        """A program begins to acquire."""
        attempt = self.attempts[who] = Attempt(process, timeout, self.world.now)
        return attempt

    def wished(self, who: object, ask: AcquireAsk) -> None:
        """The session made an ask for the program's attempt."""
        self._asks[ask.request.claim_id] = ask
        attempt = self.attempts.get(who)
        if attempt is not None:
            attempt.asks.append(ask)
            attempt.asked_at = self.world.now
        if not ask.blocking:
            self._once.add(ask.request.claim_id)

    def waits(self, session: SimSession, ask: AcquireAsk) -> None:
        """It was sent on its way, and is asked for until it is granted. (Of names, attempts tell as much.)"""

    def acquired(self, who: object, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> Tenure:
        """The acquire returned a lease; ``told`` is when its on_lost was called."""
        return self._given(self._over(who, session).process, session, hold, min_hold, told)

    def _given(self, process: Process, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> Tenure:
        claim = self._claim(hold.claim_id, process)
        claim.given = claim.followed_up = True
        tenure = Tenure(process, session, hold, min_hold, told)
        self.tenures.append(tenure)
        self.live.append(tenure)
        if hold.state != HELD:
            tenure.stillborn = True
            if process.clock.boot() < hold.trusted_until and not (session.closed or claim.broken):
                self.world.broken(f"P6 acquire returned {hold.claim_id} in the middle of its trust, and it is over")
        if hold.trusted_until <= claim.answered_at:
            self.world.broken(f"P6 {hold.claim_id} was over before its grant was even answered")
        return tenure

    def made(self, hold: Hold) -> None:
        """A Lease was made of a grant; what asked for it has not returned yet."""
        self.claims[hold.claim_id].made = True

    def refused(self, who: object, session: SimSession, error: Exception | None = None) -> None:
        """The acquire is about to return None, or to raise this: in peace and quiet there is a reason."""
        if self.interrupts or session.closed or not (self.calm and self._is_quick()):
            return
        attempt = self.attempts[who]
        if type(error) is StoreUnavailable and session.request_timeout_s > ANSWERED_WITHIN_S:
            self.world.broken(f"accuracy: in peace and quiet the store is said to be away: {error}")
        elif error is None and self.WANTS_ONE and attempt.asks:
            # (What was never sent stood behind another of its own process.)
            claim = self.claims.get(attempt.asks[-1].request.claim_id)
            if claim is not None and claim.token:
                early = not claim.unanswered and attempt.process.clock.boot() - claim.answered_at > QUICK_S
                if attempt.timeout == 0 or early:
                    self.world.broken(f"accuracy: it is granted token {claim.token}, and told that it cannot have that")

    def not_acquired(self, who: object, session: SimSession) -> None:
        """The acquire returned None, or raised."""
        attempt = self._over(who, session)
        for ask in attempt.asks:
            self._withdrawn(attempt.process, session, ask)

    def _withdrawn(self, process: Process, session: SimSession, ask: AcquireAsk) -> None:
        """Nothing came of this ask for the program that made it."""
        claim = self._claim(ask.request.claim_id, process)
        claim.withdrawn_at = self.world.now
        for line in self.lines.values():
            line.pop(ask.request.claim_id, None)
        claim.excused = session.closed or (type(ask.outcome) is Hold and ask.outcome.given)
        if self.calm and not claim.excused:
            self.world.at(self.world.now + self.slack_s, self._given_back, ask)

    def _over(self, who: object, session: SimSession) -> Attempt:
        world = self.world
        attempt = self.attempts.pop(who)
        process = attempt.process
        if attempt.timeout is not None:
            limit_s = (attempt.timeout + session.request_timeout_s) / process.rate + self.slack_s
            if world.now - attempt.since > limit_s and process.troubled_at < attempt.since and self.prompt:
                world.broken(
                    f"P11 acquire(timeout={attempt.timeout:.2f}) took {world.now - attempt.since:.2f} s, with requests "
                    f"that time out after {session.request_timeout_s:.2f} s"
                )
        return attempt

    def _given_back(self, ask: AcquireAsk) -> None:
        claim_id = ask.request.claim_id
        if type(ask.outcome) is Hold and ask.outcome.given:
            return  # interrupted with the Lease as good as in hand: it was dropped, and its ttl runs out
        claim = self.claims.get(claim_id)
        if claim is None or claim.late:
            return  # interrupted while the request was on its way
        if (ask.request.name, claim_id) in self._left_in_store():
            self.world.broken(f"P9 the acquire of {claim_id} is over, and it still holds the name")

    def releasing(self, tenure: Tenure) -> None:
        """release() is called: soon it holds the name no more, also where a Ctrl-C comes in."""
        tenure.release_called, tenure.release_called_at = True, self.world.now
        if self.ENDS_ALONE and self.calm and not tenure.min_hold:
            self.world.at(self.world.now + self.slack_s, self._look_if_released, tenure)

    def _look_if_released(self, tenure: Tenure) -> None:
        hold = tenure.hold
        if hold.state == LOST or hold.exported or tenure.dropped or tenure.session.closed or tenure.process.dead:
            return
        if (tenure.key, tenure.claim_id) in self._left_in_store():
            self.world.broken(f"P9 the release of {tenure.claim_id} was called, and it still holds the name")

    def release_returned(self, tenure: Tenure, confirmed: bool | None) -> None:
        """release() is back, and says whether the store confirmed; or a block is over, which says nothing (None)."""
        if tenure.session.closed:
            return  # the client was closed meanwhile, and that released it: nobody waited for the answer here
        tenure.released_at = self.world.now
        if tenure.release_called_at is not None:
            self._is_back(tenure.session, "a release", tenure.release_called_at)
        if confirmed is False and self.calm and self._is_quick() and not self.interrupts:
            self.world.broken(f"P8 the release of {tenure.claim_id} is not confirmed, in peace and quiet")
        sure = confirmed and not tenure.min_hold and not self.claims[tenure.claim_id].late
        if sure and (tenure.key, tenure.claim_id) in self._left_in_store():
            self.world.broken(f"P8 the release of {tenure.claim_id} was confirmed, and it still holds the name")

    def export_returned(self, tenure: Tenure) -> None:
        """export() is back: from now on no renewal of that lease reaches the store."""
        if not tenure.session.closed:
            tenure.released_at = self.world.now

    def _is_back(self, session: SimSession, what: str, since: float) -> None:
        """What has no time limit ends with the patience, and what is under way then: a request, or a pause."""
        took_s, process = self.world.now - since, session.process
        limit_s = (session.patience_s + session.request_timeout_s) / process.rate + BACKOFF_S + self.slack_s
        if took_s > limit_s and process.troubled_at < since and self.prompt:
            self.world.broken(f"P11 {what} took {took_s:.2f} s, with a patience of {session.patience_s:.2f} s")

    def closed(self, session: SimSession, since: float) -> None:
        """A client was closed: it has given back what it held."""
        self._is_back(session, "close()", since)
        if self.calm:
            self.world.at(self.world.now + self.slack_s, self._look_if_all_is_given_back, session)

    def _look_if_all_is_given_back(self, session: SimSession) -> None:
        left = self._left_in_store()
        for tenure in self.tenures:
            hold = tenure.hold
            if tenure.session is not session or (tenure.key, tenure.claim_id) not in left:
                continue
            # (What was lost is left to its ttl: somebody may be at work under it yet.)
            expected = tenure.min_hold or hold.state == LOST or hold.exported or self.claims[tenure.claim_id].late
            if not expected:
                self.world.broken(f"P9 the client of {tenure.claim_id} is closed, and it still holds the name")

    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    # -- every step -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask every lease that may be held whether it is."""
        now = self.world.now
        live = self.live
        if live:
            holding: dict[str, list[Tenure]] = {}
            for tenure in live.copy():
                if tenure.process.dead or tenure.dropped:
                    live.remove(tenure)
                    continue
                if self._held(tenure):
                    if tenure.over_at is not None:
                        self.world.broken(f"P6 {tenure.claim_id} was over at {tenure.over_at:.4f} and is held again")
                    if tenure.process.clock.boot() > tenure.hold.ends_at:
                        self.world.broken(f"max_hold of {tenure.claim_id} is over, and it is held")
                    if not self._counts(tenure):
                        continue
                    self._beside(holding.setdefault(tenure.key, []), tenure)
                elif tenure.hold.state != HELD or not tenure.session.in_between():
                    # While the mutex is taken, the shipped code would wait: a renewal may just be getting in.
                    if tenure.over_at is None:
                        tenure.over_at = now
                    if tenure.hold.state != HELD:
                        live.remove(tenure)
                        self.over.append(tenure)
                        self._look_why(tenure)
        if self.world.steps % OVER_EVERY == 0:
            for tenure in self.over:
                if self._held(tenure):
                    self.world.broken(f"P6 {tenure.claim_id} was over at {tenure.over_at:.4f} and is held again")
        if now >= self._next_look:
            self._next_look = now + 0.1
            self._look_for_waiters(now)
            if self.prompt:
                self.lanes.look(self.slack_s)

    def _look_why(self, tenure: Tenure) -> None:
        """It has just ended."""
        hold = tenure.hold
        if hold.state == LOST:
            # (A downgrade that came too late is granted the claim once more, with another token.)
            mine = self.claims[tenure.claim_id].token == hold.granted.fencing_token
            kept = mine and (tenure.key, tenure.claim_id) in self._left_in_store()
            if not (tenure.stillborn or tenure.dropped):
                self._look_why_lost(tenure.process, tenure.session, hold, kept)
        elif not (tenure.release_called or tenure.session.closed):
            self.world.broken(f"P4 {tenure.claim_id} is released, and nobody has released it")

    def _look_why_lost(self, process: Process, session: Session, hold: Hold, kept: bool) -> None:
        """A loss has a cause; ``kept``: the store still has the claim."""
        if process.dead or session.closed or hold.orphan:
            return
        if process.clock.boot() < hold.trusted_until:
            if kept:
                self.world.broken(f"P4 {hold.claim_id} is given up in the middle of its trust: {hold.reason}")
        elif self.calm and self._is_quick() and hold.terms.renew and not hold.reaches_its_end():
            self.world.broken(f"renewal: {hold.claim_id} is lost in peace and quiet: {hold.reason}")

    def _is_quick(self) -> bool:
        """No thread is held up, and no message is late, for so long that leases of a second are lost."""
        return self.prompt and self._network().latency_max_s <= QUICK_S

    def _beside(self, others: list[Tenure], tenure: Tenure) -> None:
        """P1: a lease is held while these others are."""
        if others:
            self.world.broken(f"P1 {others[0].claim_id} and {tenure.claim_id} are held at the same moment")
        others.append(tenure)

    def _left_in_store(self) -> list[tuple[str, str]]:
        """What the store has held: names, and by which claim."""
        permits = self._network().shelf.permits.items()
        return [(name, p.claim_id) for name, p in permits if p.claim_id is not None and p.expires_at > self.world.now]

    def _held(self, tenure: Tenure) -> bool:
        """The shipped answer, asked from outside: nothing is marked then (SimSession)."""
        return is_held(tenure.process, tenure.session, tenure.hold)

    def _counts(self, tenure: Tenure) -> bool:
        return not (tenure.process.dead or tenure.dropped or self.claims[tenure.claim_id].broken_at_once)

    def _look_for_waiters(self, now: float) -> None:
        """P7, P12: a free name that somebody waits for is taken: at once, where they are told."""
        network = self._network()
        by_poll_s = by_hint_s = self.taken_within_s + self.slack_s
        if self.calm and self.prompt and self.TOLD and network.told_s is not None:
            by_hint_s = network.told_s + 10 * network.latency_max_s  # its request may stand behind others
        for attempt in self.attempts.values():
            ask, process = attempt.asks[-1] if attempt.asks else None, attempt.process
            if ask is None or not ask.blocking or process.dead or process.paused:
                continue
            free_at = self._free_at(ask.request.name)
            if free_at is None:
                continue
            quiet_since = max(free_at, attempt.asked_at, process.troubled_at, self.world.trouble_until + BACKOFF_S)
            in_time = ask._session.request_timeout_s > 3 * network.latency_max_s
            at_once = in_time and ask.request.name not in self._lined_up_late and not self._ran_out(ask.request.name)
            if now - quiet_since > (by_hint_s if at_once else by_poll_s):
                self.world.broken(
                    f"P7 {ask.request.claim_id} waits for a name that is free since {free_at:.3f}, in peace and quiet "
                    f"for {now - quiet_since:.2f} s"
                )

    def _free_at(self, name: str) -> float | None:
        """Since when whoever waits for the name may have it; None while nobody knows the name."""
        permit = self._network().shelf.permits.get(name)
        return None if permit is None else permit.expires_at

    def _ran_out(self, name: str) -> bool:
        """Whether it is free as a lease has expired (max_hold is over, say) of which somebody in line was not told yet.

        That nobody is told; who does not know when it ends finds it by the poll, and whoever is behind waits for that.
        """
        permit = self._network().shelf.permits.get(name)
        if permit is None or permit.claim_id is None:
            return False
        return any(self._told_at[claim_id] < permit.acquired_at for claim_id in self.lines.get(name, ()))

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Every program is over, and every lease had its time: nothing may be left."""
        self.lanes.finish()
        for name, claim_id in self._left_in_store():
            self.world.broken(f"P7 {name} is still held by {claim_id!r}, whom nobody has")
        dropped = {tenure.claim_id for tenure in self.tenures if tenure.dropped}
        # What a downgrade without an answer was granted anew, while its holder had lost the lease and not let go.
        dropped |= {
            tenure.claim_id
            for tenure in self.tenures
            if not tenure.release_called and self.claims[tenure.claim_id].unanswered
        }
        for claim_id, claim in self.claims.items():
            # (Of one that was withdrawn, ``sent`` says it: the asker may have been there, held up, when it was sent.)
            forgotten = claim.withdrawn_at is None and not claim.made
            if claim.renewed and forgotten and not (claim.excused or claim.process.dead):
                self.world.broken(f"P9 {claim_id} was renewed, but nobody was ever given it")
            if claim.granted and not (claim.followed_up or claim.excused or claim.process.dead or claim_id in dropped):
                self.world.broken(f"P9 {claim_id} was granted, and its process never came back to it")
        for tenure in self.tenures:
            hold = tenure.hold
            if tenure.process.dead or tenure.dropped or tenure.stillborn or tenure.session.closed:
                continue
            if hold.state == HELD:
                self.world.broken(f"P4 {tenure.claim_id} is over, and nobody noticed")
            elif tenure.release_called:
                pass  # release() itself said what there was to say
            elif hold.state == LOST and len(tenure.told) != 1:
                self.world.broken(f"loss is loud: on_lost of {tenure.claim_id} was called {len(tenure.told)} times")
            elif hold.state == LOST and self.prompt and tenure.over_at is not None:
                late_s = tenure.told[0] - max(tenure.over_at, tenure.given_at)
                if late_s > self.slack_s and tenure.process.troubled_at < tenure.given_at:
                    self.world.broken(f"P4 the loss of {tenure.claim_id} was told {late_s:.3f} s late")
