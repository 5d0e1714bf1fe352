"""A session: one client's identity, its holds, and its two lanes to the store.

It answers for what is promised of a lease while it lives: until when it is trusted, and that every end is final and
told. How a wish becomes a hold is for ``dibs.wishes``, how requests travel is the lane's business, when to ask again
is waiting's, and what a user sees is the faces' (``dibs.client``, ``dibs.aio``).

One mutex guards the lane's queue, the waiting lines, the renewer's queues and the holds. It is held for a few
dictionary operations, never during a call to the store or to a user's function.
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from dibs.before import Before
from dibs.clock import Deadline, RealClock
from dibs.errors import StoreUnavailable
from dibs.hold import GONE_REASON, HELD, LOST, RELEASED, Hold
from dibs.holdings import Holdings
from dibs.lane import Act, Ask, JobAsk, Lane
from dibs.renewer import Renewer
from dibs.rings import Rings
from dibs.store import ANY_SLOT, PIN_KEEP_S, Acquire, Release, Transfer
from dibs.waiting import Waiting
from dibs.wishes import AcquireAsk, TakeOver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Clock
    from dibs.load import Load
    from dibs.pauses import Pauses
    from dibs.store import Held, Request, Store, StoreAddress
    from dibs.terms import Terms

T = TypeVar("T")

REQUEST_TIMEOUT_S = 5.0
PATIENCE_S = 5.0


class Session:
    def __init__(
        self,
        address: StoreAddress,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        patience_s: float = PATIENCE_S,
        clock: Clock | None = None,
        client_id: str | None = None,
        host: str | None = None,
        lock_order_warnings: bool = True,
        pauses: Pauses | None = None,
    ) -> None:
        self.address = address
        self.clock: Clock = clock if clock is not None else RealClock()
        self.pid = os.getpid()
        self.client_id = client_id or os.urandom(6).hex()
        self.holder = f"{host or os.uname().nodename}/{self.pid}/{self.client_id}"
        self.margin_s = address.capabilities.margin_s
        self.request_timeout_s = request_timeout_s
        self.patience_s = patience_s
        self.mutex = self.clock.mutex()
        self.pauses = pauses
        #: Told, in a thread of its own, that a name somebody waits for is paused.
        self.on_paused: Callable[[str], None] = _log
        self.lane = Lane(self.clock, self.mutex, address.open, request_timeout_s, "dibs-claim", pauses)
        self.renewer = Renewer(
            self.clock,
            self.mutex,
            address.open,
            request_timeout_s,
            self.margin_s,
            self.lose,
            self.give_back,
            self._renewal_over,
        )
        self.waiting = Waiting(
            self.clock, self.mutex, self.lane, address.open, self.client_id, request_timeout_s, patience_s
        )
        self._claims = count(1)
        self.holdings = Holdings()
        self.rings = Rings(self, lock_order_warnings)
        #: What is counted of the queues that this client takes jobs of (dibs.load), by their names.
        self.loads: dict[str, Load] = {}
        self._sleeps: WeakSet[Ask] = WeakSet()
        self._aside_mutex = self.clock.mutex()
        self._aside: Store | None = None
        self.closed = False

    # -- asking ---------------------------------------------------------------------------------------------------

    def wish(self, key: str, terms: Terms, owner: object, blocking: bool) -> AcquireAsk:
        """Make the ask for a name; nothing happens before ``submit``."""
        request = Acquire(
            key, self.new_claim(), terms.ttl, self.holder, terms.info, self.client_id if blocking else None
        )
        if terms.permits:
            request = request._replace(permits=terms.permits, take=terms.take, resize=terms.resize)
        return AcquireAsk(request, terms, owner, self, blocking)

    def wish_for(self, key: str, from_claim: str, slot: int, terms: Terms, owner: object) -> TakeOver:
        """Make the ask for what another claim holds; nothing happens before ``submit``."""
        claim = self.new_claim()
        request = Transfer(key, claim, terms.ttl, self.holder, from_claim, terms.info, slot, terms.permits)
        return TakeOver(request, terms, owner, self, False)

    def new_claim(self) -> str:
        """A claim that nobody has had."""
        return f"{self.client_id}-{next(self._claims)}"

    def submit(self, ask: AcquireAsk) -> None:
        """Send an ask on its way; the caller then waits for it (``settle``) or lets the lane's thread serve it."""
        with self.mutex:
            self._open_to_more()
            if ask.blocking:
                self.waiting.enter(ask)
            else:
                self.lane.put(ask)

    def _open_to_more(self) -> None:
        if self.closed:
            raise StoreUnavailable("this dibs client is closed", maybe_applied=False)
        if self.lane.full():
            raise StoreUnavailable("too many requests are waiting for the store already", maybe_applied=False)

    def send(self, ask: Ask) -> None:
        """Queue any other ask, unless the client is closed or too much waits already."""
        with self.mutex:
            self._open_to_more()
            self.lane.put(ask)

    def submit_all(self, asks: Sequence[AcquireAsk]) -> None:
        """The same for several that are asked for once, without waiting; all of them or none."""
        with self.mutex:
            self._open_to_more()
            for ask in asks:
                self.lane.put(ask)

    def unmake(self, hold: Hold) -> bool:
        """Unmake the Lease that was just made of a hold; False when its loss is being told already."""
        with self.mutex:
            if not hold.loud:
                hold.given = False
        return not hold.loud

    def withdraw(self, ask: AcquireAsk) -> None:
        """Nobody wants the answer any more: leave the line, and give back what was or may yet be granted."""
        try:
            self._withdraw(ask)
        except BaseException:  # a Ctrl-C on the way out must not leave it half withdrawn
            self._withdraw(ask)
            raise

    def _withdraw(self, ask: AcquireAsk) -> None:
        with self.mutex:
            ask.dropped = True
            hold = ask.hold
            if ask.blocking:
                self.waiting.leave_line(ask)
            if hold is None and not self.closed and ask.may_be_known():
                # It was sent, so it may be granted or in line yet; this release travels behind it.
                self.lane.put(ask.undoing())
        if isinstance(hold, Hold):
            hold.given = hold.orphan = False  # whatever was made of it, nobody has it in hand
            self.give_back(hold)
        else:
            self.lane.start()

    def tell_paused(self, key: str, held: Held) -> None:
        """Somebody waits for a name that is paused: say so once for each name and pause. Under the mutex."""
        if self.pauses is not None and self.pauses.news(key, held):
            name, on_paused = key.partition(":")[2], self.on_paused
            message = f"{name!r} {held.paused}"
            self.clock.spawn("dibs-paused", lambda: on_paused(message))

    # -- the end of a hold ----------------------------------------------------------------------------------------

    def release(self, hold: Hold, keep: float = 0.0, info: str | None = None) -> Ask | None:
        """End a hold; None when it had ended before. The trust is over at once, the store is told by the ask.

        With ``keep``, the name is kept for that many seconds from now, and shown with ``info``. The ask's outcome is
        Released or Gone.
        """
        try:
            with self.mutex:
                if hold.state != HELD:
                    return None
                now = self.clock.now()
                if now >= hold.trusted_until:
                    late = True
                else:
                    late = False
                    hold.state = RELEASED
                    listeners, hold.listeners = hold.listeners, None
                    ask = self._end(hold, now, keep, info)
        except BaseException:
            # Ctrl-C in between: the lease is over for this process, and a release sent twice does no harm.
            with self.mutex:
                if hold.state == RELEASED:
                    self._end(hold, self.clock.now(), keep, info)
            self.lane.start()
            raise
        if late:
            self.lose(hold, hold.why_over())
            return None
        for listener in listeners or ():
            listener()
        return ask

    def release_all(self, holds: Sequence[Hold]) -> list[Ask | None]:
        """``release`` of several, queued at once so that they travel in one call; an ask or None for each."""
        asks: list[Ask | None] = [None] * len(holds)
        listeners: list[Callable[[], None]] = []
        late: list[Hold] = []
        try:
            with self.mutex:
                now = self.clock.now()
                for place, hold in enumerate(holds):
                    if hold.state == HELD and now < hold.trusted_until:
                        hold.state = RELEASED
                        listeners += hold.listeners or ()
                        hold.listeners = None
                        asks[place] = self._end(hold, now)
                    elif hold.state == HELD:
                        late.append(hold)
        except BaseException:
            # As above; of those that were not reached, the caller's own clean-up takes care.
            with self.mutex:
                for hold in holds:
                    if hold.state == RELEASED:
                        self._end(hold, self.clock.now())
            self.lane.start()
            raise
        for hold in late:
            self.lose(hold, hold.why_over())
        for listener in listeners:
            listener()
        return asks

    def export(self, hold: Hold, ask: Ask) -> bool:
        """End a hold here and leave its lease in force in the store, for whoever adopts it; False when it had ended.

        The trust is over at once. The ask, which has no request, is settled when no renewal is under way any more.
        """
        with self.mutex:
            if hold.state != HELD or self.clock.now() >= hold.trusted_until:
                return False
            hold.exported = ask
            hold.state = RELEASED
            listeners, hold.listeners = hold.listeners, None
            self.holdings.remove(hold)
            if self.renewer.forget(hold):
                hold.after_renewal = ask
            else:
                ask.settle(None)
        for listener in listeners or ():
            listener()
        return True

    def take_back(self, hold: Hold, ask: Ask) -> None:
        """Release what was exported by this ask, if it was: its state will never be known to anybody."""
        with self.mutex:
            if hold.exported is ask:
                self.holdings.remove(hold)
                self.lane.put(Ask(self.release_of(hold), self.clock.now() + self.patience_s))
        self.lane.start()

    def release_of(self, hold: Hold, keep: float = 0.0, info: str | None = None) -> Release:
        """The request that ends a hold in the store."""
        if hold.pins:  # nobody may enter before those transactions have ended; whether they have, the store sees
            keep = max(keep, PIN_KEEP_S)
        return Release(hold.key, hold.claim_id, ANY_SLOT if hold.any_slot else hold.granted.slot, None, keep, info)

    def _end(self, hold: Hold, now: float, keep: float = 0.0, info: str | None = None) -> Ask:
        """Stop looking after a hold and queue its release. The caller holds the mutex and serves the lane."""
        self.holdings.remove(hold)
        if hold.of_jobs:
            return self._end_of_jobs(hold, now)
        # A min_hold is for whoever did the work: not for a lease that was lost, or that nobody used.
        if hold.terms.min_hold and hold.state == RELEASED:
            keep = max(keep, hold.t0 + hold.terms.min_hold - now)
        ask = Ask(self.release_of(hold, keep, info), now + self.patience_s)
        sent = ask
        if hold.first is not None and hold.state == RELEASED:
            sent = hold.before = Before(hold.first, ask, self)
        if self.renewer.forget(hold):
            hold.after_renewal = sent  # so that no renewal reaches the store after the release
        else:
            self.lane.put(sent)
            if sent is ask:
                self.waiting.nudge(hold.key)
        return ask

    def _end_of_jobs(self, hold: Hold, now: float) -> Ask:
        """The same for a claim on jobs. (A renewal that reaches the store after its end finds nothing to extend.)"""
        self.renewer.forget(hold)
        ask = JobAsk(hold.giving_back(), now + self.patience_s)  # type: ignore[attr-defined]
        if hold.state == LOST and hold.given:
            ask.settle(None)  # it is left to its ttl: whoever lost it was at work, and that counts as a try
        else:
            self.lane.put(ask)
            self.waiting.nudge(hold.key)
        return ask

    def shared_by(self, owner: object, key: str) -> list[Hold]:
        """The holds of permits of a name that this owner has, as far as this process knows."""
        with self.mutex:
            holds = list(self.holdings.sharing.get(key, ()))
        return [hold for hold in holds if hold.owner == owner and not hold.orphan and self.is_held(hold)]

    def _renewal_over(self, hold: Hold) -> None:
        with self.mutex:
            ask, hold.after_renewal = hold.after_renewal, None
            if ask is not None and ask.request is None:
                ask.settle(None)  # it was exported: there is nothing to send
            elif ask is not None:
                self.lane.put(ask)
                self.waiting.nudge(hold.key)
        self.lane.start()

    def give_back(self, *holds: Hold) -> None:
        """Release grants that nobody has in hand. An orphan's ttl runs out: its holder may still be at work."""
        lost: list[Hold] = []
        try:
            with self.mutex:
                for hold in holds:
                    self._give_back(hold, lost)
        except BaseException:
            # Ctrl-C in between: a release sent twice does no harm.
            with self.mutex:
                for hold in holds:
                    if hold.state == LOST and not hold.orphan and not self.closed:
                        self._end(hold, self.clock.now())
                    self._give_back(hold, lost)
            self.lane.start()
            raise
        self.lane.start()
        for hold in lost:
            self._tell_loss(hold)

    def _give_back(self, hold: Hold, lost: list[Hold]) -> None:
        if hold.state != HELD:
            return
        hold.state = LOST
        if hold.orphan:
            hold.reason = "its Lease object was dropped without release()"
            self.renewer.forget(hold)
            self.holdings.remove(hold)
            return
        if hold.given:  # its thread came with the Lease in hand just as its trust was over: a loss like any other
            hold.reason = hold.why_over()
            hold.loud = True
            lost.append(hold)
            return
        hold.reason = "it was granted to a caller that was gone"
        if not self.closed:
            self._end(hold, self.clock.now())

    def lose(self, hold: Hold, reason: str) -> None:
        """Mark a hold lost for good, tell everybody who asked to be told, and end what may be left of it."""
        marked = False  # by this thread, which is then the one to tell
        try:
            with self.mutex:
                if hold.state != HELD:
                    return
                marked = True
                hold.reason = reason
                hold.loud = hold.given
                hold.state = LOST
            self._tell_loss(hold)
        except BaseException:
            # Ctrl-C in whoever noticed the loss: those who must hear of it hear of it all the same.
            if marked and hold.state == LOST and not hold.told:
                self.clock.spawn("dibs-lost", lambda: self._tell_loss(hold))
            raise

    def _tell_loss(self, hold: Hold) -> None:
        with self.mutex:
            if not self.closed:
                self._end(hold, self.clock.now())
        self.lane.start()
        for listener in hold.listeners or ():  # left in their place, for whoever goes on after a Ctrl-C
            listener()
        hold.listeners = None
        on_lost = hold.terms.on_lost if hold.loud else None
        hold.told = True
        if on_lost is not None:
            # In a thread of its own: a slow callback must not delay the next renewal.
            self.clock.spawn("dibs-on-lost", on_lost)  # type: ignore[arg-type]

    def found_gone(self, hold: Hold) -> None:
        """A release found that the store no longer knew the lease: it had been lost without a sign."""
        with self.mutex:
            hold.state = LOST
            hold.reason = GONE_REASON

    def is_held(self, hold: Hold) -> bool:
        """Whether the holder may still believe in it, decided by the clock alone."""
        if hold.state != HELD or self.pid != os.getpid():
            return False
        return self.clock.now() < hold.trusted_until or not self.expire(hold)

    def expire(self, hold: Hold) -> bool:
        """Mark a hold lost whose trust has run out; False when a renewal got in first."""
        with self.mutex:
            if hold.state != HELD:
                return True
            if self.clock.now() < hold.trusted_until:
                return False
        self.lose(hold, hold.why_over())
        return True

    def when_over(self, hold: Hold, listener: Callable[[], None]) -> None:
        """Call ``listener`` when the hold is released or lost, or at once when it is over already."""
        with self.mutex:
            if hold.state == HELD:
                hold.listeners = [*(hold.listeners or ()), listener]
                return
        listener()

    # -- waiting for an ask ---------------------------------------------------------------------------------------

    def wait(self, ask: Ask, timeout: float | None) -> bool:
        """Block this thread until the ask is settled, serving the lane if nobody does; False at the time-out."""
        until = None if timeout is None else self.clock.now() + timeout
        if ask.in_lane:
            if ask.trouble is None:
                self.lane.drive(ask)
            else:  # an attempt has failed: repeating it is the lane's thread's business, and takes its time
                self.lane.start()
        if ask.settled:
            return True
        return ask.wait(self.clock, None if until is None else until - self.clock.now())

    def ask(self, request: Request) -> Ask:
        """Queue a request that makes no hold of this session."""
        ask = Ask(request, self.clock.now() + self.patience_s)
        with self.mutex:
            self.lane.put(ask)
        return ask

    def act(self, function: Callable[..., Any]) -> Ask:
        """Queue a function of the store and a deadline, to be run between two batches."""
        ask = Act(function, self.clock.now() + self.patience_s)
        with self.mutex:
            self.lane.put(ask)
        return ask

    def aside(self, function: Callable[[Store, Deadline], T]) -> T:
        """Call a function of a store object that no lane uses, in this thread.

        For what is asked inside the caller's own transaction: that may keep a request of the lane waiting (SQLite lets
        one writer in), and then whoever waits for the lane would wait for itself.
        """
        with self._aside_mutex:
            if self._aside is None:
                self._aside = self.address.open()
            return function(self._aside, Deadline(self.clock, self.clock.now() + self.request_timeout_s))

    def pause(self) -> Ask:
        """What steps yield that want to sleep for a while: nobody answers it, but ``close`` settles it."""
        ask = Ask(None, float("inf"))
        with self.mutex:
            self._sleeps.add(ask)
            if self.closed:
                ask.settle(None)
        return ask

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> list[Ask]:
        """Give back what is held, refuse who waits, end the threads. Returns the releases to wait for."""
        with self.mutex:
            if self.closed:
                return []
            self.closed = True
            now = self.clock.now()
            waiters = self.waiting.everybody()
            releases = self.rings.withdraw()
            listeners: list[Callable[[], None]] = []
            for hold in self.renewer.tracked():
                if hold.state == HELD:
                    hold.state = RELEASED
                    listeners += hold.listeners or ()
                    hold.listeners = None
                    release = self._end(hold, now)
                    releases += [release] if hold.before is None else [hold.before, release]
            for ask in waiters:
                ask.dropped = True
                if ask.may_be_known():
                    undo = ask.undoing()
                    self.lane.put(undo)
                    releases.append(undo)
            sleeps = list(self._sleeps)
        for listener in listeners:
            listener()
        for sleep in sleeps:
            sleep.settle(None)
        for ask in waiters:
            ask.settle(None, StoreUnavailable("this dibs client was closed while waiting", maybe_applied=False))
        # Whoever waits for the releases serves the lane: at the interpreter's end no thread can be started any more.
        return releases

    def shut(self) -> list[Ask]:
        """After ``close``: end the threads and connections. Returns what to wait for until they are gone."""
        with self._aside_mutex:
            if self._aside is not None:
                self._aside.close()
                self._aside = None
        return [*self.rings.close(), self.waiting.close(), self.renewer.close(), self.lane.close()]


def _log(message: str) -> None:
    import logging

    logging.getLogger("dibs").warning("%s", message)
