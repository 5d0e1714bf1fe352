"""A session: one client's identity, and everything that it asks of the store, on its two lanes.

It answers for what is asked while the client is open, and for nothing being left of it when it is closed. What becomes
of a hold is its keeper's business (``dibs.keeper``), how a wish becomes one that of ``dibs.wishes``, how requests
travel the lane's, when to ask again waiting's, and what a user sees the faces' (``dibs.client``, ``dibs.aio``).

One mutex guards the lane's queue, the waiting lines, the renewer's queues and the holds. It is held for a few
dictionary operations, never during a call to the store or to a user's function.

(A loop in the very block that has it ends with a plain statement, not with a condition: at the jump back after that,
Python 3.13 forgets that the block must be left when a signal comes, gh-130279. Since 3.14 ``any`` and ``all`` of a
generator are such loops, too. What is called from there may be as it likes.)
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from weakref import WeakValueDictionary

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.ask import Act, Ask
from dibs.clock import Deadline, RealClock
from dibs.dropped import told, watch
from dibs.errors import StoreUnavailable
from dibs.hold import HELD, Hold
from dibs.holdings import Holdings
from dibs.keeper import Keeper
from dibs.lane import Lane
from dibs.pending import FOREVER
from dibs.rings import Rings
from dibs.steps import run
from dibs.store import Acquire, Transfer
from dibs.threads import is_own, unattended
from dibs.waiting import Waiting
from dibs.wishes import AcquireAsk, TakeOver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Clock
    from dibs.load import Load
    from dibs.pauses import Pauses
    from dibs.steps import Steps
    from dibs.store import Held, Request, Store, StoreAddress
    from dibs.terms import Terms

T = TypeVar("T")

# Nobody has the mutex for that long; whoever sees it had for longer has it. So often that one looks.
MUTEX_S = 0.25
MUTEX_LOOK_S = 0.001
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
        # Begins the claims of this client: by its id, so that a watch knows them in line, and by what nobody else sees,
        # as they prove its leases. (A test that gives the id wants to know the claims.)
        self._claims_begin = f"{self.client_id}-" if client_id else f"{self.client_id}-{os.urandom(8).hex()}-"
        self.holder = f"{host or os.uname().nodename}/{self.pid}/{self.client_id}"
        self.margin_s = address.capabilities.margin_s
        self.request_timeout_s = request_timeout_s
        self.patience_s = patience_s
        self.mutex = self.clock.mutex()
        self.pauses = pauses
        #: Told, in a thread of its own, that a name somebody waits for is paused.
        self.on_paused: Callable[[str], None] = _log
        self.lane = Lane(
            self.clock, self.mutex, address.open, request_timeout_s, "dibs-claim", pauses, served=address.served
        )
        self.lane.pending.hands_over = address.capabilities.waiting_line == "FIFO"
        self.waiting = Waiting(
            self.clock,
            self.mutex,
            self.lane,
            address.open,
            self.client_id,
            request_timeout_s,
            patience_s,
            together=address.together,
        )
        self.holdings = Holdings()
        self.keeper = Keeper(
            self.clock,
            self.mutex,
            address.open,
            self.lane,
            self.waiting,
            self.holdings,
            request_timeout_s=request_timeout_s,
            patience_s=patience_s,
            margin_s=self.margin_s,
        )
        self.renewer = self.keeper.renewer
        self._claims = count(1)
        self.rings = Rings(self, lock_order_warnings)
        #: What is counted of the queues that this client takes jobs of (dibs.load), by their names.
        self.loads: dict[str, Load] = {}
        #: Who sleeps (``pause``), in the order in which they fell asleep.
        self._sleeps: WeakValueDictionary[int, Ask] = WeakValueDictionary()
        self._aside_mutex = self.clock.mutex()
        self._aside: Store | None = None
        self.closed = False
        #: … and everybody has been told.
        self._left = False

    # -- asking ---------------------------------------------------------------------------------------------------

    def wish(self, key: str, terms: Terms, owner: object, blocking: bool) -> AcquireAsk:
        """Make the ask for a name; nothing happens before ``submit``."""
        client_id = self.client_id
        claim_id = f"{self._claims_begin}{next(self._claims)}"
        request = Acquire(key, claim_id, terms.ttl, self.holder, terms.info, client_id if blocking else None)
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
        return f"{self._claims_begin}{next(self._claims)}"

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

    def send(self, ask: Ask) -> Ask:
        """Queue any other ask, unless the client is closed or too much waits already."""
        with self.mutex:
            self._open_to_more()
            self.lane.put(ask)
        return ask

    def submit_all(self, asks: Sequence[AcquireAsk]) -> None:
        """The same for several that are asked for once, without waiting; all of them or none."""
        with self.mutex:
            self._open_to_more()
            for ask in asks:
                self.lane.put(ask)

    def time_left(self, until: float | None) -> float | None:
        """How long what is begun by ``until``, where a time limit ends, may take: one request's time longer (P11)."""
        return None if until is None else max(0.0, until + self.request_timeout_s - self.clock.now())

    def give(self, *holds: Hold) -> bool:
        """Their caller has all of these in hand from now on; False, and none is, when one of them is over.

        From then on its end is told. (One by one, some could be given back just before the end of the others is told.)
        """
        with self.mutex:
            now = self.clock.now()
            if any(hold.state != HELD or now >= hold.trusted_until for hold in holds):
                return False
            for hold in holds:
                hold.given = True
        return True

    def made(self, lease: object, hold: Hold) -> bool:
        """Whether the Lease that was just made of this is its caller's; if not, it is unmade.

        Looked at when it is made: whoever finds it over from now on tells its holder, whoever did before told nobody.
        """
        if hold.state == HELD and self.clock.now() < hold.trusted_until:
            watch(lease, hold, self, told)
            return True
        with self.mutex:
            if not hold.loud:
                hold.given = False
        return hold.given

    def withdraw(self, *asks: AcquireAsk) -> None:
        """Nobody wants the answers any more: leave the lines, and give back what was or may yet be granted."""
        try:
            self._withdraw(asks)
        except BaseException:  # a Ctrl-C on the way out must not leave it half withdrawn
            self._withdraw(asks)
            raise

    def _withdraw(self, asks: Sequence[AcquireAsk]) -> None:
        with self.mutex:
            for ask in asks:
                ask.dropped = True
                if ask.blocking:
                    self.waiting.leave_line(ask)
                if ask.hold is None and not self.closed and ask.may_be_known():
                    # It was sent, so it may be granted or in line yet; this release travels behind it.
                    self.lane.put(ask.undoing())
        holds = [ask.hold for ask in asks if isinstance(ask.hold, Hold)]
        for hold in holds:
            hold.given = hold.orphan = False  # whatever was made of it, nobody has it in hand
        if holds:
            self.keeper.give_back(*holds)
        else:
            self.lane.start()

    def tell_paused(self, key: str, held: Held) -> None:
        """Somebody waits for a name that is paused: say so once for each name and pause. Under the mutex."""
        if self.pauses is not None and self.pauses.news(key, held):
            name, on_paused = key.partition(":")[2], self.on_paused
            message = f"{name!r} {held.paused}"
            with suppress(RuntimeError):  # no thread can be had, and this one has the mutex
                self.clock.spawn("dibs-paused", lambda: on_paused(message))

    def is_busy_here(self) -> bool:
        """Whether this thread may be in the midst of the session's own work, so that it must not wait for it.

        It asks who was closed with GeneratorExit: perhaps by the garbage collector, which comes anywhere.
        """
        if is_own():
            return True
        # Another thread soon lets go of it. It is looked at and not taken: a Ctrl-C behind that would leave it had.
        until = self.clock.now() + MUTEX_S
        while self.mutex.locked():
            if self.clock.now() >= until:
                return True
            self.clock.sleep(MUTEX_LOOK_S)
        return False

    def end(self, steps: Steps[object], error: type[BaseException] | None) -> None:
        """Take the steps in this thread that end a block which was left by an error of this type, if by any.

        In another one, unattended, where this one must not wait.
        """
        if error is GeneratorExit and self.is_busy_here():
            unattended(lambda: run(steps))
        else:
            run(steps)

    # -- waiting for an ask ---------------------------------------------------------------------------------------

    def wait(self, ask: Ask, timeout: float | None) -> bool:
        """Block this thread until the ask is settled, serving the lane if nobody does; False at the time-out."""
        until = FOREVER if timeout is None else self.clock.now() + timeout
        if ask.in_lane:
            last = until - self.request_timeout_s if ask.overdue else until
            if ask.trouble is None and (not ask.overdue or self.clock.now() < last):
                self.lane.drive(ask, last)
            else:  # an attempt has failed, say: repeating it is the lane's thread's business, and takes its time
                self.lane.start()
        if ask.settled:
            return True
        return ask.wait(self.clock, None if timeout is None else until - self.clock.now())

    def new_ask(self, request: Request) -> Ask:
        """Make the ask for a request that makes no hold of this session; nothing happens before ``queue``."""
        return Ask(request, self.clock.now() + self.patience_s)

    def new_act(self, function: Callable[..., Any]) -> Ask:
        """The same for a function of the store and a deadline, to be run between two batches."""
        return Act(function, self.clock.now() + self.patience_s)

    def queue(self, *asks: Ask) -> None:
        """Queue asks of this kind; the caller then waits for one, or lets the lane's thread serve them."""
        with self.mutex:
            for ask in asks:
                self.lane.put(ask)

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
            self._sleeps[id(ask)] = ask
            if self.closed:
                ask.settle(None)
        return ask

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> list[Ask]:
        """Give back what is held, and refuse who waits. Returns the releases to wait for."""
        try:
            return self._leave()
        except BaseException:
            # Ctrl-C in the middle: all of it once more. Told twice does no harm; not told, somebody would wait for ever
            # in this process, and what is held would be renewed.
            self._leave()
            self.lane.start()
            raise

    def _leave(self) -> list[Ask]:
        with self.mutex:
            if self._left:
                return []
            self.closed = True
            waiters = self.waiting.everybody()
            releases = self.rings.withdraw()
            ends, listeners = self.keeper.close(self.clock.now())
            releases += ends
            for ask in waiters:
                ask.dropped = True
                if not ask.may_be_known():
                    continue
                undo = ask.undoing()
                self.lane.put(undo)
                releases.append(undo)
            sleeps = list(self._sleeps.values())
        for listener in listeners:
            listener()
        for sleep in sleeps:
            sleep.settle(None)
        for ask in waiters:
            ask.settle(None, StoreUnavailable("this dibs client was closed while waiting", maybe_applied=False))
        self._left = True
        # Whoever waits for the releases serves the lane: at the interpreter's end no thread can be started any more.
        return releases

    def shut(self) -> list[Ask]:
        """After ``close``: end the threads and connections. Returns what to wait for until they are gone."""
        with self._aside_mutex:
            if self._aside is not None:
                self._aside.close()
                self._aside = None
        ends = [*self.rings.close(), self.waiting.close(), self.renewer.close(), self.lane.close()]
        return [end.echo() for end in ends]  # several threads may close one client


def _log(message: str) -> None:
    import logging

    logging.getLogger("dibs").warning("%s", message)
