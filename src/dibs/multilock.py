"""Several names, all or nothing.

All are asked for in one call. When one of them cannot be had, what was granted is given back at once, before anything
is waited for: whoever waits here holds nothing, so no set of multilocks can wait for each other in a circle. The wait
is for one name at a time, in line like everybody; when it has been had, the others are asked for again. Names are
asked for in the order of their code points, so that callers with the same names meet at the first.

Whoever has waited for a name keeps its place in that line until all are there: it gives back what it cannot use without
the others, and asks for it from the same place again. Else those who wait for the same names would go from the end of
one line to the end of the next, and each be refused what is kept for the others. And it pauses at random before it
waits once more: the requests of a process travel together, so its callers would change places in step.

Whoever is refused a name behind the one that it has waited for asks for the rest a few times more before it gives
back: those who met at the first name need the same others, and what one of them has just given back is free by the
time that it is asked for again. Meanwhile only what stands in front of that name is kept: so no two keep what the other
needs.

Until all are there, nobody has any of them in hand: such a grant is neither renewed nor told to be lost. What is over
before the others are there is asked for again, with all the rest.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.dropped import told, watch
from dibs.errors import DibsError, InvalidName, InvalidOption, LeaseLost
from dibs.grips import Gripped
from dibs.lease import Lease, LeaseFacts, releasing_all
from dibs.lock import LockCore, obtain_all, wait_limit
from dibs.lockable import Lockable
from dibs.lost import Lost
from dibs.names import check_name
from dibs.steps import all_of, run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dibs.clock import Clock
    from dibs.copies import LostMultiLease
    from dibs.desk import Desk
    from dibs.errors import LockTimeout
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms
    from dibs.wishes import AcquireAsk

# As many names as fit into one call to the store.
NAMES_MAX = 1000
# Who is refused once more pauses, at random, for up to so many times what asking took: once, twice, … this many times.
PAUSES_MAX = 8
PAUSE_MAX_S = 1.0
# So many times more the names behind the one that was waited for are asked for before it is given back.
ASKS_MAX = 4

L = TypeVar("L", bound=LeaseFacts)
M = TypeVar("M", bound="MultiLeaseFacts[Any]")


class MultiLeaseFacts(Generic[L]):
    """One grant of several names. It is held while every one of them is."""

    __slots__ = ("__weakref__", "_leases")

    def __init__(self, leases: dict[str, L]) -> None:
        self._leases = leases

    @property
    def leases(self) -> dict[str, L]:
        """The lease of each name, in the order in which the names were given."""
        return self._leases

    @property
    def names(self) -> tuple[str, ...]:
        """What is held."""
        return tuple(self.leases)

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The fencing token of each name."""
        return {name: lease.fencing_token for name, lease in self.leases.items()}

    @property
    def held(self) -> bool:
        """Whether this process may still rely on all of it. Decided by the clock: no network, no thread."""
        return all(lease.held for lease in self.leases.values())

    def remaining(self) -> float:
        """Seconds for which all of it can be relied on without another renewal; 0 when one of them is over."""
        return min(lease.remaining() for lease in self.leases.values())

    def check(self) -> None:
        """Raise LeaseLost unless every lease is held."""
        for lease in self.leases.values():
            lease.check()

    @property
    def _over(self) -> bool:
        return all(lease._over for lease in self.leases.values())

    @property
    def _given_back(self) -> bool:
        return all(lease._given_back for lease in self.leases.values())

    @property
    def _session(self) -> Session:
        return next(iter(self.leases.values()))._session

    @property
    def _holds(self) -> list[Hold]:
        return [hold for lease in self.leases.values() for hold in lease._holds]

    def _releasing(self) -> Steps[bool]:
        return releasing_all(list(self.leases.values()))

    def _end(self) -> None:
        for lease in self.leases.values():
            lease._end()

    def _renewing(self, ttl: Seconds | None) -> Steps[bool]:
        return all_of([_told(lease._renewing(ttl)) for lease in self.leases.values()])

    def __getitem__(self, name: str) -> L:
        return self.leases[name]

    def __iter__(self) -> Iterator[L]:
        return iter(self.leases.values())

    def __len__(self) -> int:
        return len(self.leases)

    def __repr__(self) -> str:
        state = f"held for {self.remaining():.1f} s more" if self.held else "not held"
        return f"<{type(self).__name__} of {len(self.leases)} names, {state}>"

    def __copy__(self) -> LostMultiLease:
        from dibs.copies import LostMultiLease

        return LostMultiLease(self.fencing_tokens)

    def __deepcopy__(self, memo: object) -> LostMultiLease:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        from dibs.copies import LostMultiLease

        return LostMultiLease, (self.fencing_tokens,)


