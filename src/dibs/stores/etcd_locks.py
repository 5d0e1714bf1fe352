"""How a lock on etcd is granted: who is first tries, the others look, stand in line, and are told who holds.

How a name with permits is granted is told in ``etcd_pools``.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import boot_now, wall_now
from dibs.store import GONE, Acquire, Granted, Held, Mismatch
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_leases import Row, keepalives, whole

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.etcd_flights import Flights
    from dibs.stores.etcd_leases import Leases
    from dibs.stores.etcd_renewals import Renewals
    from dibs.stores.etcd_watch import EtcdWatch

# How long a free name is kept for waiters ahead that do not ask, from when it was *seen* free. A waiter looks once a
# second at least (dibs.waiting.POLL_MAX_S): whoever is alive comes within this, and the dead delay the line by a look
# and this together, within the promised 2 s.
SEEN_FREE_S = 0.95
# Free names kept for others that a store remembers.
FREE_MAX = 10_000


class _View(NamedTuple):
    """What was seen of a name: its holder, and the line before the one who asks (all of it, or its last)."""

    revision: int
    holder: keys.Kept | None
    ahead: list[keys.Kept]
    #: The asker's place in line, told by it or found there, and whether it still stands there.
    ticket: int | None
    in_line: bool


class _Free:
    """A name that was seen free and is kept for others: since when, and when each was last seen to have asked."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.asked: dict[str, tuple[int, float]] = {}  # by key: its latest change, and when that was seen


