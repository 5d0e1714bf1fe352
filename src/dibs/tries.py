"""How often the items of a source were tried, counted beside their names, and what becomes of those that never succeed.

The *tally* of an item is a note of its own under ``namespace~tries:source/key``, where no name of a user can be. It is
there while tries count: made, or raised, by whoever has won the item, before that is handed out; so a worker that dies
has paid for its try. Done, the tally goes; given back unfinished, it is what it was before. Either reaches the store
before the release of the item does (``Hold.first``), so the next to win it finds the right number.

A tally is a lease that nobody renews, under a claim that stands in its info. It is changed by a transfer from that
claim, in one conditional write: what an old holder sends late finds another claim there, and changes nothing.

An item that has failed ``max_tries`` times is *dead*: its own name is released with *keep*, under a mark in its info,
as in ``dibs.once``. To those who take it is busy from then on, and costs them nothing. Both are kept for as long as the
store keeps anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption, StoreUnavailable, Unsupported
from dibs.hold import HELD, Finish
from dibs.names import check_info, info_in
from dibs.once_keys import check_key
from dibs.steps import acting, settling
from dibs.store import Acquire, Granted, Release, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from dibs.batch import Item
    from dibs.clock import Deadline
    from dibs.desk import Desk
    from dibs.once_keys import Key
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.store import Request, Store, StoredLease
    from dibs.terms import Terms

# The mark of a dead item stands under this key of the info that is shown with its name.
MARK = "dead"
# Of what an item failed with, so much is kept.
ERROR_CHARS_MAX = 300
# How often the tally of one item is looked at again that an old holder's late request has changed.
ROUNDS_MAX = 5
# Items that are revived between two batches of the lane, with four requests each.
REVIVED_AT_ONCE = 10
TRIES_MAX = 1_000_000


class Try(NamedTuple):
    """One try of an item: its tally, the claim under which that stands, and how many there were, this one included."""

    name: str
    claim_id: str
    tries: int
    #: What an earlier one failed with.
    error: str | None


class DeadItem(NamedTuple):
    """An item that was tried ``max_tries`` times, and is given to nobody until it is revived.

    ``tries`` is how often, ``error`` what was told of the last failure, if anything was, and ``holder`` who found it
    dead (host/pid/client), at ``died_at``. It is kept until ``kept_until``. Times are the store's.
    """

    key: str
    tries: int
    error: str | None
    holder: str
    died_at: datetime
    kept_until: datetime


class Tries:
    """The tallies of one source."""

    def __init__(self, desk: Desk, source: str, max_tries: int, terms: Terms) -> None:
        self.max_tries = max_tries
        self._prefix = tally_prefix(desk, source)
        self._keep_s = desk.address.capabilities.ttl_max_s
        self._fields: dict[str, Any] = {}
        if terms.info is not None:
            import json

            self._fields = json.loads(terms.info)
            if MARK in self._fields:
                raise InvalidOption(f"info may not contain {MARK!r}: there stands whether an item is dead")
        self.mark(max_tries, None)

    # -- at the claim ---------------------------------------------------------------------------------------------

    def counting(self, session: Session, items: Sequence[Item[Any]]) -> Steps[list[Item[Any]]]:
        """Count a try of each of these items, which were just won; those that have had all of theirs.

        When it raises, giving the items back also takes back what was counted.
        """
        exhausted: list[Item[Any]] = []
        pending = list(items)
        for _ in range(ROUNDS_MAX):
            found = yield from self._begin(session, pending)
            if not found:
                return exhausted
            pending = yield from self._go_on(session, found, exhausted)
            if not pending:
                return exhausted
        raise StoreUnavailable(f"the tries of {pending[0].name!r} could not be counted: their number changes all along")

    def _begin(self, session: Session, items: Sequence[Item[Any]]) -> Steps[list[Item[Any]]]:
        """Begin a tally for each; those that have one already."""
        wanted: list[tuple[Item[Any], Try, Request]] = []
        for item in _still_held(session, items):
            first = Try(self._prefix + item.key, session.new_claim(), 1, None)
            acquire = Acquire(first.name, first.claim_id, self._keep_s, session.holder, _note(first))
            wanted.append((item, first, acquire))
            item._hold.first = Release(first.name, first.claim_id)
        return (yield from self._ask(session, wanted))

    def _go_on(
        self, session: Session, items: Sequence[Item[Any]], exhausted: list[Item[Any]]
    ) -> Steps[list[Item[Any]]]:
        """Count one more on the tallies that are there; those whose tally has changed meanwhile."""
        items = _still_held(session, items)
        if not items:
            return []
        for item in items:
            item._hold.first = None
        names = [self._prefix + item.key for item in items]
        first, last = min(names), max(names)
        # A name has no control characters, so nothing lies between the last and this.
        rows = yield from acting(session, lambda store, by: store.leases(first, last + "\x01", by))
        notes = {row.name: _read(row) for row in rows}
        wanted: list[tuple[Item[Any], Try, Request]] = []
        changed: list[Item[Any]] = []
        for item, name in zip(items, names, strict=True):
            before = notes.get(name)
            if before is None:
                changed.append(item)
                continue
            if before.tries >= self.max_tries:
                item._try = before
                exhausted.append(item)
                continue
            now = before._replace(claim_id=session.new_claim(), tries=before.tries + 1)
            wanted.append((item, now, self._transfer(session, before, now)))
            item._hold.first = self._transfer(session, now, before._replace(claim_id=session.new_claim()))
        return changed + (yield from self._ask(session, wanted))

    def _ask(self, session: Session, wanted: Sequence[tuple[Item[Any], Try, Request]]) -> Steps[list[Item[Any]]]:
        """Send these requests in one call for a thousand; the items to which it was not granted."""
        asks = [session.new_ask(request) for _, _, request in wanted]
        refused: list[Item[Any]] = []
        try:
            session.queue(*asks)
            yield from settling(session, asks)
        except BaseException:
            for ask in asks:
                ask.dropped = True
            raise
        for (item, counted, _), ask in zip(wanted, asks, strict=True):
            if isinstance(ask.outcome, Granted):
                item._try = counted
            else:
                refused.append(item)
        return refused

    def _transfer(self, session: Session, before: Try, after: Try) -> Transfer:
        return Transfer(before.name, after.claim_id, self._keep_s, session.holder, before.claim_id, _note(after))

    # -- at the end -----------------------------------------------------------------------------------------------

    def done(self, counted: Try) -> Finish:
        """This tally is to go with its item."""
        return Finish(first=Release(counted.name, counted.claim_id))

    def failed(self, session: Session, counted: Try, keep: float, error: str | None) -> Finish:
        """This try counts; nobody has the item for ``keep`` seconds, or ever, if it was the last."""
        if counted.tries >= self.max_tries:
            return self.death(counted, error)
        first = None
        if error is not None:
            told = counted._replace(claim_id=session.new_claim(), error=error)
            first = self._transfer(session, counted, told)
        return Finish(keep, None, first, failed=True)

    def death(self, counted: Try, error: str | None = None) -> Finish:
        """The tries of an item are over: its name is kept under a mark. The tally stays."""
        mark = self.mark(counted.tries, counted.error if error is None else error)
        return Finish(self._keep_s, mark, failed=True)

    def mark(self, tries: int, error: str | None) -> str:
        """The info that says dead, with the error if there is room for it."""
        mark: dict[str, Any] = {"tries": tries, "keep": self._keep_s}
        if error is not None:
            try:
                return check_info({**self._fields, MARK: {**mark, "error": error}}) or ""
            except InvalidOption:  # the info of the claims is large
                pass
        return check_info({**self._fields, MARK: mark}) or ""


def check_max_tries(desk: Desk, max_tries: object) -> int | None:
    """How often an item may be tried, or None for any number; raises InvalidOption and Unsupported."""
    if max_tries is None:
        return None
    if isinstance(max_tries, bool) or not isinstance(max_tries, int) or not 1 <= max_tries <= TRIES_MAX:
        raise InvalidOption(f"max_tries is a whole number from 1 to {TRIES_MAX:,}, or None, not {max_tries!r}")
    _supported(desk)
    return max_tries


def error_text(error: object) -> str | None:
    """What is kept of what an item failed with; raises InvalidOption."""
    if error is None:
        return None
    if isinstance(error, BaseException):
        text = f"{type(error).__name__}: {_told(error)}"
    elif isinstance(error, str):
        text = error
    else:
        raise InvalidOption(f"error is an exception, a str or None, not {type(error).__name__}")
    # Not every store can keep a NUL, and none a lone surrogate.
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:ERROR_CHARS_MAX]


def _told(error: BaseException) -> str:
    """What it says of itself; that an item has failed must not depend on whether it can."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - its __str__ is anybody's
        return f"(its text could not be had: {type(another).__name__})"


