"""The face for threads: the verbs of a ``Client``, thin over the steps that it shares with the face for tasks."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Literal, TypeVar
from dibs.lease import Lease
from dibs.lock import LockCore
from dibs.lockable import Lock
from dibs.names import check_name
from dibs.owners import this_thread
from dibs.steps import run
from dibs.threads import unattended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dibs.claims import Claims
    from dibs.desk import Desk, LeaseRecord
    from dibs.election import Election
    from dibs.history import HistoryRecord
    from dibs.multilock import MultiLock
    from dibs.names import Seconds
    from dibs.once import Once
    from dibs.once_keys import Key
    from dibs.pausing import Pause
    from dibs.queue import Queue
    from dibs.queue_records import QueueDepth
    from dibs.rwlock import RWLock
    from dibs.semaphore import Semaphore
    from dibs.store import Capabilities


F = TypeVar("F", bound="Callable[..., Any]")


class Client:
    """A connection to the place where leases are kept; made by ``dibs.connect``. Safe to share among threads."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def lock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> Lock:
        """Describe a lock on ``name``; nothing is sent.

        ttl: seconds a grant lasts without renewal (default: the client's). renew: keep it alive in the background.
        timeout: seconds to wait; None for ever, 0 asks once. reentrant: the same thread may acquire it again.
        min_hold: nobody gets the name before this many seconds after the grant, however early it is released.
        max_hold: it is not renewed beyond this many seconds, then it is lost. on_lost: called in a thread of its own
        when the lease is lost. on_busy: what the decorator does when the name cannot be had, "raise" or "skip".
        info: a small JSON object for whoever looks at the lease. Times are seconds or timedelta.

        Raises InvalidName and InvalidOption.
        """
        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return Lock(LockCore(self._desk, name, terms, Lease))

    def multilock(
        self,
        names: Collection[str],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> MultiLock:
        """Describe a lock on all of these names at once; nothing is sent. The other parameters are those of ``lock``.

        All or nothing: they are asked for in one round trip, and whoever waits holds none of them meanwhile, so that no
        set of multilocks can deadlock. ``timeout`` is for all of them together.

        Raises InvalidName for a name given twice, and InvalidOption.
        """
        from dibs.multilock import MultiCore, MultiLease, MultiLock

        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return MultiLock(MultiCore(self._desk, names, terms, Lease, MultiLease))

    def claims(
        self,
        source: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = False,
        margin: Seconds | None = None,
        max_tries: int | None = None,
        info: dict[str, Any] | None = None,
        mode: Literal["leases", "columns"] = "leases",
        table: str | None = None,
        key: str | None = None,
    ) -> Claims:
        """Describe claims on items of ``source``; nothing is sent.

        ttl: seconds until the common deadline of a batch. renew: move it on while the batch lasts, all of it at once.
        margin: the loop over a batch stops this many seconds before what is left can no longer be relied on (default:
        a tenth of the ttl). info: a JSON object that is shown with each item.

        max_tries: how often an item may be tried. A try counts when the item is claimed, so also that of a program that
        dies; ``done()`` forgets them, and what is given back unfinished has cost none. After the last in vain it is
        dead: nobody gets it, ``claims.dead()`` lists it, ``claims.revive()`` lets it be tried again. It costs a second
        call with each take. All who take from a source give the same number.

        mode: "leases" keeps each claim in a row of dibs's own. "columns" keeps it in the item's row, in PostgreSQL,
        MySQL, MariaDB and SQLite: in the columns dibs_token, dibs_claim and dibs_until of ``table`` (default: source;
        ``app.event`` with its schema), found by the column ``key`` (default: id), which has a unique index of its own.
        `dibs schema --claims TABLE` prints what adds them; without them, ``take`` raises SetupRequired. What has no row
        is ``batch.stale``, what a transaction has locked is busy. max_tries and info are not for it.

        Raises InvalidName and InvalidOption, and Unsupported where tries cannot be counted (``capabilities.tries``) or
        claims cannot be kept in columns (``capabilities.query``).
        """
        # Loaded by those who use it: `dibs run` stands in crontabs.
        from dibs.batch import Item
        from dibs.claiming import claims_core
        from dibs.claims import Batch, Claims

        given = (ttl, renew, margin, max_tries, info, mode, table, key)
        return Claims(claims_core(self._desk, source, Item, Batch, *given))

    def queue(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        max_hold: Seconds | None = None,
        max_tries: int | None = 10,
        priority: int = 0,
        group_limit: int | None = None,
        keep_results: Seconds = 0,
    ) -> Queue:
        """Describe a durable queue of work; nothing is sent.

        ttl: seconds after which the jobs of a worker that died are handed out again. renew: extend the claim on jobs
        while somebody has them. max_hold: extend it no more after this time, so that a handler that never returns loses
        its job. max_tries, priority: of jobs that are put without saying so themselves; None tries for ever. A job that
        has no tries left is dead: kept, with its last error. group_limit: how many jobs of a group may be worked at a
        time, by what takes through this object; 1 means one after the other in the order of their puts; give one limit
        everywhere. keep_results: seconds to keep done and cancelled jobs, with results; cancelled ones 60 at least.

        Raises InvalidName, InvalidOption, and Unsupported where the store keeps no queues.
        """
        from dibs.queue import Job, JobBatch, Queue
        from dibs.queue_core import QueueCore

        options = (ttl, renew, max_hold, max_tries, priority, group_limit, keep_results)
        return Queue(QueueCore(self._desk, name, *options, Job, JobBatch))

    def queues(self, prefix: str = "") -> list[QueueDepth]:
        """The queues of this namespace whose name starts with ``prefix`` and that have jobs, and how deep they are."""
        from dibs.queue_core import listing_queues

        return run(listing_queues(self._desk, prefix))

    def election(
        self,
        name: str,
        *,
        value: Any = None,
        ttl: Seconds | None = None,
        priority: int = 0,
        standby_max: int | None = None,
        standby_full: Literal["refuse", "replace"] = "refuse",
        info: dict[str, Any] | None = None,
    ) -> Election:
        """Describe an election, in which this client is a candidate or looks on; nothing is sent.

        value: what observers see of the leader, an address for example; anything that JSON can express. It is kept in
        the lease's info and shares its 4 KiB. ttl: seconds after which a leader that died is replaced. priority: 0
        stands in line with the others; -1 to -9 is a reserve, which leads only when no candidate of a higher priority
        has come forward, 1.5 s later for each step. standby_max: do not join where so many candidates (0 to 1000)
        stand by already; only those count that give a standby_max, too. standby_full: what to do there: "refuse", or
        "replace" the one that has stood by the longest, whose campaign ends. info: more for whoever looks at the lease.

        Raises InvalidName and InvalidOption.
        """
        # Loaded by those who use it: `dibs run` stands in crontabs.
        from dibs.campaign import election_core
        from dibs.election import Election, Term

        return Election(election_core(self._desk, name, Term, value, ttl, priority, standby_max, standby_full, info))

    def semaphore(
        self,
        name: str,
        limit: int,
        *,
        weight: int = 1,
        resize: bool = False,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> Semaphore:
        """Describe a semaphore: at most ``limit`` permits of ``name`` are held at a time. Nothing is sent.

        weight: how many permits each acquire takes, all or nothing. resize: make ``limit`` the number that the store
        keeps from now on; without it, LimitMismatch is raised by ``acquire`` when the store keeps another one. It
        holds as soon as an ``acquire`` has asked the store, also where that is refused or waits. A smaller limit takes
        nothing from those who hold; nobody is granted any until it suffices. reentrant: nested use by one thread takes
        no second permit. The other parameters are those of ``lock``.

        Raises InvalidName, InvalidOption, and Unsupported where the store has only locks.
        """
        from dibs.semaphore import Semaphore, SemaphoreCore

        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return Semaphore(SemaphoreCore(self._desk, name, limit, weight, resize, terms, Lease))

    def rwlock(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        timeout: Seconds | None = None,
        reentrant: bool = False,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> RWLock:
        """Describe a lock for many readers or one writer of ``name``; nothing is sent. Parameters as in ``lock``.

        Raises InvalidName, InvalidOption, and Unsupported where the store has only locks.
        """
        from dibs.rwlock import RWCore, RWLock

        terms = self._desk.terms(ttl, renew, timeout, reentrant, min_hold, max_hold, on_lost, on_busy, info)
        return RWLock(RWCore(self._desk, name, terms, Lease))

    def once(
        self,
        name: str,
        key: Key | None = None,
        *,
        keep: Seconds,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> Once:
        """Describe work that is to be done at most once in ``keep`` seconds for this key; nothing is sent.

        At most one *successful* run per key in ``keep`` seconds, counted from its end by the store's clock, on all
        machines together. A run that fails or crashes may be tried again: at once, or after its ttl. A crash after the
        work was done and before the store was told may let it be done again.

        key: a str, an int or a date (2026-11-21); with ``name`` it makes the lock ``name/key`` that a run holds.
        keep: at most the store's longest ttl. keep_result: keep the result as well, JSON that shares the 4 KiB of
        ``info``. timeout: how long to wait while somebody else is at it; then LockTimeout, or with on_busy="skip" a
        run that is false. ttl, max_hold, on_lost, info: as for ``lock``.

        Raises InvalidName and InvalidOption.
        """
        # Loaded by those who use it: `dibs run` stands in crontabs.
        from dibs.once import Once, OnceCore, OnceRun, once_options

        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        return Once(OnceCore(self._desk, name, key, options, Lease, OnceRun))

    def once_per(
        self,
        name: str,
        *,
        keep: Seconds,
        key: Callable[..., Key] | None = None,
        keep_result: bool = True,
        ttl: Seconds | None = None,
        timeout: Seconds | None = None,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        on_busy: Literal["raise", "skip"] = "raise",
        info: dict[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """Decorate a function: each call is ``once(name, its key).run(function, …)``.

        key: a function of the same arguments that returns the key. By default it is made of the arguments, each a str,
        an int or a date, in the order of the function's parameters, defaults filled in: joined by ``/``, with ``/`` and
        ``%`` inside them as ``%2F`` and ``%25``. A function without parameters has no key. Other arguments, and keys
        that make no name, are InvalidName when it is called. The other parameters are those of ``once``.
        """
        from dibs.once import Once, OnceCore, OnceRun, once_options, once_per

        options = once_options(self._desk, keep, keep_result, ttl, timeout, max_hold, on_lost, on_busy, info)
        check_name(name)
        return once_per(lambda key: Once(OnceCore(self._desk, name, key, options, Lease, OnceRun)), key)

    def adopt(
        self,
        state: dict[str, Any],
        *,
        ttl: Seconds | None = None,
        renew: bool = True,
        min_hold: Seconds = 0,
        max_hold: Seconds | None = None,
        on_lost: Callable[[], object] | None = None,
        info: dict[str, Any] | None = None,
    ) -> Lease:
        """Take over a lease that another process exported, from the state that ``lease.export()`` returned there.

        The lease, or the permit with its slot, is this process's then, under a claim id of its own and a greater
        fencing token; at no moment in between was it free. It is a new grant: the parameters, those of ``lock``, count
        from now, and of the old lease only the info stays, unless another is given.

        Raises LeaseLost when there is nothing to adopt: it expired, was adopted before, was broken, or is pinned
        (``guard``) in a transaction that has not ended; when that has, it can be adopted until its ttl is over.
        InvalidOption, before anything is sent, for what is no such state, or one from another store or namespace.
        StoreUnavailable when the store gives no answer: what was exported ends by its ttl, unless it is adopted yet.
        """
        from dibs.handover import adopting, read_state

        given = read_state(self._desk, state)
        info = given.info if info is None else info
        terms = self._desk.terms(ttl, renew, None, False, min_hold, max_hold, on_lost, "raise", info)
        return run(adopting(self._desk, given, terms, this_thread(), Lease))

    def leases(self, prefix: str = "") -> list[LeaseRecord]:
        """The leases in force in this namespace whose name starts with ``prefix``, by name."""
        return run(self._desk.leases(prefix))

    def holder(self, name: str) -> LeaseRecord | None:
        """Who holds ``name`` now, or None; of several (of a semaphore, readers) the one with the smallest slot."""
        return run(self._desk.holder(name))

    def break_lease(self, name: str, *, fencing_token: int, now: bool = False) -> bool:
        """Take a lease from its holder, if it is still the one with this token; False when it is not.

        It cannot be renewed any more, its holder hears of the loss at the next renewal, and the name is free when the
        lease would have expired. With ``now=True`` the name is free at once: for up to a ttl the old holder may still
        believe in its lease, and only fencing tokens keep the two apart. A lease that is pinned (``lease.guard``) is
        free when that transaction has ended, at the earliest.
        """
        return run(self._desk.breaking(name, fencing_token, now))

    def purge(self, older_than: Seconds) -> int:
        """Delete the rows of this namespace's names that have been free for ``older_than`` seconds; return how many.

        Tidiness only: a dead holder's lease ends by itself. The floor under the fencing tokens is kept.
        """
        return run(self._desk.purging(older_than))

    def pause(self, name: str, note: str | None = None, *, ttl: Seconds | None = None, by: str | None = None) -> Pause:
        """Stop new grants of ``name`` for every client of this namespace; a ``*`` at its end means all that begin so.

        Holders go on: they renew and release. A caller that asks once is refused, and waiters go on waiting; they are
        told who paused it, and ``note``. It ends by itself after ``ttl`` seconds (from 2 to the store's longest ttl;
        default: an hour) or with ``resume``. Pausing again replaces note and end. by: who is shown to have paused it
        (default: user@host).

        It returns when the pause is in force: after a good second, in which every client looks. A request that was on
        its way at that moment, for at most its request time-out, may be granted yet. Raises InvalidName,
        InvalidOption, and Unsupported where the store cannot keep it (``capabilities.pause``).
        """
        from dibs.pausing import pausing

        return run(pausing(self._desk, name, note, ttl, by))

    def resume(self, name: str) -> bool:
        """End the pause of exactly this ``name`` or ``prefix*``; False when there was none.

        Other clients notice within half a second, and their waiters ask within a second more.
        """
        from dibs.pausing import resuming

        return run(resuming(self._desk, name))

    def pauses(self) -> list[Pause]:
        """The pauses in force in this namespace, by name."""
        from dibs.pausing import listing

        return run(listing(self._desk))

    def setup(self, *, history: int | None = None) -> None:
        """Make the tables; harmless when they exist. Raises SetupRequired when the login may not.

        history: from now on the store writes down who had each name, and keeps the last so many grants of each
        (``history(name)``); 0 switches that off and forgets it, None leaves it as it is. Unsupported where the store
        cannot (``capabilities.history``).
        """
        from dibs.history import keeping

        run(self._desk.setting_up() if history is None else keeping(self._desk, history))

    def history(self, name: str, limit: int = 100) -> list[HistoryRecord]:
        """Who had ``name`` and when, newest first: up to ``limit`` grants, whichever client made them.

        The store writes them down while it is told to (``setup(history=100)``). Raises SetupRequired when it was not,
        and Unsupported where it cannot (``capabilities.history``).
        """
        from dibs.history import reading

        return run(reading(self._desk, name, limit))

    def ping(self) -> float:
        """Reach the store and return the seconds it took; raises StoreUnavailable or SetupRequired."""
        return run(self._desk.pinging())

    @property
    def capabilities(self) -> Capabilities:
        """What this store really promises, some of it read from the server's settings; connects when needed."""
        return run(self._desk.capabilities())

    def close(self) -> None:
        """Give back what is held, refuse waiters, close the connections. May be called twice."""
        run(self._desk.closing())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        if exc_type is GeneratorExit and self._desk.is_busy_here():
            unattended(self.close)
        else:
            self.close()

    def __repr__(self) -> str:
        return f"<dibs.Client {self._desk.address.shown}>"
