"""Claims: as many of these items as are free, for a time that ends for all of them together.

A *claim* on an item is a lock on ``source/key`` that is asked for once; nothing waits. The locks of a whole list travel
to the store in one call, and those that were granted are a *batch* (``dibs.batch``). It is for work that many programs
find in the same place, a table nobody may alter or a folder of files, where each item is to be worked by one of them:
claim first, then look again whether it is still due (``verify``), because somebody may have finished it between the
look and the claim.
"""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dibs.batch import BatchFacts, Ends, Item
from dibs.errors import InvalidName, InvalidOption, StoreUnavailable, once_more
from dibs.hold import Hold
from dibs.names import check_name, check_seconds
from dibs.once_keys import check_key
from dibs.steps import run

V = TypeVar("V")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from threading import Event

    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

    #: Looks again at what was won, and returns what of it is still due.
    Verify = Callable[[list[V]], Iterable[V]]
    #: Returns what may be due now.
    Fetch = Callable[[], Iterable[V]]

# As many items as one take may be given: as the lane takes in a hundred calls.
ITEMS_MAX = 100_000
# The loop over a batch stops when less than this part of the ttl is left, unless told otherwise.
MARGIN_PART = 0.1
# The least pause of a stream that found nothing.
IDLE_MIN_S = 0.01
# Its pauses differ by this part, so that workers do not all come at once.
IDLE_JITTER = 0.5
# Whoever pauses looks this often whether to stop.
STOP_LOOK_S = 0.5

B = TypeVar("B", bound=BatchFacts[Any])


class ClaimsCore(Generic[B]):
    """What claims do, in steps for either face."""

    __slots__ = ("_desk", "_make_batch", "_margin_s", "source", "terms")

    def __init__(
        self,
        desk: Desk,
        source: str,
        terms: Terms,
        margin_s: float,
        make_batch: Callable[[list[Item[Any]], list[Any], Ends, float], B],
    ) -> None:
        self.source = check_name(source)
        self.terms = terms
        self._desk = desk
        self._margin_s = margin_s
        self._make_batch = make_batch

    def keyed(self, items: Iterable[V], key: Callable[[V], Key] | None) -> dict[str, V]:
        """The items by their keys; of several with the same key the first."""
        if key is not None and not callable(key):
            raise InvalidOption(f"key is a function of an item that returns its key, not {key!r}")
        keyed: dict[str, V] = {}
        for item in items:
            try:
                text = check_key(item if key is None else key(item))
            except InvalidName as error:
                hint = "; say what tells one item from the others: key=lambda item: …" if key is None else ""
                raise InvalidName(f"{error}{hint}") from None
            if text not in keyed:
                check_name(f"{self.source}/{text}")
                keyed[text] = item
                if len(keyed) > ITEMS_MAX:
                    raise InvalidOption(f"take takes up to {ITEMS_MAX:,} items: give it some of them, or a limit")
        return keyed

    def taking(self, owner: object, keyed: dict[str, V], limit: int | None) -> Steps[B]:
        """Claim as many as are free, or as many of those as ``limit`` says, the first ones first."""
        session = self._desk.session()
        ends = Ends(session)
        won: list[Item[V]] = []
        busy: list[V] = []
        pairs = list(keyed.items())
        at, size, fruitful = 0, len(pairs), True
        try:
            while at < len(pairs) and (limit is None or len(won) < limit):
                had = len(won)
                if limit is not None:
                    # No more than are wanted, so that nobody finds busy what is given back a moment later; but where
                    # all were busy twice as many, so that they do not cost a call for each few.
                    size = max(limit - had, size * 2 if at and not fruitful else 0)
                part = pairs[at : at + size]
                at += len(part)
                yield from self._claim(session, owner, part, won, busy, ends)
                fruitful = len(won) > had
        except BaseException:
            ends.release(*won)
            session.lane.start()
            raise
        batch = self._make_batch(won if limit is None else won[:limit], busy, ends, self._margin_s)
        if limit is not None and len(won) > limit:
            batch._give_back(won[limit:])
            yield from ends.settling()
        return batch

    def _claim(
        self,
        session: Session,
        owner: object,
        part: list[tuple[str, V]],
        won: list[Item[V]],
        busy: list[V],
        ends: Ends,
    ) -> Steps[None]:
        """Ask for these, in one call of the store for each thousand."""
        terms, start = self.terms, f"{self._desk.key_prefix}{self.source}/"
        asks = [session.wish(start + key, terms, owner, False) for key, _ in part]
        taken = 0
        try:
            session.submit_all(asks)
            for ask in asks:
                if not ask.settled:
                    yield session, ask, session.patience_s + session.request_timeout_s
            error = next((ask.error for ask in asks if ask.error is not None), None)
            if error is not None:
                raise once_more(error)
            if not all(ask.settled for ask in asks):
                raise StoreUnavailable("the store did not answer; what it may have granted is given back")
            for (key, value), ask in zip(part, asks, strict=True):
                if type(ask.outcome) is Hold:
                    won.append(Item(session, ask.outcome, f"{self.source}/{key}", key, value, ends))
                else:
                    busy.append(value)
                taken += 1
        except BaseException:
            for ask in asks[taken:]:
                session.withdraw(ask)
            raise

    def pausing(self, idle_s: float, stopped: Callable[[], bool]) -> Steps[None]:
        """Wait for about ``idle_s`` seconds, or until it is time to stop."""
        session = self._desk.session()
        clock = session.clock
        until = clock.now() + idle_s * (1 + IDLE_JITTER * (clock.jitter() - 0.5))
        while not session.closed and not stopped() and (left_s := until - clock.now()) > 0:
            yield session, session.pause(), min(left_s, STOP_LOOK_S)


