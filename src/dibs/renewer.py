"""The renewal lane: keeps every lease of the process alive, and says when one is lost.

It has a connection and a thread of its own, so nothing a caller does can delay a renewal. What is due is renewed in one
call; an outcome is Renewed, Gone or Unknown. Unknown (no answer, any error) changes nothing and is tried again until
the trust ends by the clock; then, or at Gone, the hold is lost. A store that is too busy is tried as often as the claim
lane tries it: who asks for leases must not push out who has some. A call never lasts longer than the trust of the holds
that it keeps the thread from looking at. If one that is granted meanwhile ends before the call must, a second thread,
the *stand-in*, tells its loss: it never calls the store, so it is always on time.

Every tracked hold is in exactly one place, changed under the session's mutex: a *queue* of its interval (an ordered
dict; holds of one interval fall due in the order they were asked for, so tracking and forgetting cost O(1) however many
there are), the *heap* (retries, last moments, and what was asked for long before it was granted: few), or *in flight*.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from heapq import heappop, heappush

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import Ask
from dibs.busy import patiently, pause_s, stayed_busy
from dibs.clock import Deadline
from dibs.errors import StoreUnavailable, without_frames
from dibs.hold import FOREVER, GONE_REASON, HELD, Hold
from dibs.store import StoreBusy
from dibs.threads import begin, is_known
from dibs.trust import RENEWALS_PER_TTL, ROUNDING_S, local_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dibs.clock import Bell, Clock
    from dibs.store import Store

# Leases renewed by one call.
RENEW_MAX = 10_000
# Renewals due within this part of their interval go with those that are due now.
COALESCE = 0.1
# Pause before a renewal with an unknown outcome is tried again: this part of its interval, and at most this long.
RETRY_PART = 0.125
RETRY_MAX_S = 1.0
# The thread and its connection are kept this long without a lease to look after.
IDLE_S = 10.0


class Renewer:
    def __init__(
        self,
        clock: Clock,
        mutex: AbstractContextManager[object],
        open_store: Callable[[], Store],
        request_timeout_s: float,
        margin_s: float,
        lose: Callable[[Hold, str], None],
        give_back: Callable[[Hold], None],
        renewal_over: Callable[[Hold], None],
    ) -> None:
        self._clock = clock
        self._mutex = mutex
        self._open_store = open_store
        self._request_timeout_s = request_timeout_s
        self._margin_s = margin_s
        self._lose = lose
        self._give_back = give_back
        self._renewal_over = renewal_over
        self._queues: dict[tuple[float, bool], OrderedDict[Hold, None]] = {}
        self._heap: list[tuple[float, int, Hold]] = []
        self._pushes = 0
        #: What the call under way renews, and what the thread is about to give back.
        self._batch: list[Hold] = []
        self._unwanted: list[Hold] = []
        self._wake_at = -FOREVER  # the thread looks at everything before it sleeps
        #: For how long it was to sleep when it went to; 0 while it is awake.
        self._sleeps_s = 0.0
        #: The longest that it sleeps next. Whoever rings it may be over before it has looked, and be followed by others
        #: like it: if it slept on without that, each of a thousand short leases a second would ring it for nothing.
        self._nap_s = FOREVER
        self._bell: Bell | None = None
        #: When the call under way must be over, and which holds, granted since it began, may end before.
        self._call_until = -FOREVER
        self._meanwhile: list[Hold] = []
        self._stand_in_bell: Bell | None = None
        self._stand_in_wakes_at = FOREVER
        self._store: Store | None = None
        self._closing = False
        #: One of the batch is over, and its release waits for the call.
        self._awaited = False
        self._ended = Ask(None, FOREVER)
        self.failures = 0

    # -- called under the mutex ---------------------------------------------------------------------------------

    def track(self, hold: Hold, t0: float) -> None:
        """Look after a hold that was asked for at ``t0``."""
        if hold.trusted_until < self._call_until:
            self._look_meanwhile(hold)
        terms = hold.terms
        delay, trust_s = terms.delay_s, terms.trust_s
        if hold.ttl != terms.ttl:  # the holder renewed it for another time
            delay = hold.ttl / RENEWALS_PER_TTL if terms.renew else hold.trusted_until - t0
            trust_s = local_deadline(0.0, hold.ttl, self._margin_s)
        if terms.renew and hold.trusted_until - trust_s > t0 + ROUNDING_S:
            # Renewed for less time than it still has, it is due as if its trust came from a later renewal.
            self._push(hold, hold.trusted_until - trust_s + delay)
        elif terms.max_hold != FOREVER and terms.renew and hold.ends_at < t0 + hold.ttl:
            # Trusted for less long than the others of its interval, so it stands in none of their queues.
            if hold.ends_at < t0 + delay:
                delay = hold.trusted_until - t0
            self._push(hold, t0 + delay)
        else:
            key = (delay, terms.renew)
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = OrderedDict()
            if queue and next(reversed(queue)).due > t0 + delay:  # renewed since this one was asked for
                self._push(hold, t0 + delay)
            else:
                queue[hold] = None
                hold.queue = queue
                hold.due = t0 + delay
        # How long the thread was to sleep counts as well as until when: while the machine sleeps its time-out does not
        # go on, as clocks do, so it may wake much later than it was to.
        if hold.due < self._wake_at or delay < self._sleeps_s or self._bell is None:
            self._nap_s = min(self._nap_s, delay)
            self._wake()

    def track_again(self, hold: Hold, t0: float) -> None:
        """The same for a hold that was renewed by its holder; a renewal of ours that is under way does so by itself."""
        try:
            if not self.forget(hold):
                self.track(hold, t0)
        except BaseException:  # Ctrl-C in between: forgotten, it would be neither renewed nor told lost
            if not self.forget(hold):
                self.track(hold, t0)
            raise

    def forget(self, hold: Hold) -> bool:
        """Never renew it again; True when a renewal is under way and may still reach the store."""
        queue = hold.queue
        if queue is not None:
            queue.pop(hold, None)
            hold.queue = None
        hold.due = FOREVER
        if hold.in_flight:
            self._awaited = True
        return hold.in_flight

    def take_up(self, hold: Hold) -> None:
        """Look again after a hold that was forgotten. (A renewal that is under way still does so when it is over.)"""
        if not hold.in_flight:
            # No later than it was due.
            self._push(hold, hold.trusted_until - hold.ttl * (1 - 1 / RENEWALS_PER_TTL))
            self._wake()

    def tracked(self) -> list[Hold]:
        """Every hold that is looked after (the session gives them back when it closes)."""
        holds = [hold for queue in self._queues.values() for hold in queue]
        holds += [hold for due, _, hold in self._heap if hold.due == due]
        holds += [hold for hold in self._batch if hold.in_flight]
        return holds + [hold for hold in self._unwanted if not hold.orphan]

    def _push(self, hold: Hold, due: float) -> None:
        hold.queue = None
        hold.due = due
        self._pushes += 1
        heappush(self._heap, (due, self._pushes, hold))

    def _look_meanwhile(self, hold: Hold) -> None:
        """The thread may be in its call for longer than this hold is trusted."""
        self._meanwhile.append(hold)
        if self._stand_in_bell is None:
            with suppress(StoreUnavailable):  # then it is told when the thread is back
                self._stand_in_bell = begin(self._clock, "dibs-renew-stand-in", self._stand_in)
        elif hold.trusted_until < self._stand_in_wakes_at:
            self._stand_in_bell.ring()

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()
        elif not self._closing:
            self._bell = begin(self._clock, "dibs-renew", self._run)

    # -- the thread ---------------------------------------------------------------------------------------------

    def close(self) -> Ask:
        """End the thread; what it looked after is the session's to give back first. Settled when it is over."""
        with self._mutex:
            self._closing = True
            if self._stand_in_bell is not None:
                self._stand_in_bell.ring()
            if self._bell is not None:
                self._bell.ring()
                return self._ended
        self._ended.settle(None)
        return self._ended

    def _run(self, bell: Bell) -> None:
        if not is_known(self, bell):
            return
        busy_at = self._clock.now()
        while True:
            with self._mutex:
                now = self._clock.now()
                batch, lost, unwanted = self._collect(now)
                self._batch, self._unwanted = batch, unwanted
                self._awaited = False
                if batch:
                    self._call_until = min(now + self._request_timeout_s, self._earliest_deadline(batch))
                due = -FOREVER if batch or lost or unwanted else self._next_due()
                if due != FOREVER:
                    busy_at = now
                elif self._closing or now - busy_at >= IDLE_S:
                    self._bell = None
                    store, self._store = self._store, None  # the next thread opens its own
                    break
                else:
                    due = now + IDLE_S
                self._wake_at = min(due, now + self._nap_s)
                # Not the difference of these, whose rounding would have a lease ring that is as long as the nap.
                self._sleeps_s = max(0.0, min(due - now, self._nap_s))
                self._nap_s *= 2
            for hold in lost:
                self._lose(hold, hold.why_over())
            for hold in unwanted:
                self._give_back(hold)
            if batch:
                self._renew(batch, self._call_until)
            elif not lost and not unwanted:
                bell.wait(self._sleeps_s)
                with self._mutex:
                    self._wake_at, self._sleeps_s = -FOREVER, 0.0
        if store is not None:
            store.close()
        bell.close()
        if self._closing:
            self._ended.settle(None)

    def _stand_in(self, bell: Bell) -> None:
        """Tell the losses that the thread, being in a call, would tell too late."""
        busy_at = self._clock.now()
        while True:
            with self._mutex:
                now = self._clock.now()
                held = [hold for hold in self._meanwhile if hold.state == HELD]
                over = [hold for hold in held if now >= hold.trusted_until and hold.given and not hold.orphan]
                self._meanwhile = [hold for hold in held if now < hold.trusted_until]
                if self._meanwhile or over:
                    busy_at = now
                elif self._closing or now - busy_at >= IDLE_S or self._stand_in_bell is not bell:
                    if self._stand_in_bell is bell:
                        self._stand_in_bell = None
                    break
                self._stand_in_wakes_at = min((hold.trusted_until for hold in self._meanwhile), default=FOREVER)
                wake_at = min(self._stand_in_wakes_at, now + IDLE_S)
            for hold in over:
                self._lose(hold, hold.why_over())
            if not over:
                bell.wait(wake_at - now)
        bell.close()

    def _collect(self, now: float) -> tuple[list[Hold], list[Hold], list[Hold]]:
        """Take out what is due: to renew, lost, and to give back because nobody can release it."""
        batch, lost, unwanted = list[Hold](), list[Hold](), list[Hold]()
        for (delay, renew), queue in list(self._queues.items()):
            until = now + delay * COALESCE if renew and queue and next(iter(queue)).due <= now else now
            while queue and len(batch) < RENEW_MAX:
                hold = next(iter(queue))
                if hold.due > until:
                    break
                queue.popitem(last=False)
                hold.queue = None
                self._sort(hold, now, batch, lost, unwanted)
            if not queue:
                del self._queues[delay, renew]
        while self._heap and self._heap[0][0] <= now and len(batch) < RENEW_MAX:
            due, _, hold = heappop(self._heap)
            if hold.due == due:
                self._sort(hold, now, batch, lost, unwanted)
        return batch, lost, unwanted

    def _sort(self, hold: Hold, now: float, batch: list[Hold], lost: list[Hold], unwanted: list[Hold]) -> None:
        if hold.state != HELD:
            return
        if hold.orphan:
            unwanted.append(hold)
        elif now >= hold.trusted_until:
            (lost if hold.given else unwanted).append(hold)
        elif not hold.given:
            # Its thread is still on the way from the grant to its Lease, or was interrupted there: look again soon.
            self._push(hold, min(now + self._retry_s(hold), hold.trusted_until))
        elif (
            hold.terms.renew and local_deadline(now, self._renewal_ttl(hold, now), self._margin_s) > hold.trusted_until
        ):
            hold.in_flight = True
            batch.append(hold)
        else:
            self._push(hold, hold.trusted_until)

    def _retry_s(self, hold: Hold) -> float:
        return min(RETRY_MAX_S, hold.ttl / RENEWALS_PER_TTL * RETRY_PART) * (0.5 + 0.5 * self._clock.jitter())

    def _renewal_ttl(self, hold: Hold, now: float) -> float:
        return min(hold.ttl, hold.ends_at - now)

    def _next_due(self) -> float:
        while self._heap and self._heap[0][2].due != self._heap[0][0]:
            heappop(self._heap)
        due = self._heap[0][0] if self._heap else FOREVER
        for queue in self._queues.values():
            if queue:
                due = min(due, next(iter(queue)).due)
        return due

    def _earliest_deadline(self, batch: list[Hold]) -> float:
        """When the thread must be back to tell the next loss; the first of a queue stands for it."""
        earliest = min((hold.trusted_until for hold in batch), default=FOREVER)
        for queue in self._queues.values():
            if queue:
                earliest = min(earliest, next(iter(queue)).trusted_until)
        # (The next of the heap is not always the first to end: leases of several ttls are retried there.)
        for due, _, hold in self._heap:
            if hold.due == due:
                earliest = min(earliest, max(due, hold.trusted_until))
        return earliest

    def _renew(self, batch: list[Hold], until: float) -> None:
        t0 = self._clock.now()
        # In the order of names, so that two sessions never lock rows in opposite orders.
        batch.sort(key=lambda hold: hold.key)
        ttls = [max(ROUNDING_S, self._renewal_ttl(hold, t0)) for hold in batch]  # (one may have ended just now)
        requests = [hold.renewal(ttl) for hold, ttl in zip(batch, ttls, strict=True)]
        outcomes: list[Any] = [None] * len(batch)
        for of_jobs in (False, True):
            which = [index for index, hold in enumerate(batch) if hold.of_jobs is of_jobs]
            if which:
                self._call(which, requests, outcomes, until, of_jobs=of_jobs)
        finished, gone = list[Hold](), list[Hold]()
        with self._mutex:
            now = self._clock.now()
            self._batch = []
            self._call_until = -FOREVER
            self._meanwhile.clear()  # this thread is back, and looks at everything
            for index, hold in enumerate(batch):
                hold.in_flight = False
                if hold.state != HELD:
                    finished.append(hold)
                elif isinstance(outcomes[index], Exception):
                    # A call that ended because the trust did says less than what was heard before it.
                    error, busy = outcomes[index], type(outcomes[index]) is StoreBusy
                    if hold.last_error is None or now < hold.trusted_until:
                        hold.last_error = stayed_busy(error) if busy else error
                    again_at = now + (pause_s(0) if busy else self._retry_s(hold))
                    self._push(hold, min(again_at, max(now, hold.trusted_until)))
                else:
                    expires_at = hold.renewed_by(outcomes[index])
                    if expires_at is None:
                        gone.append(hold)
                    else:
                        self._extend(hold, expires_at, t0, ttls[index], now)
        for hold in gone:
            self._lose(hold, GONE_REASON)
        for hold in finished:
            self._renewal_over(hold)

    def _call(
        self, which: Sequence[int], requests: Sequence[Any], outcomes: list[Any], until: float, *, of_jobs: bool
    ) -> None:
        """Send some of the requests; what came of each, or why that is unknown, stands among the outcomes then."""
        try:
            if self._store is None:
                self._store = self._open_store()
            act: Any = self._store.jobs.act if of_jobs else self._store.act  # type: ignore[attr-defined]
            asked, deadline = [requests[index] for index in which], Deadline(self._clock, until)
            answers = patiently(
                lambda: act(asked, deadline), self._clock, until, lambda: self._awaited or self._closing, self._in_vain
            )
            self.failures = 0
        except Exception as error:  # noqa: BLE001 - whatever it was, the renewals are unknown, and the trust runs on
            answers = [without_frames(error)] * len(which)
            self.failures += 1
        for index, answer in zip(which, answers, strict=True):
            outcomes[index] = answer

    def _in_vain(self, error: StoreBusy) -> None:
        """What may cost the leases of the batch their trust is known before it ends, for whoever looks then."""
        with self._mutex:
            for hold in self._batch:
                hold.last_error = hold.last_error or stayed_busy(error)

    def _extend(self, hold: Hold, expires_at: float, t0: float, ttl: float, now: float) -> None:
        if now < hold.trusted_until:
            hold.trusted_until = max(hold.trusted_until, local_deadline(t0, ttl, self._margin_s))
            hold.renewed_until = expires_at
            hold.last_error = None
            self.track(hold, t0)
        else:  # the answer came too late: whoever looked has already been told that the trust was over
            self._push(hold, now)
