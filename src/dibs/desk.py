"""What both faces of a client share: its address, its options, its session, and what it does, in steps.

A desk makes its session at the first use and a new one in a forked child. The inherited session is kept there
untouched: its connections belong to the parent, and closing them from the child would harm it.
"""

from __future__ import annotations

import atexit
import os
import weakref
from functools import cache

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar
from dibs.clock import boot_now
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.names import check_flag, check_info, check_name, check_namespace, check_seconds, info_in, lasting, people_call
from dibs.pauses import Pauses
from dibs.session import PATIENCE_S, REQUEST_TIMEOUT_S, Session
from dibs.steps import acting
from dibs.terms import make_terms

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dibs.clock import Clock, Deadline
    from dibs.names import Seconds
    from dibs.steps import Steps
    from dibs.store import Capabilities, Finding, Store, StoreAddress, StoredLease
    from dibs.terms import Terms

T = TypeVar("T")

# Who wants a name takes it over when its lease has ended by the store's clock; the other way: see dibs.observing.
EXPIRY = "expiry"
TTL_DEFAULT_S = 30.0
# Different terms that a client remembers having checked.
TERMS_MAX = 256
REQUEST_TIMEOUT_MAX_S = 300.0
# No name is longer than 255 bytes, so all that begin with a prefix sort before the prefix and this, by code point.
LAST = "\U0010ffff" * 64


class LeaseRecord(NamedTuple):
    """A lease in force, as the store shows it to anybody who may read it.

    ``holder`` is host/pid/client; ``expires_in`` the seconds, by the store's clock when it was asked, after which the
    lease ends unless it is renewed; ``waiting`` how many processes wait in line for it; ``take`` how many of the name's
    permits it has (a writer: all, 2147483647). ``info`` is None, too, where somebody wrote there what dibs does not.
    """

    name: str
    slot: int
    holder: str
    fencing_token: int
    acquired_at: datetime
    expires_at: datetime
    expires_in: float
    info: dict[str, Any] | None
    waiting: int
    take: int = 1

    def __str__(self) -> str:
        return (
            f"{self.name!r} is held by {people_call(self.holder)} (token {self.fencing_token}), "
            f"for {lasting(self.expires_in)} more unless renewed"
        )


