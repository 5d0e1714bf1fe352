"""The claim lane: what threads and tasks ask of the store at the same moment becomes one call.

While a call is under way the next batch forms; there is no timer, so a caller alone never waits for company. The lane
knows nothing of locks: it carries ``Ask`` objects to the store and gives each its outcome.

States of the lane (``_server``, changed only under the session's mutex):

* ``None``: nobody serves; the queue is empty, or whoever filled it is about to call ``drive`` or ``start``.
* ``_THREAD``: the lane's own thread was woken and is about to serve.
* another object: one thread serves. Either it waits for an ask and serves until that is answered, and so pays no
  thread switch; or it is the lane's own and serves until the queue is empty; or it is closing the lane.

Whoever serves may use ``_store``, ``_batch`` and ``_outcomes``; nobody else touches them. A serving thread that is
interrupted (by Ctrl-C, or an error of a signal handler: ``dibs.signalled``) leaves its batch where it is and hands over
to the lane's thread, which repeats it: every request is idempotent, and the asks know of the first attempt. Failures
are repeated, and callers whose time is over (``Ask.overdue``) are served, by the lane's thread alone, so that no caller
is kept longer than it asked for.
"""

from __future__ import annotations

from _thread import get_ident
from errno import EMFILE, ENFILE
from sys import exc_info

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import ALONE, LEASES, Ask
from dibs.busy import BUSY_PAUSE_MAX_S, pause_s, stayed_busy
from dibs.clock import Deadline
from dibs.errors import SetupRequired, StoreUnavailable, without_frames
from dibs.pending import BATCH_MAX, CROWD_MIN, FOREVER, QUEUE_MAX, Pending
from dibs.signalled import by_signal
from dibs.store import PartUnavailable, RowBusy, StoreBusy, TakesNoWrites
from dibs.threads import SERVING, begin, is_known

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dibs.clock import Bell, Clock
    from dibs.pauses import Pauses
    from dibs.store import Held, Store

# The lane's thread ends after this long without work.
IDLE_S = 10.0
# Pauses before a failed batch is repeated: they double from the first to the last of these.
BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 1.0
assert BUSY_PAUSE_MAX_S < BACKOFF_MIN_S
# Pause before a request is repeated whose row a transaction has locked; nobody else waits for that.
ROW_PAUSE_S = 0.02
# Pause before a request is repeated that went to a part of the store that is away; others wait while it is asked.
PART_PAUSE_S = 1.0
# What serving answers instead of a pause when nothing is left to serve.
SERVED = -1.0


# Marks that the lane's own thread was woken; who serves is marked by an object made for the occasion.
_THREAD = object()


def _never_free(ask: Ask, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"{error}, all the time", maybe_applied=ask.maybe_applied)