class Locks:
    """Grants for one store. ``watches`` are of the clients of this process, by their addresses."""

    def __init__(
        self,
        layout: keys.Layout,
        flights: Flights,
        leases: Leases,
        watches: dict[str, EtcdWatch],
        renewals: Renewals,
    ) -> None:
        self._layout = layout
        self._flights = flights
        self._leases = leases
        self._watches = watches
        self._renewals = renewals
        self._free: dict[str, _Free] = {}

    def acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        asking = {row.place: row for row in rows}
        views: dict[int, _View] = {}
        # Who has not asked before, or was woken, may well be the next: it tries at once. Others look first.
        hopeful = [row for row in rows if row.request.ticket is None or self._was_woken(row.request)]
        refused = self._grant(hopeful, views, outcomes, deadline, hopeful=True) if hopeful else []
        looking = [row for row in rows if row.request.ticket is not None and row.place not in views]
        looking = [row for row in looking if type(outcomes[row.place]) is not Granted]
        # Who found a free name with somebody in line must know all of the line.
        looking += [row for row in refused if views[row.place].holder is None and row.request.wake is None]
        if looking:
            self._look(looking, views, deadline)
        trying, entering = [], []
        now = boot_now()
        for index, view in views.items():
            row = asking[index]
            if self._has_permits(row, views):
                continue
            ahead = view.holder is not None or self._somebody_ahead(row.request.name, view, now)
            if view.holder is not None and view.holder.key == self._claim_of(row):
                continue  # its own, see below
            if not ahead:
                trying.append(row)
            elif row.request.wake is not None and (view.holder is None or not view.in_line):
                entering.append(row)  # also to be seen asking
        if entering:
            trying += self._enter(entering, views, deadline)
        late = self._grant(trying, views, outcomes, deadline, hopeful=False) if trying else []
        late = [
            row
            for row in late
            if row.request.wake is not None and not views[row.place].in_line and not self._has_permits(row, views)
        ]
        if late:  # somebody else was quicker
            self._enter(late, views, deadline)
        self._answer([row for row in rows if type(outcomes[row.place]) is not Granted], views, outcomes, deadline)

    def _has_permits(self, row: Row, views: dict[int, _View]) -> bool:
        """Whether the name turned out to be no lock."""
        holder = views[row.place].holder
        return holder is not None and holder.key == self._layout.head(row.request.name)

    def _was_woken(self, request: Acquire) -> bool:
        watch = self._watches.get(request.wake) if request.wake is not None else None
        return watch is not None and watch.has_told(request.name)

    def _grant(
        self, rows: list[Row], views: dict[int, _View], outcomes: list[Any], deadline: Deadline, *, hopeful: bool
    ) -> list[Row]:
        """Make the keys of those whose name has none; the others. ``hopeful``: only where nobody stands before them."""
        since = wall_now()

        def text(row: Row, lease: str) -> str:
            request = row.request
            permit, line, own = self._layout.permit(request.name), self._layout.line(request.name), []
            ticket = request.ticket if hopeful else views[row.place].ticket
            granting = [keys.put(self._claim_of(row), keys.value_of(request, since, request.take), lease)]
            if ticket is not None:  # it takes the line before it along, of which hope says that there is none
                place = self._layout.place(request.name, ticket, request.claim_id)
                line, own = keys.Span(line.first, place), [keys.get(place)]
                granting.append(keys.delete(place))
            if not hopeful:
                return keys.txn(
                    [keys.nothing_in(permit)],
                    [*granting, keys.delete_all(line)],
                    [keys.get_all(permit, keys.FIRST)],
                )
            seen = keys.get_all(line, keys.KEYS_ONLY if request.wake else keys.LAST)
            refusing = [keys.get_all(permit, keys.FIRST), seen, *own]
            return keys.txn([keys.nothing_in(permit), keys.nothing_in(line)], granting, refusing)

        ttls = [whole(row.request.ttl) for row in rows]
        leases, sent = self._leases.attach(rows, text, ttls, deadline)
        refused, granted = [], []
        for row, (succeeded, answers, revision) in zip(rows, sent.results, strict=True):
            if succeeded:
                outcomes[row.place] = Granted(revision, since)
                self._free.pop(row.request.name, None)
                granted.append((whole(row.request.ttl), row.request.claim_id))
                continue
            refused.append(row)
            if hopeful:
                views[row.place] = _seen(row.request, answers, revision)
            else:
                holder = next(iter(keys.kept(answers[0])), None)
                views[row.place] = views[row.place]._replace(revision=revision, holder=holder)
        self._leases.granted(leases, granted)
        return refused

    def _look(self, rows: list[Row], views: dict[int, _View], deadline: Deadline) -> None:
        """See who holds the names and who stands before these in line. A lone look is no write."""
        texts = []
        for row in rows:
            name, ticket = row.request.name, row.request.ticket
            permit, line = self._layout.permit(name), self._layout.line(name)
            own = []
            if ticket is not None:
                place = self._layout.place(name, ticket, row.request.claim_id)
                line, own = keys.Span(line.first, place), [keys.get(place)]
            free = [keys.get_all(permit, keys.FIRST), keys.get_all(line, keys.KEYS_ONLY), *own]
            held = [keys.get_all(permit, keys.FIRST), keys.get_all(line, keys.LAST), *own]
            texts.append(keys.txn([keys.nothing_in(permit)], free, held))
        before = [("lease/keepalive", keepalives([self._leases.of_line]))] if self._leases.of_line else []
        for row, (_, answers, revision) in zip(
            rows, self._flights.transactions(texts, deadline, before).results, strict=True
        ):
            views[row.place] = _seen(row.request, answers, revision)

    def _enter(self, rows: list[Row], views: dict[int, _View], deadline: Deadline) -> list[Row]:
        """Put these in line, or let them be seen asking there; who turns out to be first of a free name."""
        for row in rows:
            view = views[row.place]
            if view.ticket is None:
                last = view.ahead[-1].place()[0] if view.ahead else 0
                views[row.place] = view._replace(ticket=max(view.revision, last + 1))

        def text(row: Row, lease: str) -> str:
            name, ticket = row.request.name, views[row.place].ticket
            assert ticket is not None
            place, line = self._layout.place(name, ticket, row.request.claim_id), self._layout.line(name)
            look = [
                keys.get_all(self._layout.permit(name), keys.FIRST),
                keys.get_all(keys.Span(line.first, place), keys.LAST),
            ]
            return keys.txn([], [keys.put(place, keys.place_of(row.request), lease), *look])

        sent = self._leases.in_line(rows, text, deadline)
        first = []
        for row, (_, (_put, permit, line), revision) in zip(rows, sent.results, strict=True):
            holder = next(iter(keys.kept(permit)), None)
            view = _View(revision, holder, keys.kept(line), views[row.place].ticket, True)
            views[row.place] = view
            if holder is None and not view.ahead:  # released in between, when there was nobody to tell
                first.append(row)
        return first

    def _somebody_ahead(self, name: str, view: _View, now: float) -> bool:
        """Whether a free name is kept for somebody before the asker, see SEEN_FREE_S."""
        if not view.ahead:
            return False
        free = self._free.get(name)
        if free is None:
            if len(self._free) >= FREE_MAX:
                self._free.clear()
            free = self._free[name] = _Free(now)
        alive = False
        for key in view.ahead:
            change, seen_at = free.asked.get(key.key, (0, now))
            if change != key.modified:
                seen_at = now
                free.asked[key.key] = key.modified, now
            alive = alive or now < seen_at + SEEN_FREE_S
        return alive

    def _answer(self, rows: list[Row], views: dict[int, _View], outcomes: list[Any], deadline: Deadline) -> None:
        """Say to those who were not granted a name who has it, or that it is theirs already."""
        held = {row.place: key for row in rows if (key := views[row.place].holder) is not None}
        mine = [row for row in rows if row.place in held and held[row.place].key == self._claim_of(row)]
        if mine:
            self._renewals.confirm(mine, held, outcomes, deadline)
        for row in rows:
            holder = views[row.place].holder
            if holder is not None and self._has_permits(row, views):
                outcomes[row.place] = Mismatch(int(holder.number("permits")))
        rows = [row for row in rows if outcomes[row.place] is GONE]
        holders = {row.place: key for row in rows if (key := views[row.place].holder) is not None}
        times, _ = (
            self._leases.times_left({key.lease for key in holders.values()}, deadline) if holders else ({}, set())
        )
        now = boot_now()
        for row in rows:
            view = views[row.place]
            behind = view.ahead[-1] if view.ahead and view.ticket is not None else view.holder
            watch = self._watches.get(row.request.wake) if row.request.wake is not None else None
            if watch is not None and behind is not None:
                watch.follow(row.request.name, behind.key, view.revision)
            if view.holder is None:
                free = self._free.get(row.request.name)
                left = free.since + SEEN_FREE_S - now if free is not None else 0.0
                left = 0.0 if not view.ahead else left if left > 0 else SEEN_FREE_S
                outcomes[row.place] = Held(None, 0, 0.0, left, view.ticket, bool(view.ahead))
                continue
            self._free.pop(row.request.name, None)
            shown = view.holder.shown()
            ahead = bool(view.ahead) and view.ticket is not None
            outcomes[row.place] = Held(
                shown.holder, shown.fencing_token, shown.since, times[view.holder.lease].free_in, view.ticket, ahead
            )

    def _claim_of(self, row: Row) -> str:
        return self._layout.claim(row.request.name, row.request.claim_id)


def _seen(request: Acquire, answers: list[Any], revision: int) -> _View:
    """What a look shows: the name's holder, the line before the asker, and its own place if it was told one."""
    holder = next(iter(keys.kept(answers[0])), None)
    line = keys.kept(answers[1])
    if request.ticket is not None:
        return _View(revision, holder, line, request.ticket, bool(keys.kept(answers[2])))
    if request.wake is not None:
        for number, key in enumerate(line):  # it stands there all the same, if its first answer was lost
            ticket, claim_id = key.place()
            if claim_id == request.claim_id:
                return _View(revision, holder, line[:number], ticket, True)
    return _View(revision, holder, line, None, False)
