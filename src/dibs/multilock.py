"""Several names, all or nothing.

All are asked for in one call. When one of them cannot be had, what was granted is given back at once, before anything
is waited for: whoever waits here holds nothing, so no set of multilocks can wait for each other in a circle. The wait
is for one name at a time, in line like everybody; when it has been had, the others are asked for again. Names are
asked for in the order of their code points, so that callers with the same names meet at the first.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.errors import InvalidName, InvalidOption, LeaseLost
from dibs.grips import Gripped
from dibs.lease import Lease, LeaseFacts, releasing_all
from dibs.lock import LockCore, obtain_all, wait_limit
from dibs.lockable import Lockable
from dibs.lost import Lost
from dibs.names import check_name
from dibs.steps import all_of, run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dibs.copies import LostMultiLease
    from dibs.desk import Desk
    from dibs.errors import LockTimeout
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

# As many names as fit into one call to the store.
NAMES_MAX = 1000

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


class MultiCore(Gripped[M], Generic[M, L]):
    """What a multilock does, in steps for either face."""

    __slots__ = ("_cores", "_desk", "_make", "_refused", "names")

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
        self._cores: list[LockCore[L]] = [LockCore(desk, name, terms, make_lease) for name in sorted(self.names)]
        self._refused: LockCore[L] = self._cores[0]

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
        had: dict[int, L] = {}
        answers: list[L | None] = []
        try:
            while True:
                rest = [place for place in range(len(self._cores)) if place not in had]
                answers = yield from obtain_all([self._cores[place] for place in rest], owner)
                refused = next((place for place, lease in zip(rest, answers, strict=True) if lease is None), None)
                had |= {place: lease for place, lease in zip(rest, answers, strict=True) if lease is not None}
                if refused is None:
                    break
                self._drop_all(had.values())
                had, answers = {}, []
                self._refused = self._cores[refused]
                left_s = None if until is None else until - clock.now()
                if left_s is not None and left_s <= 0:
                    return None
                lease = yield from self._refused.obtain(owner, left_s)
                if lease is None:
                    return None
                had = {refused: lease}
            by_name = {self._cores[place].name: lease for place, lease in had.items()}
            multi = self._make({name: by_name[name] for name in self.names})
            self._grip(owner, multi)
            return multi
        except BaseException:
            self._drop_all([*had.values(), *answers])
            raise

    def _drop_all(self, had: Iterable[L | None]) -> None:
        """Give back what was had, in one call, without waiting for the answer."""
        holds = [lease._hold for lease in had if lease is not None]
        for hold in holds:
            hold.given = False  # nobody has it in hand
        if holds:
            self._desk.session().keeper.give_back(*holds)

    def timed_out(self) -> LockTimeout:
        return self._refused.timed_out()

    def locked(self) -> bool:
        return all(core.locked() for core in self._cores)


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
        except Exception:
            raise
        except BaseException:  # Ctrl-C before the first step
            self._end()
            raise

    def __enter__(self) -> MultiLease:
        if not any(lease.held for lease in self.leases.values()):
            self.check()  # a block that is entered after the end would hold nothing
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._session.end(self._releasing(), exc_type)
        except LeaseLost:
            if exc_type is None:
                raise
        except Exception:
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