def _told(steps: Steps[None]) -> Steps[bool]:
    yield from steps
    return True


class _Had(LeaseFacts):
    """The grant of one of the names, before all are there: of this one nobody is told, and it renews nothing."""

    __slots__ = ()

    def __init__(self, session: Session, hold: Hold, name: str) -> None:
        self._session = session
        self._hold = hold
        self._name = name


class _Part(LockCore[_Had]):
    """One of the names, for one caller who waits: it keeps the place in line that it has had there."""

    __slots__ = ("_ask", "_ticket")

    def __init__(self, desk: Desk, name: str, terms: Terms) -> None:
        super().__init__(desk, name, terms, _Had)
        self._ticket: int | None = None

    def _wish(self, session: Session, owner: object, blocking: bool) -> AcquireAsk:
        self._ask = ask = super()._wish(session, owner, blocking)
        if self._ticket:
            ask.request = ask.request._replace(ticket=self._ticket)
            # A release while it takes its place may have found nobody there to tell: it asks once more.
            ask.hinted = blocking
        return ask

    def keep_place(self) -> None:
        """It was waited for, and had."""
        self._ticket = self._ask.request.ticket or self._ticket


class MultiCore(Gripped[M], Generic[M, L]):
    """What a multilock does, in steps for either face."""

    __slots__ = ("_cores", "_desk", "_make", "_make_lease", "_refused", "names")

    def __init__(
        self,
        desk: Desk,
        names: Collection[str],
        terms: Terms,
        make_lease: Callable[[Session, Hold, str], L],
        make: Callable[[dict[str, L]], M],
    ) -> None:
        self.names = _checked(names)
        super().__init__(", ".join(self.names), terms)
        self._desk = desk
        self._make = make
        self._make_lease = make_lease
        self._cores: Sequence[LockCore[_Had]] = [LockCore(desk, name, terms, _Had) for name in sorted(self.names)]
        self._refused: LockCore[_Had] = self._cores[0]

    def acquire(self, owner: object, blocking: bool = True, timeout: Seconds | None = -1) -> Steps[M | None]:
        limit_s = wait_limit(self.terms, blocking, timeout)
        if self.terms.reentrant:
            grip = self._held_by(owner)
            if grip is not None:
                grip.count += 1
                return grip.lease
        session = self._desk.session()
        if limit_s != 0 and owner in session.holdings.owned:
            session.rings.taking(owner, *(core._key for core in self._cores))
        clock = session.clock
        until = None if limit_s is None else clock.now() + limit_s
        had: dict[int, _Had] = {}
        answers: list[_Had | None] = []
        made: dict[str, L] = {}
        parts: list[_Part] = []
        waited = len(self._cores)  # the place of the name that was waited for; at first none was
        asks = pauses = 0
        try:
            while True:
                cores = parts or self._cores
                rest = [place for place in range(len(cores)) if place not in had]
                asked_at = clock.now()
                # Granted in the last moment, what was waited for leaves less than one request's time for the rest.
                late_s = 0.0 if until is None else max(0.0, asked_at - until)
                within_s = session.request_timeout_s - late_s
                answers = yield from obtain_all([cores[place] for place in rest], owner, within_s)
                refused = next((place for place, lease in zip(rest, answers, strict=True) if lease is None), None)
                had |= {place: lease for place, lease in zip(rest, answers, strict=True) if lease is not None}
                if refused is None:
                    multi = self._hand_over(session, had, made)
                    if multi is not None:
                        self._grip(owner, multi)
                        return multi
                elif waited < refused and asks < ASKS_MAX and not _is_over(clock, until):
                    self._drop_all([lease for place, lease in had.items() if place > refused])
                    had = {place: lease for place, lease in had.items() if place < refused}
                    answers = []
                    asks += 1
                    continue
                self._drop_all(had.values())
                had, answers = {}, []
                self._refused = cores[refused or 0]
                if _is_over(clock, until):
                    return None
                if refused is None:  # it was over by the time that all were there
                    continue
                if parts:
                    # It met others. Those who give back, wait and ask in step with it would do so for ever.
                    pauses = min(pauses + 1, PAUSES_MAX)
                    now = clock.now()
                    pause_s = min(PAUSE_MAX_S, clock.jitter() * (now - asked_at) * pauses)
                    yield session, session.pause(), pause_s if until is None else min(pause_s, max(0.0, until - now))
                else:
                    parts = [_Part(self._desk, core.name, self.terms) for core in self._cores]
                left_s = None if until is None else max(0.0, until - clock.now())
                self._refused = part = parts[refused]
                lease = yield from part.obtain(owner, left_s)
                if lease is None:
                    return None
                had = {refused: lease}
                waited, asks = refused, 0
                part.keep_place()
        except BaseException:
            self._drop_all([*had.values(), *answers])
            raise

    def _hand_over(self, session: Session, had: dict[int, _Had], made: dict[str, L]) -> M | None:
        """Give the caller all of it; None when one of them is over already.

        What is ``made`` stays there until it is given back: a Lease that is dropped before is left to its ttl.
        """
        if not session.give(*[each._hold for each in had.values()]):
            return None
        for each in had.values():
            made[each._name] = lease = self._make_lease(session, each._hold, each._name)
            watch(lease, each._hold, session, told)
        return self._make({name: made[name] for name in self.names})

    def _drop_all(self, had: Iterable[LeaseFacts | None]) -> None:
        """Give back what was had, in one call, without waiting for the answer."""
        holds = [lease._hold for lease in had if lease is not None]
        for hold in holds:
            hold.given = hold.orphan = False  # whatever was made of it, nobody has it in hand
        if holds:
            self._desk.session().keeper.give_back(*holds)

    def timed_out(self) -> LockTimeout:
        return self._refused.timed_out()

    def locked(self) -> bool:
        return all(core.locked() for core in self._cores)


