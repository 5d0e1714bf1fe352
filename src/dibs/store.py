"""The contract between dibs and a place where leases are kept.

A store *tries*. It never waits for a name, retries, logs, starts threads or reads a clock of this process; it is given
a vector of requests and brings one outcome for each. Safety rests on one row per permit and one conditional write::

    SET claim_id, fencing_token = fencing_token + 1, expires_at = now + ttl   WHERE free or expired or already mine

Every request is atomic by itself and repeating it is safe, because it carries the ``claim_id`` its client chose: an
acquire for a claim that holds is granted again with the same token, a renewal or release for a claim that does not is
``Gone``. An exception concerns the whole call, and ``StoreUnavailable.maybe_applied`` says whether anything may have
been done. Where a store is several servers that each keep some names, and one of them is away, that is the outcome of
those requests alone that went there (``PartUnavailable``).

The *waiting line* decides who is granted a free name, never who holds one. An acquire that carries ``wake`` and is not
granted is put in line and told its ticket. While live waiters are ahead, a free name is refused to everybody behind
them. A waiter ahead counts as alive until the name has been free for ``LINE_GRACE_S``; after that only if it has asked
within the last ``LINE_GRACE_S``. So any number of waiters that died while the name was held delay the line by
``LINE_GRACE_S`` together, and nobody has to write heartbeats meanwhile. A grant removes the line up to the granted
ticket.

A name is a lock, or it is a *pool* that has so many permits (``Acquire.permits``), of which a claim takes
``Acquire.take``, all or nothing, and is given a number of its own among those that hold (``Granted.slot``). A claim on
a pool is granted when what is left after the live waiters ahead suffices for it; a waiter counts as alive there if it
has asked within the last ``LINE_GRACE_S``, and a grant leaves those ahead in line who count as alive. How many permits
a name has is kept by the store: whoever asks for another number is told ``Mismatch``, unless it says ``resize``; fewer
evict nobody.

A lease changes hands without being free in between by a ``Transfer``: one conditional write puts another claim, under
the next token, in the place of the one that holds. So a process can give what it holds to a named successor, and
neither a newcomer nor the line gets in between.

One store object is used by one thread at a time; a session opens one per lane.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple, Protocol
from dibs.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dibs.clock import Deadline

# How long a free name is kept for waiters ahead in line that do not ask: longer than the slowest poll of one that is
# alive (dibs.waiting.POLL_MAX_S). A dead one delays the line by this and one request, under the promised 2 s.
LINE_GRACE_S = 1.2
# A release, or a grant that leaves permits, tells so many in line at most; whoever of them is granted tells more.
TOLD_MAX = 64
# The ticket of somebody who did not line up: behind everybody.
LAST_TICKET = 2**63 - 1
# The ticket of a waiter, and the slot of a claim, that was never told it: what the claim has. (Real ones begin with 1.)
ANY_TICKET = ANY_SLOT = 0
# The most permits a name may have.
PERMITS_MAX = 2**31 - 1
# A name that only the pin of a transaction may keep (see Pin) is worth asking for again after this long.
PIN_LOOK_S = 0.1
# Stands in the name of a lease that is kept in the columns of a user's own table (see dibs.columns), and in no other.
ROW_MARK = "\x1f"
# How long a lease that may be pinned is kept when it is given back: not at all, but then as one that has expired.
PIN_KEEP_S = 1e-6


class Acquire(NamedTuple):
    """Make ``claim_id`` the holder of ``name`` for ``ttl`` seconds if it is free, expired, or already this claim's.

    Repeated for a claim that holds, it lasts ``ttl`` seconds from the repetition at least, and never less than before.

    ``holder`` and ``info`` are for people. ``wake`` asks for a place in line and says where a signal reaches the
    waiter (see Watch); ``ticket`` is the place an earlier answer gave, to this claim or to one of the same caller that
    was granted there and given back. ``permits`` is how many the name has in all, or 0 for a lock, ``take`` how many of
    them this claim takes (in line: what it asked for last); ``resize`` makes ``permits`` its number from now on.
    """

    name: str
    claim_id: str
    ttl: float
    holder: str
    info: str | None = None
    wake: str | None = None
    ticket: int | None = None
    permits: int = 0
    take: int = 1
    resize: bool = False


class Renew(NamedTuple):
    """Let the lease of ``claim_id`` last until ``ttl`` seconds from now at least, if it has not ended.

    A renewal never shortens a lease: of two that overtake each other, the longer counts, whichever comes last.
    """

    name: str
    claim_id: str
    ttl: float
    slot: int = 1


class Release(NamedTuple):
    """End the lease of ``claim_id`` now, and its place in line if ``ticket`` is given; wake who is next in line.

    Who was never told its slot or ticket gives ``ANY_SLOT`` and ``ANY_TICKET``.

    With ``keep``, nobody gets the name for that many seconds yet, the releaser included. Meanwhile the name is shown
    with its holder and token as before, and with ``info`` if that is given. A release that keeps is as durable as a
    grant: what was kept and told so is not forgotten in a crash. (A plain one that is forgotten ends by its ttl.)
    """

    name: str
    claim_id: str
    slot: int = 1
    ticket: int | None = None
    keep: float = 0.0
    info: str | None = None


class Transfer(NamedTuple):
    """Make ``claim_id`` the holder of what ``from_claim`` holds, for ``ttl`` seconds, under a new, greater token.

    Granted when ``from_claim`` holds it, and then that claim is over: its renewals and releases are Gone. Gone when it
    does not hold it (any more), or while it is pinned (see Pin), and then nothing is changed. Repeated for a claim that
    holds, it is granted again with the same token and lasts ``ttl`` seconds from the repetition at least.

    It takes no free name and passes nobody in line: those who wait go on waiting for the same lease. Whoever sends it
    answers for it that nobody trusts ``from_claim`` any more. ``slot`` is that claim's, and stays, as does how many
    permits it takes; ``permits`` is as in its acquire, of which only counts whether it is 0, for a lock.
    """

    name: str
    claim_id: str
    ttl: float
    holder: str
    from_claim: str
    info: str | None = None
    slot: int = 1
    permits: int = 0


Request = Acquire | Renew | Release | Transfer


class Granted(NamedTuple):
    """The claim holds the name. ``acquired_at`` is Unix time by the store's clock, for people.

    ``slot`` is the smallest number, from 1, that no other claim which holds the name has; it is kept until the end.
    """

    fencing_token: int
    acquired_at: float
    slot: int = 1


class Held(NamedTuple):
    """Not now. ``holder`` is None when the name is free but kept for others in line.

    ``free_in`` is the number of seconds after which the name is free, or the line moves, unless something happens
    first. 0 means ask again; with a holder, that its lease is over, and that an open transaction keeps the name for it
    (see Pin). ``ticket`` is the asker's place in line, ``ahead`` whether somebody stands before it. A waiter asks again
    after ``again_in`` seconds: a release that was under way as it took its place may have found nobody to tell.
    ``paused`` is never set by a store: the session says so what an operator has said (see dibs.pauses).
    """

    holder: str | None
    fencing_token: int
    acquired_at: float
    free_in: float
    ticket: int | None = None
    ahead: bool = False
    paused: str | None = None
    again_in: float = float("inf")


class Mismatch(NamedTuple):
    """The name has another number of permits than was asked for (0: it is a lock); nothing was changed."""

    permits: int


class Renewed(NamedTuple):
    """The lease goes on until ``expires_at`` (Unix time by the store's clock, for people)."""

    expires_at: float


class Released(NamedTuple):
    """The lease was this claim's and is over."""

    was_held: bool = True


class Gone(NamedTuple):
    """There was no such lease any more; nothing was changed."""

    was_held: bool = False


RELEASED = Released()
GONE = Gone()

Outcome = Granted | Held | Mismatch | Renewed | Released | Gone


class StoredLease(NamedTuple):
    """A lease as the store shows it. Times are Unix seconds for people; ``expires_in`` is by the store's clock."""

    name: str
    slot: int
    holder: str
    fencing_token: int
    acquired_at: float
    expires_at: float
    expires_in: float
    info: str | None
    waiting: int
    take: int = 1


class StoredGrant(NamedTuple):
    """A grant that was written down. ``ended_at`` (Unix time) and ``ending`` are None while it is in force."""

    slot: int
    holder: str
    fencing_token: int
    acquired_at: float
    ended_at: float | None
    ending: str | None
    info: str | None


class Capabilities(NamedTuple):
    """What a store really offers, some of it read from the server's settings when it connects."""

    store: str
    survives_restart: str
    fencing_token: str
    clock: str
    waiting_line: str
    signal: str
    queue: bool
    # An acknowledged grant outlives a crash of the store and a power cut (on SQLite: its token is never repeated).
    durable: bool
    ttl_min_s: float
    ttl_max_s: float
    # How far around an expiry the store's answer may go either way.
    resolution_s: float
    # Trust ends this long before the store's expiry, on top of the allowance for clock rates.
    margin_s: float
    # A name may have several permits: semaphores, readers and writers.
    permits: bool = False
    # A ring of waiters is told. For that leases are listed by prefix several times a second.
    deadlocks: bool = True
    # What was kept is kept for hours, and found without a look at every name: new grants can be paused.
    pause: bool = False
    # Who held a name, and when, can be written down by the store.
    history: bool = False
    # A lease can be pinned inside a transaction of the caller's own (see Pin).
    guard: bool = False
    # How often an item was tried is kept for days, and found by its name: items of claims can be dead.
    tries: bool = False
    # Items are found by a query of the caller's own, and may keep their claims themselves (dibs.queries, dibs.columns).
    query: bool = False
    # Leases end on a clock that is never set: what keeps the time in order does not step it.
    steady: bool = False
    # Who wants a lease can see whether it was renewed, and end it if it was not (dibs.abilities).
    observe: bool = False


class Pin(NamedTuple):
    """How a lease is pinned inside a transaction on somebody else's connection to the same database.

    As long as that transaction lasts, a store that can pin (``Capabilities.guard``) grants the name's slot to nobody
    but its claim, unless the lease was ended by a plain release. That a lease has expired, or was broken, is not
    enough; neither is a release that keeps it for however short (``PIN_KEEP_S``). Others are told Held, and ask again
    after ``PIN_LOOK_S``.
    """

    #: A statement for that connection, without parameters. Its rows are given to ``Store.pinned``.
    lock: str
    #: ``lock`` takes the lock without which nobody can write the lease, and brings a row if the lease is in force.
    decides: bool = False
    #: Makes a statement that gives the lease back inside that transaction, and keeps it for so many seconds (or not, if
    #: there are none); None where the store does it while it is pinned.
    release: Callable[[float], str] | None = None


class Finding(NamedTuple):
    """One line of ``dibs doctor``: a promise, whether the store keeps it, and what to change if not."""

    promise: str
    kept: bool
    detail: str


class PartUnavailable(StoreUnavailable):
    """As the outcome of one request: of the servers that each keep some names, the one that keeps its name is away.

    It says nothing of the others, and is asked for again.
    """


class TakesNoWrites(StoreUnavailable):
    """The server takes no writes: it makes way for another. (Or it always was the wrong one, as the lane then says.)"""


class StoreBusy(Exception):
    """The same call is likely to succeed in a moment. Never leaves the lane.

    Nothing was applied, unless ``maybe_applied``: then some of its requests may have been, as by a call without answer.
    """

    maybe_applied = False


class RowBusy(StoreBusy):
    """Of one request, as its outcome: it alone was not carried out, as a transaction has locked a row that it needs.

    That is one of somebody else's, who may keep it open for long: the request is made again, and nobody else waits.
    """


class Watch(Protocol):
    """Hints that names may be free: late, wrong or lost (but by no look for others), as nothing rests on them."""

    #: How often looking is worth it where there is nothing to wait on; None where ``fileno`` becomes readable.
    interval_s: float | None

    def fileno(self) -> int | None: ...
    def changed(self, names: Collection[str]) -> Collection[str]:
        """Which of these names may be worth asking for now. Does not block."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """One connection to one place where leases are kept."""

    @property
    def capabilities(self) -> Capabilities: ...

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        """Try every request, each by itself; bring their outcomes in the order of the requests.

        Requests for one name are tried in the order given. The outcome of one may be an exception: for a ROW_MARK name
        RowBusy, PartUnavailable where its name's server is away, and SetupRequired for what is not to be handed out.
        Raises StoreUnavailable, StoreBusy or SetupRequired for the call as a whole; a store that ran into its deadline
        drops its connection, so that a late reply cannot be taken for the answer to something else.
        """
        ...

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        """The leases in force with ``first <= name < before``, by name; names are compared by code point."""
        ...

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        """Take the lease with this token from its holder; False when there is none.

        It cannot be renewed any more. The name is free at the lease's expiry, when its holder has certainly ceased
        to trust it; with ``now``, at once.
        """
        ...

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        """Delete what was free for ``older_than`` seconds, keep the floor under its tokens, return how many.

        Of the names with ``first <= name < before`` only: others may keep theirs for longer.
        """
        ...

    def setup(self, deadline: Deadline) -> None:
        """Make what the store needs; harmless when it is there, also when several do it at once."""
        ...

    def schema(self) -> str:
        """What ``setup`` would run, to be read or given to somebody with the right to run it."""
        ...

    def check(self, deadline: Deadline) -> list[Finding]:
        """Read the live settings and say which promises hold."""
        ...

    def watch(self, address: str, deadline: Deadline) -> Watch | None:
        """Open a source of hints for waiters that gave ``address`` as ``Acquire.wake``; None where there is none."""
        ...

    def close(self) -> None: ...


class StoreAddress(NamedTuple):
    """A place where leases are kept, and how to open a store there. ``shown`` is safe to print."""

    shown: str
    capabilities: Capabilities
    open: Callable[[], Store]
    #: Leases there are taken over only by who has watched them (dibs.observing).
    observed: bool = False
    #: A call that carries many acquires of permits of one name takes little longer than one that carries a single one.
    together: bool = False
    #: A server does the work of a call, and this process can do something else meanwhile.
    served: bool = False