def tally_prefix(desk: Desk, source: str) -> str:
    """Where the tallies of a source begin."""
    return f"{desk.namespace}~tries:{source}/"


def listing(desk: Desk, source: str) -> Steps[list[DeadItem]]:
    """The dead items of a source, by key."""
    _supported(desk)
    records = yield from desk.leases(f"{source}/")
    dead = []
    for record in records:
        mark = None if record.info is None else record.info.get(MARK)
        if isinstance(mark, dict):
            from datetime import timedelta

            died_at = record.expires_at - timedelta(seconds=mark.get("keep", 0.0))
            key = record.name[len(source) + 1 :]
            dead.append(
                DeadItem(key, mark.get("tries", 0), mark.get("error"), record.holder, died_at, record.expires_at)
            )
    return dead


def reviving(desk: Desk, source: str, keys: Iterable[Key] | None) -> Steps[int]:
    """Let the dead among these items be tried again, from the first try on; how many there were."""
    _supported(desk)
    if isinstance(keys, str) or not (keys is None or isinstance(keys, Iterable)):
        raise InvalidOption(f"keys is a list of them, not {keys!r}; without any, all that are dead are revived")
    asked = None if keys is None else {check_key(key) for key in keys}
    dead = [item.key for item in (yield from listing(desk, source)) if asked is None or item.key in asked]
    prefixes = tally_prefix(desk, source), f"{desk.key_prefix}{source}/"
    revived: set[str] = set()

    def act(part: Sequence[str], store: Store, deadline: Deadline) -> None:
        for key in part:
            # Read and broken in this order. What is dead after its tally was read is dead with that tally: another may
            # have revived it meanwhile, and then it is not this one's. A dead item whose revival was interrupted is
            # dead still, and no item has too many tries.
            tally, item = (store.leases(prefix + key, prefix + key + "\x01", deadline) for prefix in prefixes)
            if any(_is_dead(row) for row in item):
                revived.add(key)
                for row in (*tally, *item):
                    store.break_lease(row.name, row.fencing_token, True, deadline)

    for at in range(0, len(dead), REVIVED_AT_ONCE):
        part = dead[at : at + REVIVED_AT_ONCE]
        yield from desk._acting(partial(act, part))
    return len(revived)


def _supported(desk: Desk) -> None:
    limits = desk.address.capabilities
    if not limits.tries:
        raise Unsupported(
            f"{limits.store} cannot count the tries of items: it keeps nothing for days, or cannot list what it keeps"
        )


def _is_dead(row: StoredLease) -> bool:
    return MARK in (info_in(row.info) or {})


def _still_held(session: Session, items: Sequence[Item[Any]]) -> list[Item[Any]]:
    """Those that are not over yet. Of the others nothing is counted: whoever has won them since counts for itself."""
    now = session.clock.now()
    return [item for item in items if item._hold.state == HELD and now < item._hold.trusted_until]


def _note(counted: Try) -> str:
    note = {"claim": counted.claim_id, "tries": counted.tries}
    return check_info(note if counted.error is None else {**note, "error": counted.error}) or ""


def _read(row: StoredLease) -> Try:
    note = info_in(row.info) or {}
    return Try(row.name, str(note.get("claim", "")), int(note.get("tries", 0)), note.get("error"))