def _is_over(clock: Clock, until: float | None) -> bool:
    return until is not None and clock.now() >= until


def _checked(names: Collection[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidOption(f"multilock takes several names, as in multilock([{names!r}]); lock() takes one")
    try:
        given = tuple(names)
    except TypeError:
        raise InvalidOption(f"multilock takes several names, as in multilock(['a', 'b']), not {names!r}") from None
    if not given:
        raise InvalidOption("multilock needs at least one name")
    if len(given) > NAMES_MAX:
        raise InvalidOption(f"multilock takes up to {NAMES_MAX} names, not {len(given)}")
    checked: dict[str, None] = {}
    for each in given:
        name = check_name(each)  # first: what is no name may have no hash either
        if name in checked:
            raise InvalidName(f"multilock was given {name!r} twice")
        checked[name] = None
    return tuple(checked)


class MultiLease(MultiLeaseFacts[Lease]):
    """Several names held by this process, for threads. ``leases[name]`` is the lease of each."""

    __slots__ = ()

    @property
    def lost(self) -> Lost:
        """Set when one of the leases is lost; can be waited for."""
        return Lost(*self.leases.values())

    def renew(self, ttl: Seconds | None = None) -> None:
        """Renew all of them now, in one call; see ``Lease.renew``."""
        run(self._renewing(ttl))

    def release(self) -> bool:
        """Give all of them back, in one call; see ``Lease.release``."""
        try:
            return run(self._releasing())
        except DibsError:
            raise
        except BaseException:  # Ctrl-C before the first step
            self._end()
            raise

    def __enter__(self) -> MultiLease:
        try:
            if not any(lease.held for lease in self.leases.values()):
                self.check()  # a block that is entered after the end would hold nothing
        except DibsError:
            raise
        except BaseException:  # Ctrl-C in front of the block
            self._end()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._session.end(self._releasing(), exc_type)
        except LeaseLost:
            if exc_type is None:
                raise
        except DibsError:
            raise
        except BaseException:  # as in ``release``
            self._end()
            raise


class MultiLock(Lockable[MultiLease]):
    """Several names, all or nothing. A description: acquiring it gives a ``MultiLease``.

    Asks for all in one round trip and holds nothing while it waits, so it deadlocks with nobody. Works like ``Lock``.
    """

    __slots__ = ()

    _core: MultiCore[MultiLease, Lease]

    @property
    def names(self) -> tuple[str, ...]:
        """What the lock is about, in the order given."""
        return self._core.names

    def __repr__(self) -> str:
        return f"<dibs.MultiLock of {len(self.names)} names>"