class Desk:
    def __init__(
        self,
        address: StoreAddress,
        *,
        namespace: str,
        ttl: Seconds | None,
        info: dict[str, Any] | None,
        request_timeout: Seconds,
        patience: Seconds,
        require: str = "",
        lock_order_warnings: bool = True,
        takeover: str = EXPIRY,
        clock: Clock | None = None,
    ) -> None:
        if require:
            from dibs.promises import requiring

            address = requiring(address, require)
        if takeover != EXPIRY:
            from dibs.observing import observing

            address = observing(address, takeover, boot_now if clock is None else clock.now)
        limits = address.capabilities
        self.address = address
        self.namespace = check_namespace(namespace)
        if ttl is None:
            ttl = min(TTL_DEFAULT_S, limits.ttl_max_s)
        self.ttl = check_seconds("ttl", ttl, least=limits.ttl_min_s, most=limits.ttl_max_s)
        self.info = check_info(info)
        self.request_timeout_s = check_seconds(
            "request_timeout", request_timeout, least=0.05, most=REQUEST_TIMEOUT_MAX_S
        )
        self.patience_s = check_seconds("patience", patience, most=3600.0)
        self.lock_order_warnings = check_flag("lock_order_warnings", lock_order_warnings)
        self.key_prefix = f"{self.namespace}:"
        self._terms: dict[tuple[object, ...], Terms] = {}
        #: Those of a lock of which nothing but the name is given.
        self._plain = make_terms(limits, self.ttl, self.info, None, True, None, False, 0, None, None, "raise", None)
        self._clock = clock
        #: By process: after a fork the parent's session stays here, so that nothing of it is ever closed by the child.
        self._sessions: dict[int, Session] = {}
        self.closed = False

    def __reduce__(self) -> NoReturn:
        # Asked for by whoever pickles a client, a lock or a queue, to give it to another process.
        raise TypeError("what belongs to a dibs client cannot be pickled: call dibs.connect() in the other process")

    def warn_no_more(self) -> None:
        """Of best effort, for the command line: a process each time, whose words cron mails. Doctor says it all."""
        _WARNED.add(self.address.capabilities.store)

    def session(self) -> Session:
        """The session of this process."""
        pid = os.getpid()
        session = self._sessions.get(pid)
        if session is not None:
            return session
        if self.closed:
            raise StoreUnavailable("this dibs client is closed", maybe_applied=False)
        limits = self.address.capabilities
        new = Session(
            self.address,
            request_timeout_s=self.request_timeout_s,
            patience_s=self.patience_s,
            clock=self._clock,
            lock_order_warnings=self.lock_order_warnings,
            # (Where names have permits, pauses are slots of one name, also for clients that watch.)
            pauses=Pauses(self.namespace, permits=limits.permits or self.address.observed) if limits.pause else None,
        )
        # Of several threads that come here at once, one wins; no lock is needed, which a fork could leave locked.
        session = self._sessions.setdefault(pid, new)
        if session is not new:
            return session
        _close_when_exiting(session)
        _warn_of_best_effort(self.address)
        return session

    def terms(
        self,
        ttl: Seconds | None,
        renew: bool,
        timeout: Seconds | None,
        reentrant: bool,
        min_hold: Seconds,
        max_hold: Seconds | None,
        on_lost: Callable[[], object] | None,
        on_busy: str,
        info: dict[str, Any] | None,
    ) -> Terms:
        """The checked terms; those that programs use again and again are remembered, and found at once if plain."""
        if (
            ttl is None
            and timeout is None
            and max_hold is None
            and on_lost is None
            and info is None
            and renew is True
            and reentrant is False
            and on_busy == "raise"
            and type(min_hold) is int
            and not min_hold
        ):
            return self._plain
        # Types belong to it, since True == 1 == 1.0 and only one of them is a flag, or no number of seconds.
        given = (ttl, renew, timeout, reentrant, min_hold, max_hold, on_busy,
                 type(ttl), type(timeout), type(min_hold), type(max_hold))  # fmt: skip
        plain = on_lost is None and info is None and type(renew) is type(reentrant) is bool
        if plain:
            try:
                known = self._terms.get(given)
            except TypeError:  # something that cannot be hashed is not an option either: make_terms says so
                known, plain = None, False
            if known is not None:
                return known
        terms = make_terms(
            self.address.capabilities,
            self.ttl,
            self.info,
            ttl,
            renew,
            timeout,
            reentrant,
            min_hold,
            max_hold,
            on_lost,
            on_busy,
            info,
        )
        if plain and len(self._terms) < TERMS_MAX:
            self._terms[given] = terms
        return terms

    def is_busy_here(self) -> bool:
        """Whether this thread may be in the midst of the session's own work; see ``Session.is_busy_here``."""
        session = self._sessions.get(os.getpid())
        return session is not None and session.is_busy_here()

    def closing(self) -> Steps[None]:
        """Give back what is held, refuse waiters, end the threads and connections."""
        self.closed = True
        session = self._sessions.get(os.getpid())
        if session is None:
            return
        try:
            for ask in session.close():
                yield session, ask, session.request_timeout_s
        except BaseException:
            session.close()  # does no harm twice, and a Ctrl-C may have come in front of its first line
            raise
        finally:
            ends = session.shut()
        for ask in ends:
            yield session, ask, session.request_timeout_s

    def _acting(self, act: Callable[[Store, Deadline], T]) -> Steps[T]:
        return (yield from acting(self.session(), act))

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, prefix: str) -> Steps[list[LeaseRecord]]:
        if not isinstance(prefix, str):
            raise InvalidOption(f"prefix is a str, not {type(prefix).__name__}")
        if prefix:
            check_name(prefix)
        key = self.key_prefix + prefix
        rows = yield from self._acting(lambda store, deadline: store.leases(key, key + LAST, deadline))
        return [self._record(row) for row in rows]

    def holder(self, name: str) -> Steps[LeaseRecord | None]:
        return next(iter((yield from self.leases_of(name))), None)

    def leases_of(self, name: str) -> Steps[list[LeaseRecord]]:
        """All who hold one name, by slot."""
        key = self.key_prefix + check_name(name)
        # A name has no control characters, so nothing lies between it and this.
        rows = yield from self._acting(lambda store, deadline: store.leases(key, key + "\x01", deadline))
        return [self._record(row) for row in rows]

    def _record(self, row: StoredLease) -> LeaseRecord:
        from datetime import datetime, timezone

        return LeaseRecord(
            row.name.partition(":")[2],
            row.slot,
            row.holder,
            row.fencing_token,
            datetime.fromtimestamp(row.acquired_at, timezone.utc),
            datetime.fromtimestamp(row.expires_at, timezone.utc),
            row.expires_in,
            info_in(row.info),
            row.waiting,
            row.take,
        )

    def breaking(self, name: str, fencing_token: int, now: bool) -> Steps[bool]:
        key = self.key_prefix + check_name(name)
        if isinstance(fencing_token, bool) or not isinstance(fencing_token, int):
            raise InvalidOption(f"fencing_token is the int shown by holder() or `dibs show`, not {fencing_token!r}")
        check_flag("now", now)
        if not 0 < fencing_token < 2**63:
            return False  # no lease has such a token, and not every store can be asked for one
        return (yield from self._acting(lambda store, deadline: store.break_lease(key, fencing_token, now, deadline)))

    def purging(self, older_than: Seconds) -> Steps[int]:
        seconds = check_seconds("older_than", older_than)
        # The names of its users, and those that dibs keeps beside them ('~' is in no namespace).
        parts = [(start, start + LAST) for start in (self.key_prefix, f"{self.namespace}~")]
        return (
            yield from self._acting(
                lambda store, deadline: sum(store.purge(*part, seconds, deadline) for part in parts),
            )
        )

    def setting_up(self) -> Steps[None]:
        yield from self._acting(lambda store, deadline: store.setup(deadline))

    def checking(self) -> Steps[list[Finding]]:
        return (yield from self._acting(lambda store, deadline: store.check(deadline)))

    def pinging(self) -> Steps[float]:
        session = self.session()
        before = session.clock.now()
        yield from self._acting(lambda store, deadline: store.act((), deadline))
        return session.clock.now() - before

    def capabilities(self) -> Steps[Capabilities]:
        return (yield from self._acting(_capabilities))


