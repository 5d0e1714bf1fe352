"""The keeper of a session's holds: until when each is trusted, that it is renewed, and how it ends.

It answers for what is promised of a lease while it lives: that every end is final, is told to the store after the last
renewal, and is told to everybody who asked to be told. Holds come to it when a wish is granted (``dibs.wishes``); the
renewing itself is the renewal lane's business (``dibs.renewer``).

Of a loss the store is not told before the holder has let go, by ``release`` or the end of its block. Until then it may
be at work, or about to hear of the loss, and the time between the end of its trust and the end of the ttl is for that.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING
from dibs.ask import Ask, JobAsk
from dibs.before import Before
from dibs.hold import GONE_REASON, HELD, LOST, RELEASED, Hold
from dibs.renewer import Renewer
from dibs.store import ANY_SLOT, PIN_KEEP_S, Release
from dibs.threads import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dibs.clock import Clock
    from dibs.hold import Finish
    from dibs.holdings import Holdings
    from dibs.lane import Lane
    from dibs.store import Store
    from dibs.waiting import Waiting


class Keeper:
    def __init__(
        self,
        clock: Clock,
        mutex: AbstractContextManager[object],
        open_store: Callable[[], Store],
        lane: Lane,
        waiting: Waiting,
        holdings: Holdings,
        *,
        request_timeout_s: float,
        patience_s: float,
        margin_s: float,
    ) -> None:
        self._clock = clock
        self._mutex = mutex
        self._lane = lane
        self._waiting = waiting
        self._holdings = holdings
        self._patience_s = patience_s
        self._pid = os.getpid()
        self._closed = False
        #: What was held when it was closed.
        self._ending: list[Hold] = []
        self.renewer = Renewer(
            clock, mutex, open_store, request_timeout_s, margin_s, self.lose, self.give_back, self._renewal_over
        )

    def look_after(self, hold: Hold, t0: float) -> None:
        """Look after a hold that was just granted, asked for at ``t0``. Under the mutex."""
        self._holdings.add(hold)
        self.renewer.track(hold, t0)

    def release(self, hold: Hold, finish: Finish | None = None) -> Ask | None:
        """End a hold; None when it had ended before. The trust is over at once, the store is told by the ask.

        Of one that was lost the store is told, too, but nobody needs to wait for that.

        ``finish`` is how it ends, of several who say so at once that of the first. The ask's outcome is Released or
        Gone.
        """
        ask = None
        try:
            with self._mutex:
                now = self._clock.now()
                late = hold.state != HELD or now >= hold.trusted_until
                if not late:
                    if finish is not None:
                        hold.finish, hold.first = finish, finish.first
                    hold.state = RELEASED
                    ask = self._end(hold, now, finish)
            if not late and hold.listeners is not None:
                self._tell_released(hold)
        except BaseException:
            # Ctrl-C in between: the lease is over for this process, and a release sent twice does no harm.
            with self._mutex:
                if hold.state == RELEASED and ask is None:
                    self._end(hold, self._clock.now(), hold.finish)
            self._lane.start()
            self._tell_released(hold)
            raise
        if late:
            self.lose(hold, hold.why_over())
            self._let_go(hold)
        return ask

    def _tell_released(self, *holds: Hold) -> None:
        """Tell whoever listens, as far as these were released. After a Ctrl-C some hear it twice."""
        for hold in holds:
            if hold.state == RELEASED:
                for listener in hold.listeners or ():  # left in their place until they were called
                    listener()
                hold.listeners = None

    def release_all(self, holds: Sequence[Hold]) -> list[Ask | None]:
        """``release`` of several, queued at once so that they travel in one call; an ask or None for each."""
        asks: list[Ask | None] = [None] * len(holds)
        late: list[Hold] = []
        try:
            with self._mutex:
                now = self._clock.now()
                for place, hold in enumerate(holds):
                    if hold.state != HELD or now >= hold.trusted_until:
                        late.append(hold)
                        continue
                    hold.state = RELEASED
                    asks[place] = self._end(hold, now)
            self._tell_released(*holds)
        except BaseException:
            # As above; of those that were not reached, the caller's own clean-up takes care.
            with self._mutex:
                for hold, ask in zip(holds, asks, strict=True):
                    if hold.state == RELEASED and ask is None:
                        self._end(hold, self._clock.now(), hold.finish)
            self._lane.start()
            self._tell_released(*holds)
            raise
        for hold in late:
            self.lose(hold, hold.why_over())
        if late:
            self._let_go(*late)
        return asks

    def export(self, hold: Hold, ask: Ask) -> bool:
        """End a hold here and leave its lease in force in the store, for whoever adopts it; False when it had ended.

        The trust is over at once. The ask, which has no request, is settled when no renewal is under way any more.
        """
        try:
            with self._mutex:
                if hold.state != HELD or self._clock.now() >= hold.trusted_until:
                    return False
                hold.exported = ask
                self._part_with(hold, ask)
            self._tell_released(hold)
        except BaseException:  # Ctrl-C in between: it is given away all the same
            with self._mutex:
                if hold.exported is ask:
                    self._part_with(hold, ask)
            self._tell_released(hold)
            raise
        return True

    def _part_with(self, hold: Hold, ask: Ask) -> None:
        """Stop looking after a hold whose lease goes on. Under the mutex."""
        hold.state = RELEASED
        self._holdings.remove(hold)
        hold.watch = None
        if self.renewer.forget(hold):
            hold.after_renewal = ask
        else:
            ask.settle(None)

    def take_back(self, hold: Hold, ask: Ask) -> None:
        """Release what was exported by this ask, if it was: its state will never be known to anybody."""
        with self._mutex:
            if hold.exported is ask:
                self._holdings.remove(hold)
                self._lane.put(Ask(self.release_of(hold), self._clock.now() + self._patience_s))
        self._lane.start()

    def release_of(self, hold: Hold, keep: float = 0.0, info: str | None = None) -> Release:
        """The request that ends a hold in the store."""
        if hold.pins:  # nobody may enter before those transactions have ended; whether they have, the store sees
            keep = max(keep, PIN_KEEP_S)
        return Release(hold.key, hold.claim_id, ANY_SLOT if hold.any_slot else hold.granted.slot, None, keep, info)

    def _end(self, hold: Hold, now: float, finish: Finish | None = None) -> Ask:
        """Stop looking after a hold and queue its release. The caller holds the mutex and serves the lane."""
        self._holdings.remove(hold)
        hold.watch = None
        if hold.of_jobs:
            return self._end_of_jobs(hold, now)
        ask = hold.ending
        if ask is None:
            keep, info = (0.0, None) if finish is None else finish[:2]
            # A min_hold is for whoever did the work: not for a lease that was lost, or that nobody used.
            if hold.terms.min_hold and hold.state == RELEASED:
                keep = max(keep, hold.t0 + hold.terms.min_hold - now)
            ask = hold.ending = Ask(self.release_of(hold, keep, info), now + self._patience_s)
        # Else a Ctrl-C came in the middle of this: it is the same ask, for which another thread may wait by now.
        sent = ask
        if hold.first is not None and hold.state == RELEASED:
            sent = hold.before = hold.before or Before(hold.first, ask, self._lane, self._waiting)
        if self.renewer.forget(hold):
            hold.after_renewal = sent  # so that no renewal reaches the store after the release
        else:
            if not (sent.in_lane or sent.settled):
                self._lane.put(sent)
            if sent is ask:
                self._waiting.nudge(hold.key)
        return ask

    def _end_of_jobs(self, hold: Hold, now: float) -> Ask:
        """The same for a claim on jobs. (A renewal that reaches the store after its end finds nothing to extend.)"""
        self.renewer.forget(hold)
        ask = JobAsk(hold.giving_back(), now + self._patience_s)  # type: ignore[attr-defined]
        self._lane.put(ask)
        self._waiting.nudge(hold.key)
        return ask

    def _let_go(self, *holds: Hold) -> None:
        """Tell the store of those that were lost: nobody is at work under them any more."""
        with self._mutex:
            for hold in holds:
                self._end_lost(hold)
        self._lane.start()

    def _end_lost(self, hold: Hold) -> None:
        if hold.state != LOST or hold.let_go or self._closed:
            return
        # A claim on jobs is left to its ttl: whoever lost it was at work, and that counts as a try.
        if not (hold.of_jobs and hold.loud):
            self._end(hold, self._clock.now())
        hold.let_go = True

    def shared_by(self, owner: object, key: str, allowed: int = 0) -> list[Hold]:
        """The holds of permits of a name that this owner has, as far as this process knows; none of up to ``allowed``.

        How many permits these are at most is known without looking at each.
        """
        with self._mutex:
            if self._holdings.share(owner, key) <= allowed:
                return []
            holds = list(self._holdings.owned.get(owner, ()))
        return [
            hold for hold in holds if hold.key == key and hold.terms.permits and not hold.orphan and self.is_held(hold)
        ]

    def _renewal_over(self, hold: Hold) -> None:
        with self._mutex:
            ask, hold.after_renewal = hold.after_renewal, None
            if ask is not None and ask.request is None:
                ask.settle(None)  # it was exported: there is nothing to send
            elif ask is not None:
                self._lane.put(ask)
                self._waiting.nudge(hold.key)
        self._lane.start()

    def give_back(self, *holds: Hold) -> None:
        """Release grants that nobody has in hand. An orphan's ttl runs out: its holder may still be at work."""
        lost: list[Hold] = []
        try:
            with self._mutex:
                for hold in holds:
                    self._give_back(hold, lost)
        except BaseException:
            # Ctrl-C in between: a release sent twice does no harm.
            with self._mutex:
                for hold in holds:
                    if hold.state == LOST and not hold.orphan and not hold.loud and not self._closed:
                        self._end(hold, self._clock.now())
                    self._give_back(hold, lost)
            self._lane.start()
            raise
        self._lane.start()
        for hold in lost:
            self._tell_loss(hold)

    def _give_back(self, hold: Hold, lost: list[Hold]) -> None:
        if hold.state != HELD:
            if not hold.given:  # it was lost, or seemed to be dropped, on its way to a caller that has not got it
                self._end_lost(hold)
            return
        hold.state = LOST
        if hold.orphan:
            hold.reason = "its Lease object was dropped without release()"
            self.renewer.forget(hold)
            self._holdings.remove(hold)
            return
        if hold.given:  # its thread came with the Lease in hand just as its trust was over: a loss like any other
            hold.reason = hold.why_over()
            hold.loud = True
            lost.append(hold)
            return
        hold.reason = "it was granted to a caller that was gone"
        if self._closed:  # while the renewer was about to find it over
            self._holdings.remove(hold)
        else:
            self._end(hold, self._clock.now()).owed = True

    def lose(self, hold: Hold, reason: str) -> None:
        """Mark a hold lost for good, tell everybody who asked to be told, and end what may be left of it."""
        marked = False  # by this thread, which is then the one to tell
        try:
            with self._mutex:
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
                aside(self._clock, "dibs-lost", lambda: self._tell_loss(hold))
            raise

    def _tell_loss(self, hold: Hold) -> None:
        with self._mutex:
            self._holdings.remove(hold)
            hold.watch = None
            self.renewer.forget(hold)
        if not hold.loud:
            self._let_go(hold)
        for listener in hold.listeners or ():  # left in their place, for whoever goes on after a Ctrl-C
            listener()
        hold.listeners = None
        on_lost = hold.terms.on_lost if hold.loud else None
        if on_lost is None:
            hold.told = True
        else:
            # In a thread of its own: a slow callback must not delay the next renewal.
            aside(self._clock, "dibs-on-lost", lambda: self._call(on_lost, hold))

    def _call(self, on_lost: Callable[[], object], hold: Hold) -> None:
        with self._mutex:
            if hold.told:  # by another thread, after a Ctrl-C in the one that had begun this
                return
            hold.told = True
        on_lost()

    def found_gone(self, hold: Hold) -> None:
        """A release found that the store no longer knew the lease: it had been lost without a sign."""
        with self._mutex:
            hold.state = LOST
            hold.let_go = True
            hold.reason = GONE_REASON

    def is_held(self, hold: Hold) -> bool:
        """Whether the holder may still believe in it, decided by the clock alone."""
        if hold.state != HELD or self._pid != os.getpid():
            return False
        return self._clock.now() < hold.trusted_until or not self.expire(hold)

    def expire(self, hold: Hold) -> bool:
        """Mark a hold lost whose trust has run out; False when a renewal got in first."""
        with self._mutex:
            if hold.state != HELD:
                return True
            if self._clock.now() < hold.trusted_until:
                return False
        self.lose(hold, hold.why_over())
        return True

    def when_over(self, hold: Hold, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when the hold is released or lost, or at once when it is over already.

        Returns what to call when nobody listens any more.
        """
        with self._mutex:
            if hold.state == HELD:
                hold.listeners = [*(hold.listeners or ()), listener]
                return lambda: self._unlisten(hold, listener)
        listener()
        return lambda: None

    def _unlisten(self, hold: Hold, listener: Callable[[], None]) -> None:
        with self._mutex:
            if hold.listeners is not None and listener in hold.listeners:
                listeners = hold.listeners.copy()
                listeners.remove(listener)
                hold.listeners = listeners

    def close(self, now: float) -> tuple[list[Ask], list[Callable[[], None]]]:
        """End every hold, under the mutex: the asks that tell the store, and the listeners that are to be called.

        Called again after a Ctrl-C in the middle of it, it goes through all of them once more.
        """
        if not self._closed:
            self._ending = [hold for hold in self.renewer.tracked() if hold.state == HELD]
            self._closed = True
        releases: list[Ask] = []
        listeners: list[Callable[[], None]] = []
        for hold in self._ending:
            if hold.state != LOST:
                hold.state = RELEASED
                listeners += hold.listeners or ()
                release = self._end(hold, now)
                releases += [release] if hold.before is None else [hold.before, release]
        return releases, listeners