def claims_core(
    desk: Desk,
    source: str,
    make_batch: Callable[[list[Item[Any]], list[Any], Ends, float], B],
    ttl: Seconds | None,
    renew: bool,
    margin: Seconds | None,
    info: dict[str, Any] | None,
) -> ClaimsCore[B]:
    """Check what a caller gave; raises InvalidName and InvalidOption before any I/O."""
    terms = desk.terms(ttl, renew, 0, False, 0, None, None, "raise", info)
    margin_s = terms.ttl * MARGIN_PART if margin is None else check_seconds("margin", margin)
    if margin_s >= terms.trust_s:
        raise InvalidOption(f"margin ({margin_s:g} s) leaves nothing of a ttl of {terms.ttl:g} s to work in")
    return ClaimsCore(desk, source, terms, margin_s, make_batch)


def check_limit(limit: object) -> int | None:
    """How many to win at most, or None; raises InvalidOption."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOption(f"limit is a whole number from 1, or None for no limit, not {limit!r}")
    return limit


def check_stream(fetch: object, n: object, idle: Seconds, stop: Any) -> tuple[float, Callable[[], bool]]:
    """How long a stream pauses that found nothing, and whether it is time to stop; raises InvalidOption."""
    if not callable(fetch):
        raise InvalidOption(f"fetch is a function that returns what may be due now, not {fetch!r}")
    if check_limit(n) is None:
        raise InvalidOption("n says how many items a stream may hold at a time: a whole number from 1")
    idle_s = check_seconds("idle", idle, least=IDLE_MIN_S)
    if stop is None:
        return idle_s, bool  # never: bool() is False
    if callable(stop):
        return idle_s, stop
    if not hasattr(stop, "is_set"):
        raise InvalidOption(f"stop is an event, or a function that says when to stop, not {stop!r}")
    return idle_s, stop.is_set


class Batch(BatchFacts[V]):
    """What was won, for one thread: ``with claims.take(rows) as batch: for item in batch: …``.

    Going on to the next item finishes the one before. The loop stops a margin before the deadline. What is left at
    the end of the ``with`` block, however it ends, is given back.
    """

    __slots__ = ()

    def release(self) -> None:
        """Give back what is left, and wait until the store has confirmed everything; ``lost`` is exact then."""
        run(self._ending())

    def __iter__(self) -> Iterator[Item[V]]:
        return self

    def __next__(self) -> Item[V]:
        item = self._move_on()
        if item is None:
            raise StopIteration
        return item

    def __enter__(self) -> Batch[V]:
        return self

    def __exit__(self, *exc: object) -> None:
        run(self._ending())


class Claims:
    """Claims on the items of one source. A description: ``take`` gives a ``Batch``. Safe to share among threads."""

    __slots__ = ("_core",)

    def __init__(self, core: ClaimsCore[Batch[Any]]) -> None:
        self._core = core

    @property
    def source(self) -> str:
        """What the items are of."""
        return self._core.source

    def take(
        self,
        items: Iterable[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        limit: int | None = None,
    ) -> Batch[V]:
        """Claim those of ``items`` that are free, in one round trip for a thousand. That some are busy is no error.

        key: what tells an item from the others: a function that returns a str, an int or a date; without it, the items
        are such themselves. An item on key 42 of orders is the lock ``orders/42``. verify: called once with the list
        of what was won; returns what of it is still due, the rest is given back (``batch.stale``). Claim first, look
        again after: what another program finished a moment before the claim is found so. limit: win at most so many.

        Raises StoreUnavailable when the store gives no answer (nothing is held then), and what ``verify`` raises.
        """
        core = self._core
        most = check_limit(limit)
        keyed = core.keyed(items, key)
        batch: Batch[V] = run(core.taking(get_ident(), keyed, most))
        if verify is not None and len(batch):
            try:
                due = verify(batch.won)
                batch._keep_due(core.keyed(due, key))
            except BaseException:
                run(batch._ending())
                raise
        return batch

    def stream(
        self,
        fetch: Fetch[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> Iterator[Item[V]]:
        """Work without end: claim up to ``n`` of what ``fetch()`` returns, yield them one by one, and so on.

        Going on to the next item finishes the one before. When nothing could be claimed, it looks again after ``idle``
        seconds, give or take a quarter. stop: an event, or a function, that ends it after the item at hand. Left in the
        middle, by ``break`` or an error, it gives back what is left when the iterator is closed; a ``with`` block of
        ``contextlib.closing`` makes that certain. key and verify are those of ``take``, which raises what this does.
        """
        idle_s, stopped = check_stream(fetch, n, idle, stop)
        return self._stream(fetch, key, verify, n, idle_s, stopped)

    def _stream(
        self,
        fetch: Fetch[V],
        key: Callable[[V], Key] | None,
        verify: Verify[V] | None,
        n: int,
        idle_s: float,
        stopped: Callable[[], bool],
    ) -> Iterator[Item[V]]:
        while not stopped():
            with self.take(fetch(), key=key, verify=verify, limit=n) as batch:
                while not stopped() and (item := batch._move_on()) is not None:
                    yield item
                batch._finish()
            if not batch.won:
                run(self._core.pausing(idle_s, stopped))

    def __repr__(self) -> str:
        return f"<dibs.Claims {self.source!r}>"
