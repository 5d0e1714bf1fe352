"""An ask: one request on its way to the store and back, and whoever waits for the answer.

It answers for being settled once, and for nobody waiting on after that. Lanes carry asks (``dibs.lane``,
``dibs.renewer``); what an outcome means is for those who make asks of their own kind of it.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.layout import laid_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Clock, Gate

# Which act of the store carries an ask: that on leases, that on jobs, or (an Act) none but its own.
LEASES, JOBS, ALONE = range(3)
# What is set on an ask, also on its way (``dibs.layout``).
ON_ITS_WAY = "request give_up_at in_lane under_way _gate _letter _listener t0 outcome settled error trouble"


@laid_out(ON_ITS_WAY)
class Ask:
    """One request on its way to the store and back; answered once, by an outcome or an error."""

    # What is the same for every new ask is a default of the class, so that making one stays cheap.
    #: Read before the first byte of the first attempt; None while nothing was sent.
    t0: float | None = None
    outcome: Any = None
    error: BaseException | None = None
    settled = False
    #: Queued, or in the batch under way.
    in_lane = False
    #: Of these the latter: what is queued now goes out after it.
    under_way = False
    #: Why an attempt has been repeated.
    trouble: Exception | None = None
    #: Nobody wants the answer any more: it is not sent (again).
    dropped = False
    #: LEASES, JOBS or ALONE.
    kind = LEASES
    #: Bytes of payload it carries.
    weight = 0
    #: It cleans up after one that has failed: nobody waits for it.
    afterwards = False
    #: It gives back what was, or may have been, granted to nobody: however late it is, it is sent once.
    owed = False
    #: Whoever waits for it leaves at the time-out, and no later: that thread begins no call that may last longer.
    overdue = False
    #: A wish for a new grant: where that is paused, it is refused instead of sent. (What was sent is sent again.)
    pausable = False
    #: What it is told when a transaction has locked its row; None: it is asked for again.
    if_locked: Any = None
    _gate: Gate | None = None
    _listener: Callable[[Any], None] | None = None
    _letter: Any = None
    _echoes: list[Ask] | None = None

    def __init__(self, request: Any, give_up_at: float) -> None:
        #: A Request of the store contract, or for an ``Act`` a function of the store.
        self.request = request
        #: When the lane stops repeating a failed attempt.
        self.give_up_at = give_up_at

    @property
    def maybe_applied(self) -> bool:
        """Whether an earlier attempt may have done what is asked for, without an answer."""
        return isinstance(self.trouble, StoreUnavailable) and self.trouble.maybe_applied

    def unanswered(self, text: str) -> StoreUnavailable:
        """What to tell who has waited long enough: this, and what the last attempt failed with."""
        error = StoreUnavailable(f"{text} ({self.trouble})" if self.trouble else text)
        error.__cause__ = self.trouble
        return error

    def is_new(self) -> bool:
        """Whether it wishes for a new grant, and the store certainly knows nothing of that."""
        return self.pausable and self.t0 is None

    def settle(self, outcome: Any, error: BaseException | None = None) -> None:
        """Make the answer final and wake whoever waits for it."""
        if self.settled:
            return
        self.outcome = outcome
        if error is not None:
            self.error = error
        self.settled = True
        # The waiter looks at `settled` after it has left its gate or listener here, so one of the two sees the other.
        gate = self._gate
        listener = self._listener
        try:
            if gate is not None:
                self._gate = None
                gate.open()
            if listener is not None:
                listener(self._letter)
            if self._echoes is not None:
                self._echo()
        except BaseException:  # Ctrl-C on the way there: it is settled, so nobody else would wake whoever waits
            if gate is not None:
                gate.open()
            if listener is not None:
                listener(self._letter)
            self._echo()
            raise

    def received(self, outcome: Any) -> None:
        """Called by whoever serves the lane, under the mutex; perhaps again with the same outcome after a Ctrl-C."""
        self.settle(outcome)

    def failed(self, error: BaseException) -> None:
        """As ``received``, when there is an error instead of an outcome."""
        self.settle(None, error)

    def wait(self, clock: Clock, timeout: float | None) -> bool:
        """Block this thread until settled; False when ``timeout`` seconds went by first. One thread may wait here."""
        if self.settled:
            return True
        gate = self._gate = clock.gate()
        if self.settled:
            return True
        try:
            return gate.wait(timeout) or self.settled
        finally:
            self._gate = None

    def listen(self, listener: Callable[[Any], None], letter: Any) -> None:
        """Call ``listener(letter)`` once settled, in any thread; at least once, perhaps twice. One may listen here."""
        self._letter = letter
        self._listener = listener
        if self.settled:
            listener(letter)

    def echo(self) -> Ask:
        """Another that is settled with this one: for who waits for the same answer, beside whoever asked."""
        echo = Ask(self.request, self.give_up_at)
        echo.in_lane, echo.trouble = self.in_lane, self.trouble  # so that whoever waits for it serves the lane
        if not self.settled:
            # In one step, as two threads may do this at the same time.
            self.__dict__.setdefault("_echoes", []).append(echo)
        if self.settled:
            self._answer(echo)
        return echo

    def _echo(self) -> None:
        for echo in list(self._echoes or ()):
            self._answer(echo)

    def _answer(self, echo: Ask) -> None:
        echo.in_lane, echo.trouble = False, self.trouble
        echo.settle(self.outcome, self.error)


@laid_out(ON_ITS_WAY)
class Act(Ask):
    """An operator's act: a function of the store and a deadline, called by itself between two batches."""

    kind = ALONE


@laid_out(f"{ON_ITS_WAY} weight")
class JobAsk(Ask):
    """A request of the contract of jobs (``dibs.jobs``)."""

    kind = JOBS
