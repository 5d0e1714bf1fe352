"""An ask: one request on its way to the store and back, and whoever waits for the answer.

It answers for being settled once, and for nobody waiting on after that. Lanes carry asks (``dibs.lane``,
``dibs.renewer``); what an outcome means is for those who make asks of their own kind of it.
"""

from __future__ import annotations

from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Clock, Gate

# Which act of the store carries an ask: that on leases, that on jobs, or (an Act) none but its own.
LEASES, JOBS, ALONE = range(3)


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
    #: The time of its caller is over, who waits for an answer that is on its way, and begins no call any more.
    overdue = False
    #: A wish for a new grant: where that is paused, it is refused instead of sent. (What was sent is sent again.)
    pausable = False
    #: What it is told when a transaction has locked its row; None: it is asked for again.
    if_locked: Any = None

    def __init__(self, request: Any, give_up_at: float) -> None:
        #: A Request of the store contract, or for an ``Act`` a function of the store.
        self.request = request
        #: When the lane stops repeating a failed attempt.
        self.give_up_at = give_up_at
        #: Whom to call, with what, once it is settled: of what ends a lease or a job, there may be several.
        self._waiters: list[tuple[Callable[[Any], None], Any]] = []

    @property
    def maybe_applied(self) -> bool:
        """Whether an earlier attempt may have done what is asked for, without an answer."""
        return isinstance(self.trouble, StoreUnavailable) and self.trouble.maybe_applied

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
        # A waiter looks at `settled` after it has said here whom to call, so one of the two sees the other.
        if self._waiters:
            try:
                self._tell()
            except BaseException:  # Ctrl-C on the way there: it is settled, so nobody else would wake whoever waits
                self._tell()
                raise

    def _tell(self) -> None:
        for listener, letter in self._waiters[:]:  # a copy, as those who are told may go
            listener(letter)
        self._waiters.clear()

    def received(self, outcome: Any) -> None:
        """Called by whoever serves the lane, under the mutex; perhaps again with the same outcome after a Ctrl-C."""
        self.settle(outcome)

    def failed(self, error: BaseException) -> None:
        """As ``received``, when there is an error instead of an outcome."""
        self.settle(None, error)

    def wait(self, clock: Clock, timeout: float | None) -> bool:
        """Block this thread until settled; False when ``timeout`` seconds went by first."""
        if self.settled:
            return True
        gate = clock.gate()
        self._waiters.append((_open, gate))
        if self.settled:
            return True
        try:
            return gate.wait(timeout) or self.settled
        finally:
            if not self.settled:
                self.unlisten(_open, gate)

    def listen(self, listener: Callable[[Any], None], letter: Any) -> None:
        """Call ``listener(letter)`` once settled, in any thread; at least once, perhaps twice."""
        self._waiters.append((listener, letter))
        if self.settled:
            listener(letter)

    def unlisten(self, listener: Callable[[Any], None], letter: Any) -> None:
        """Nobody waits there any more."""
        with suppress(ValueError):  # it has just been settled
            self._waiters.remove((listener, letter))


def _open(gate: Gate) -> None:
    gate.open()


class Act(Ask):
    """An operator's act: a function of the store and a deadline, called by itself between two batches."""

    kind = ALONE


class JobAsk(Ask):
    """A request of the contract of jobs (``dibs.jobs``)."""

    kind = JOBS