def _capabilities(store: Store, deadline: Deadline) -> Capabilities:
    store.act((), deadline)  # connects, so that what a setting decides has been read
    return store.capabilities


# Stores of which this process has been warned. (Module-level, since that is once a process, not once a client.)
_WARNED: set[str] = set()


def _warn_of_best_effort(address: StoreAddress) -> None:
    """Say in the log, once a process, that a store promises no more than it can: two holders at once are possible."""
    offered = address.capabilities
    if offered.fencing_token.startswith("best effort") and offered.store not in _WARNED:
        _WARNED.add(offered.store)
        import logging

        logging.getLogger("dibs").warning(
            "locks on %s (%s) are best effort: leases survive a restart: %s; fencing tokens: %s. "
            "`dibs doctor` says what its settings add to that",
            offered.store,
            address.shown,
            offered.survives_restart,
            offered.fencing_token,
        )


#: Of this process, and what is left of its parent's. (Not a WeakSet, which may not be added to while it is read.)
_OPENED: set[weakref.ref[Session]] = set()


def _close_when_exiting(session: Session) -> None:
    """What it still holds when the interpreter ends is given back; a process that is killed leaves that to the ttl."""
    _OPENED.add(weakref.ref(session, _OPENED.discard))
    _register()


@cache  # once: a registration stays when its session is gone
def _register() -> None:
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    for reference in tuple(_OPENED):
        session = reference()
        if session is None or session.pid != os.getpid() or session.closed:
            continue
        try:
            for ask in session.close():
                session.wait(ask, session.request_timeout_s)
            for ask in session.shut():
                session.wait(ask, session.request_timeout_s)
        except (KeyboardInterrupt, RuntimeError):
            # Somebody is in a hurry, or a thread was needed when none can be started any more (the store is away): what
            # was not given back ends by its ttl.
            pass


DEFAULTS: dict[str, Any] = {
    "namespace": "default",
    "ttl": None,
    "request_timeout": REQUEST_TIMEOUT_S,
    "patience": PATIENCE_S,
    "require": "",
    "lock_order_warnings": True,
    "takeover": EXPIRY,
}
