"""How items of a source are claimed, in steps for either face: asked for, counted, found by a query, given back.

What claims are for is told where a user meets them: in ``dibs.claims``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dibs._typing import TYPE_CHECKING, Any, Generic, TypeVar
from dibs.batch import BatchFacts, Ends, Item
from dibs.columns import check_place, name_of
from dibs.dropped import told, watch
from dibs.errors import InvalidName, InvalidOption, StoreUnavailable, Unsupported
from dibs.hold import Hold
from dibs.names import check_name, check_seconds, check_stop
from dibs.once_keys import check_key
from dibs.steps import settling
from dibs.store import Gone
from dibs.tries import Tries, check_max_tries, listing, reviving

V = TypeVar("V")

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Union

    from dibs.columns import Place
    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms
    from dibs.tries import DeadItem

    #: Looks again at what was won, and returns what of it is still due.
    Verify = Callable[[list[V]], Iterable[V]]
    #: Returns what may be due now.
    Fetch = Callable[[], Iterable[V]]
    #: Of a query.
    Params = Union[Sequence[Any], Mapping[str, Any]]  # noqa: UP007 - the quotes-free form of Python 3.10
    MakeItem = Callable[[Session, Hold, str, str, Any, Ends], Item[Any]]

# As many items as one take may be given: as the lane takes in a hundred calls.
ITEMS_MAX = 100_000
# The loop over a batch stops when less than this part of the ttl is left, unless told otherwise.
MARGIN_PART = 0.1
# The least pause of a stream that found nothing.
IDLE_MIN_S = 0.01
# Its pauses differ by this part, so that workers do not all come at once.
IDLE_JITTER = 0.5
# As many of what a query yields are claimed, unless told otherwise.
N_DEFAULT = 1000
# Whoever pauses looks this often whether to stop.
STOP_LOOK_S = 0.5

B = TypeVar("B", bound=BatchFacts[Any])

if TYPE_CHECKING:
    MakeBatch = Callable[[list[Item[Any]], list[Any], Ends, float], B]


class ClaimsCore(Generic[B]):
    """What claims do, in steps for either face."""

    __slots__ = ("_desk", "_make_batch", "_make_item", "_margin_s", "_tries", "place", "source", "terms")

    def __init__(
        self,
        desk: Desk,
        source: str,
        terms: Terms,
        margin_s: float,
        max_tries: int | None,
        make_item: MakeItem,
        make_batch: MakeBatch[B],
        place: Place | None = None,
    ) -> None:
        self.source = check_name(source)
        #: Where the items are rows that keep their claims themselves.
        self.place = place
        self.terms = terms
        self._tries = None if max_tries is None else Tries(desk, source, max_tries, terms)
        self._desk = desk
        self._margin_s = margin_s
        self._make_item = make_item
        self._make_batch = make_batch

    def keyed(self, items: Iterable[V], key: Callable[[V], Key] | None) -> dict[str, V]:
        """The items by their keys; of several with the same key the first."""
        if not _several(items):
            raise InvalidOption(f"items are several, as in take([{items!r}]), not one {type(items).__name__}")
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
                    raise InvalidOption(f"take takes up to {ITEMS_MAX:,} items: give it some of them at a time")
        return keyed

    def due(self, told: Any, key: Callable[[Any], Key] | None, query: str | None) -> Collection[str]:
        """The keys of what ``verify`` has told to be still due."""
        if not _several(told):
            raise InvalidOption(f"verify returns what is still due of the list that it was given, not {told!r}")
        if query is not None:
            from dibs.searching import key_of

            key = key_of
        return self.keyed(told, key)

    def taking(self, owner: object, keyed: dict[str, V], limit: int | None) -> Steps[B]:
        """Claim as many as are free, or as many of those as ``limit`` says, the first ones first."""
        session = self._desk.session()
        ends = Ends(session, self._tries)
        won: list[Item[V]] = []
        busy: list[V] = []
        missing: list[V] = []
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
                yield from self._claim(session, owner, part, won, busy, missing, ends)
                if self._tries is not None and len(won) > had:
                    yield from self._count(session, self._tries, won, had, busy, ends)
                fruitful = len(won) > had
            batch = self._make_batch(won if limit is None else won[:limit], busy, ends, self._margin_s)
            batch._stale += missing
            if limit is not None and len(won) > limit:
                batch._give_back(won[limit:])
                yield from ends.settling()
            return batch
        except BaseException:
            try:
                _give_up(ends, won)
            except BaseException:  # Ctrl-C in the midst of that, or in front of its first line
                _give_up(ends, won)
                raise
            raise

    def take(
        self,
        owner: object,
        items: Iterable[Any] | None,
        key: Callable[[Any], Key] | None,
        limit: int | None,
        query: str | None,
        n: int,
        params: Params,
        verify: object,
    ) -> Steps[B]:
        """Check what a caller gave; then, in steps, claim of the items, or of what the query yields."""
        check_functions(key, verify)
        if query is None:
            if items is None:
                raise InvalidOption("take takes items, or a query")
            if n != N_DEFAULT or params != ():
                raise InvalidOption("n and params are of a query; of items, limit says how many to win at most")
            most = check_limit(limit)
            return self.taking(owner, self.keyed(items, key), most)
        from dibs.searching import check_query, searching

        if items is not None or key is not None or limit is not None:
            raise InvalidOption("a query is taken alone: its first column is the key, and n says how many at most")
        return searching(self, owner, query, params, check_query(self, query, params, n))

    def _claim(
        self,
        session: Session,
        owner: object,
        part: list[tuple[str, V]],
        won: list[Item[V]],
        busy: list[V],
        missing: list[V],
        ends: Ends,
    ) -> Steps[None]:
        """Ask for these, in one call of the store for each thousand."""
        terms, start, place = self.terms, f"{self._desk.key_prefix}{self.source}/", self.place
        names = [start + key if place is None else name_of(start + key, place, key) for key, _ in part]
        asks = [session.wish(name, terms, owner, False) for name in names]
        taken = 0
        try:
            session.submit_all(asks)
            yield from settling(session, asks)
            for (key, value), ask in zip(part, asks, strict=True):
                if type(ask.outcome) is Hold:
                    item = self._make_item(session, ask.outcome, f"{self.source}/{key}", key, value, ends)
                    won.append(item)
                    watch(item, ask.outcome, session, told)
                else:
                    (missing if type(ask.outcome) is Gone else busy).append(value)
                taken += 1
        except BaseException:
            session.withdraw(*asks[taken:])
            raise

    def _count(
        self, session: Session, tries: Tries, won: list[Item[V]], had: int, busy: list[V], ends: Ends
    ) -> Steps[None]:
        """Count a try of each that was won just now; whose last holder died of the last one is not handed out."""
        exhausted = yield from tries.counting(session, won[had:])
        for item in exhausted:
            won.remove(item)
            busy.append(item.value)
            assert item._try is not None
            session.keeper.release(item._hold, tries.death(item._try))
        if exhausted:
            session.lane.start()

    def dead(self) -> Steps[list[DeadItem]]:
        self._counts_tries()
        return listing(self._desk, self.source)

    def revive(self, keys: Iterable[Key] | None) -> Steps[int]:
        self._counts_tries()
        return reviving(self._desk, self.source, keys)

    def _counts_tries(self) -> None:
        if self.place is not None:
            raise Unsupported('mode="columns" counts no tries, so none of its items is ever dead')

    def pausing(self, idle_s: float, stopped: Callable[[], bool]) -> Steps[None]:
        """Wait for about ``idle_s`` seconds, or until it is time to stop."""
        session = self._desk.session()
        clock = session.clock
        until = clock.now() + idle_s * (1 + IDLE_JITTER * (clock.jitter() - 0.5))
        while not session.closed and not stopped() and (left_s := until - clock.now()) > 0:
            yield session, session.pause(), min(left_s, STOP_LOOK_S)
        if session.closed and not stopped():  # and who finds nothing would never be told so by asking
            raise StoreUnavailable("this dibs client is closed", maybe_applied=False)


def _give_up(ends: Ends, won: list[Item[Any]]) -> None:
    ends.release(*won)
    ends.session.lane.start()


def claims_core(
    desk: Desk,
    source: str,
    make_item: MakeItem,
    make_batch: MakeBatch[B],
    ttl: Seconds | None,
    renew: bool,
    margin: Seconds | None,
    max_tries: int | None,
    info: dict[str, Any] | None,
    mode: str,
    table: str | None,
    key: str | None,
) -> ClaimsCore[B]:
    """Check what a caller gave; raises InvalidName, InvalidOption and Unsupported before any I/O."""
    place = check_mode(desk, source, mode, table, key, max_tries, info)
    terms = desk.terms(ttl, renew, 0, False, 0, None, None, "raise", info)
    margin_s = terms.ttl * MARGIN_PART if margin is None else check_seconds("margin", margin)
    if margin_s >= terms.trust_s:
        raise InvalidOption(f"margin ({margin_s:g} s) leaves nothing of a ttl of {terms.ttl:g} s to work in")
    return ClaimsCore(desk, source, terms, margin_s, check_max_tries(desk, max_tries), make_item, make_batch, place)


def check_mode(
    desk: Desk, source: str, mode: str, table: str | None, key: str | None, max_tries: object, info: object
) -> Place | None:
    """Where claims are kept that are not leases of their own; raises InvalidOption and Unsupported."""
    if mode == "leases":
        if table is not None or key is not None:
            raise InvalidOption('table and key say where mode="columns" keeps claims: give that, too')
        return None
    if mode != "columns":
        raise InvalidOption(f'mode is "leases" or "columns", not {mode!r}')
    if max_tries is not None:
        raise InvalidOption(
            'max_tries are counted beside leases, and mode="columns" makes none: count them in your table'
        )
    if info is not None:
        raise InvalidOption('info is shown with leases, and mode="columns" makes none')
    where = check_place(source if table is None else table, "id" if key is None else key)
    limits = desk.address.capabilities
    if desk.address.observed:
        raise Unsupported("mode=\"columns\" has no takeover='observe': claims in columns end by the store's clock")
    if not limits.query:
        raise Unsupported(f'{limits.store} has no tables whose columns could keep claims: mode="leases" needs none')
    return where


def check_limit(limit: object) -> int | None:
    """How many to win at most, or None; raises InvalidOption."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOption(f"limit is a whole number from 1, or None for no limit, not {limit!r}")
    return limit