class Lane:
    def __init__(
        self,
        clock: Clock,
        mutex: AbstractContextManager[object],
        open_store: Callable[[], Store],
        request_timeout_s: float,
        name: str,
        pauses: Pauses | None = None,
        *,
        served: bool = False,
    ) -> None:
        self._clock = clock
        self._mutex = mutex
        self._open_store = open_store
        self._request_timeout_s = request_timeout_s
        self._deadline = Deadline(clock, 0.0)  # of the call under way
        self._name = name
        self._pauses = pauses
        self.pending = Pending()
        #: How long a call lasts is looked at from so many asks on, if ever.
        self._many = CROWD_MIN if served else BATCH_MAX + 1
        self._server: object | None = None
        self._batch: list[Ask] = []
        #: What the store answered to the batch, and how many of the answers have been given out.
        self._outcomes: list[Any] | None = None
        self._given_out = 0
        self._store: Store | None = None
        #: The store has answered a call; it has carried out requests.
        self.reached = self.wrote = False
        #: How many calls have failed in all, and since the last that has not.
        self.outages = 0
        self._failures = 0
        #: How often the batch was tried in vain because the store was busy.
        self._busy = 0
        #: There is no thread that could repeat what fails.
        self._threadless = False
        self._bell: Bell | None = None
        self._closing = False
        self._ended = Ask(None, float("inf"))

    # -- asking -------------------------------------------------------------------------------------------------

    def put(self, ask: Ask) -> None:
        """Queue an ask. The caller holds the mutex and calls ``drive`` or ``start`` afterwards."""
        self.pending.put(ask)

    def full(self) -> bool:
        """No more acquires should be put: QUEUE_MAX are waiting. Releases are always taken."""
        return len(self.pending.asks) >= QUEUE_MAX

    def drive(self, ask: Ask | None, until: float = FOREVER) -> None:
        """Serve the lane from this thread until ``ask`` is answered, unless somebody else serves it already.

        None: until nothing is left. No call is begun after ``until``.
        """
        if self._server is not None:  # it will see the ask; see ``start``
            return
        me = object()  # of this very call: another thread may drive the same ask
        try:
            SERVING[me] = get_ident()
            with self._mutex:
                if self._server is not None:
                    return
                self._server = me
                if self.pending.asks and not self._batch:
                    self._take()
            if not self._serve(ask, until):
                self.start()
        except BaseException:
            # Ctrl-C in the middle. Set again until it holds: nothing else can end this thread's service.
            if self._server is me:
                self._server = None
            self.start()
            raise
        finally:
            SERVING.pop(me, None)

    def start(self) -> None:
        """Let the lane's thread serve what is queued, if nobody serves it."""
        # Whoever serves looks at the queue under the mutex before it stops. The caller's ask was put under the mutex
        # before this, so a server that is still there will see it; no mutex is needed to look for one.
        if self._server is not None:
            return
        try:
            self._summon()
        except StoreUnavailable:  # this process can have no other thread now
            self._threadless = True
            try:
                self.drive(None)
            finally:
                self._threadless = False
        except BaseException:  # Ctrl-C in the middle of it
            self._summon()
            raise

    def _summon(self) -> None:
        """Wake the lane's thread, which then looks for work by itself; begin it if there is none."""
        with self._mutex:
            if self._server is not None or not (self.pending.asks or self._batch or self.pending.later):
                return
            if self._bell is None:
                self._bell = begin(self._clock, self._name, self._run)
            else:
                self._bell.ring()
                self._server = _THREAD  # it need not be called again; last, so that a Ctrl-C loses no ring

    def _look_later(self) -> None:
        """Let the lane's thread see to it that what waits is asked for again."""
        with self._mutex:
            if self._bell is not None:
                self._bell.ring()
                return
            try:
                self._bell = begin(self._clock, self._name, self._run)
            except StoreUnavailable as error:
                self.pending.fail_later(without_frames(error))

    def close(self) -> Ask:
        """End the lane once what is queued has been served. Settled when its connection is closed."""
        me = object()
        try:
            with self._mutex:
                self._closing = True
                self.pending.ask_again()
                if self._failures and False not in [ask.afterwards for ask in (*self._batch, *self.pending.asks)]:
                    self._ended.settle(None)  # the store is away, and nobody waits for what it is to be told yet
                if self._server is None and not self.pending.asks and not self._batch:
                    self._server = me
            if self._server is me:
                self._close_store()
        finally:  # also after a Ctrl-C: whoever closes it once more finds it as it was
            if self._server is me:
                self._server = None
        self.start()  # for what is still to be served, or was put meanwhile; whoever serves it last closes the store
        return self._ended

    # -- serving ------------------------------------------------------------------------------------------------

    def _run(self, bell: Bell) -> None:
        """The lane's thread: serves while there is work and nobody else does, ends after a while without."""
        if not is_known(self, bell):
            return
        idle_since = self._clock.now()
        me = object()
        while True:
            with self._mutex:
                now = self._clock.now()
                if now >= self.pending.later_at:
                    self.pending.ask_again()
                wait_s = min(IDLE_S, self.pending.later_at - now)
                serving = self._server is _THREAD or (self._server is None and bool(self.pending.asks or self._batch))
                if serving:
                    self._server = me
                elif self._closing or (now - idle_since >= IDLE_S and not self.pending.later):
                    self._bell = None
                    break
            if serving:
                self._serve(None)
                idle_since = self._clock.now()
            else:
                bell.wait(wait_s)
        bell.close()

    def _serve(self, me: Ask | None, until: float = FOREVER) -> bool:
        """Serve until ``me`` is answered (None: until nothing is left); False when work is left for others.

        After ``until`` another call would keep ``me`` longer than one request's time beyond its own.
        """
        while True:
            if self._batch:
                pause = self._perform()
                if pause == SERVED:
                    return True
                if (pause > BUSY_PAUSE_MAX_S and me is not None) or (pause and self._clock.now() >= until):
                    with self._mutex:
                        self._server = None
                    return False
                if pause:
                    self._clock.sleep(pause * (0.5 + self._clock.jitter()))
                    continue
            with self._mutex:
                if self._batch:
                    continue
                if self.pending.asks and (me is None or (me.in_lane and self._clock.now() < until)):
                    self._take()
                    continue
                if not self._closing or self.pending.asks:
                    self._server = None
                    return not self.pending.asks
            self._close_store()
            with self._mutex:
                if not self.pending.asks:  # else something was put meanwhile by who saw that somebody serves
                    self._server = None
                    return True

    def _take(self) -> None:
        """Make the next batch. The caller holds the mutex."""
        pending = self.pending
        # In this order, and without a call in between: a Ctrl-C loses nothing.
        self._batch, pending.asks, pending.others = pending.divided()

    def _perform(self) -> float:
        """Carry the batch to the store and its outcomes back; return how long to pause before the next call.

        SERVED means that nothing is left and this thread has stopped to serve.
        """
        handled = exc_info()[1]
        if self._outcomes is None:
            try:
                pause = self._carry(handled)
            except BaseException:  # Ctrl-C: the lane's thread sends it again, and what the store has done stands
                if self._outcomes is None:
                    for ask in self._batch:
                        if ask.t0 is not None and not ask.maybe_applied:
                            ask.trouble = StoreUnavailable("an attempt was interrupted")
                raise
            if pause is not None:
                return pause
            self._failures = self._busy = 0
        batch, outcomes, later = self._batch, self._outcomes, len(self.pending.later)
        assert outcomes is not None
        with self._mutex:
            for place in range(self._given_out, len(batch)):
                ask, outcome = batch[place], outcomes[place]
                try:
                    ask.in_lane = False
                    if not isinstance(outcome, BaseException):
                        ask.received(outcome)
                    elif type(outcome) is RowBusy or type(outcome) is PartUnavailable:
                        self._put_off(ask, outcome)
                    else:
                        ask.failed(outcome)
                except Exception as error:  # of a thread that cannot be had, say: it concerns this ask alone
                    if by_signal(error, handled) is not None:
                        ask.in_lane = True  # as below
                        raise
                    ask.failed(without_frames(error))
                except BaseException:  # Ctrl-C: it is still in the batch, and is given its answer once more
                    ask.in_lane = True
                    raise
                self._given_out = place + 1
            put_off = len(self.pending.later) > later
            self._batch = []
            self._outcomes = None
            self._given_out = 0
            served = not self.pending.asks and not self._closing
            if served:
                self._server = None
        if put_off:
            self._look_later()
        if served:
            return SERVED
        if self.pending.releases_only:
            self._clock.sleep(0)  # let those who were told ask again
        return 0.0

    def _carry(self, handled: BaseException | None) -> float | None:
        """Carry the batch to the store; how long to pause before the next call, None when it has answered."""
        batch = self._batch
        now = self._clock.now()
        try:
            self._deadline.at = now + self._request_timeout_s
            pauses, paused = self._pauses, None
            if pauses is not None and (now >= pauses.stale_at or pauses.some):
                try:
                    paused = pauses.refusals(batch, self._opened, self._deadline, self._clock, now)
                except StoreUnavailable:
                    others = self._put_back_new(batch)
                    if not others:
                        raise
                    batch = others
                    self._deadline.at = self._clock.now() + self._request_timeout_s
            dropped = False
            for ask in batch:
                if ask.t0 is None:
                    ask.t0 = None if paused and ask in paused else now
                # In this order: whoever withdraws an ask drops it and then looks whether it has a t0.
                if ask.dropped:
                    dropped = True
            if dropped:
                batch = self._batch = [ask for ask in batch if not ask.dropped]
                if not batch:
                    return 0.0
            self._outcomes = self._call(batch, self._deadline, paused)
            if len(batch) >= self._many:
                took_s = self._clock.now() - now
                with self._mutex:
                    self.pending.carried(batch, took_s)
        except Exception as error:  # noqa: BLE001 - what it is, is found out there
            return self._came_to_nothing(batch, error, handled)
        return None

    def _came_to_nothing(self, batch: list[Ask], error: Exception, handled: BaseException | None) -> float | None:
        """The call has failed. What a signal handler has raised is no failure of the store's, and raised again."""
        raised = by_signal(error, handled)
        if raised is not None:
            raise raised
        if isinstance(error, StoreBusy):
            self._busy += 1
            return self._repeat(batch, error, pause_s(self._busy - 1))
        if isinstance(error, StoreUnavailable):
            if self.wrote or not isinstance(error, TakesNoWrites):
                self.outages += 1
                self._failures += 1
                backoff = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(self._failures, 16))
                return self._repeat(batch, error, backoff)
            wrong_server = SetupRequired(str(error))
            wrong_server.__cause__ = error.__cause__
            error = wrong_server
        elif isinstance(error, OSError) and error.errno in (EMFILE, ENFILE):
            error = StoreUnavailable(str(error), maybe_applied=False)
        # Misconfigured, or a bug: told to all, trying again serves nobody.
        self._outcomes = [without_frames(error)] * len(batch)
        return None

    def _put_back_new(self, batch: list[Ask]) -> list[Ask]:
        """The list of pauses is not to be had, and they wait for it who want something new: the others need not.

        Else what gives something back would share their patience without having been sent once. Returns the others.
        """
        new = [ask for ask in batch if ask.is_new()]
        others = [ask for ask in batch if not ask.is_new()]
        if others:
            with self._mutex:
                self.pending.put_back(new)
                self._batch = others
        return others

    def _put_off(self, ask: Ask, why: RowBusy | PartUnavailable) -> None:
        """A transaction has locked the row, or its part of the store is away: ask for it later.

        Unless that is an answer, or it was so for long enough.
        """
        now = self._clock.now()
        locked = type(why) is RowBusy
        if locked and ask.if_locked is not None and not ask.maybe_applied:
            ask.received(ask.if_locked)  # (else that transaction may be its own earlier attempt)
        elif now < ask.give_up_at and not self._closing:
            without_frames(why)
            if not ask.maybe_applied:
                ask.trouble = why
            self.pending.put_off(ask, now + (ROW_PAUSE_S if locked else PART_PAUSE_S))
        elif isinstance(why, PartUnavailable):
            ask.failed(StoreUnavailable(str(why), maybe_applied=ask.maybe_applied or why.maybe_applied))
        else:
            ask.failed(_never_free(ask, why))

    def _opened(self) -> Store:
        store = self._store
        if store is None:
            store = self._store = self._open_store()
        return store

    def _call(self, batch: list[Ask], deadline: Deadline, paused: dict[Ask, Held] | None) -> list[Any]:
        store = self._store or self._opened()
        kind = batch[0].kind
        if kind == ALONE:
            try:
                outcomes = [batch[0].request(store, deadline)]
            except RowBusy as error:
                outcomes = [error]
        else:
            act: Any = store.act if kind == LEASES else store.jobs.act  # type: ignore[attr-defined]
            if paused:
                sent = [ask.request for ask in batch if ask not in paused]
                answers = iter(act(sent, deadline) if sent else ())
                outcomes = [paused[ask] if ask in paused else next(answers) for ask in batch]
            else:
                outcomes = act([ask.request for ask in batch], deadline)
            self.wrote = True
        self.reached = True
        return outcomes

    def _repeat(self, batch: list[Ask], error: Exception, pause: float) -> float:
        """Give up on whoever waited long enough; leave the rest in the batch to be tried again."""
        now = self._clock.now()
        busy = isinstance(error, StoreBusy)
        if busy:
            error = stayed_busy(error)
        without_frames(error)
        again: list[Ask] = []
        with self._mutex:
            for ask in batch:
                if not ask.maybe_applied:
                    ask.trouble = error  # what may have been done stands, whatever the next attempts say
                # A store that was never reached is more likely a wrong address than an outage: say so at once.
                if now >= ask.give_up_at or not (busy or (self.reached and not self._threadless)):
                    ask.in_lane = False
                    ask.failed(error)
                else:
                    again.append(ask)
            if not busy:
                self.pending.give_up(now, error)
        self._batch = again
        return pause if again or self.pending.asks else 0.0

    def _close_store(self) -> None:
        try:
            if self._store is not None:
                self._store.close()
                self._store = None
        finally:
            with self._mutex:
                if self._bell is not None:
                    self._bell.ring()  # nothing is left for the lane's thread
            self._ended.settle(None)