def check_functions(key: object, verify: object) -> None:
    """Refuse what cannot be called before anything is claimed."""
    if key is not None and not callable(key):
        raise InvalidOption(f"key is a function of an item that returns its key, not {key!r}")
    if verify is not None and not callable(verify):
        raise InvalidOption(
            f"verify is a function of what was won that returns what of it is still due, not {verify!r}"
        )


def _several(items: object) -> bool:
    single = isinstance(items, (str, bytes, bytearray, memoryview, Mapping))
    return not single and isinstance(items, Iterable)


def check_stream(
    fetch: object, query: object, params: object, n: object, idle: Seconds, stop: Any
) -> tuple[float, Callable[[], bool]]:
    """How long a stream pauses that found nothing, and whether it is time to stop; raises InvalidOption."""
    if query is not None and fetch is not None:
        raise InvalidOption("a stream is of what fetch returns, or of what a query yields, not of both")
    if query is None and not callable(fetch):
        raise InvalidOption(f"fetch is a function that returns what may be due now, not {fetch!r}")
    if query is None and params != ():
        raise InvalidOption("params are of a query; fetch gets none")
    if check_limit(n) is None:
        raise InvalidOption("n says how many items a stream may hold at a time: a whole number from 1")
    return check_seconds("idle", idle, least=IDLE_MIN_S), check_stop(stop)
