"""etcd: a lease is a key that one transaction made because the name had none, attached to an etcd lease of its ttl.

*A lock* is the range of keys ``<prefix>lease/<name>\\0/``; *a grant* is the transaction "no key in that range: put
``…/1/<claim id>``". As the claim id stands in the key, being the holder is the existence of one's own key: a release
deletes that key and no other, a repetition finds it there. Values are JSON for people: holder, since, ttl, info. A name
with permits has one more key there, its head, so that it is never a lock as well; ``etcd_pools`` grants them.

*The token* is the revision of the granting transaction (the key's ``create_revision``): it rises with every write to
the cluster, for ever, and renewals leave it alone. Nothing has to be kept for it when a lease ends, so nothing is.

*The clock* is etcd's: each key hangs on an etcd lease and goes when that runs out. Its ttl is the next whole second
above the one asked for; the end is noticed up to half a second late, never early; a change of leader starts it anew.
Grants of one call share an etcd lease, and since a keepalive prolongs whatever hangs on it, an etcd lease is kept alive
only by a renewal of *all* that hang on it; others get a new one. A keepalive can be answered for what is gone, or by a
leader that no longer leads: a renewal is believed when the keys are still there *afterwards*, seen in the same term of
raft. Etcd leases whose keys were all released are used again, since granting one is a write to disk: as they are while
they certainly last the ttl asked for, else after a keepalive in the same flight.

*The line* of a name is the range ``<prefix>line/<name>\\0/``: keys by ticket, the revision at which the waiter came.
They hang on an etcd lease of the client, kept alive by asking, so that the dead leave by themselves. Who asks for a
free name with others before it needs to know how long it has been free, which etcd cannot tell: it is counted on this
process's clock from when it was *seen* free. That decides who asks, never who holds.

Times shown (``acquired_at``) are the wall clocks of clients. Not promised: anything after a restore of older data, or
with ``--unsafe-no-fsync`` (see ``check``).
"""

from __future__ import annotations

import json
from math import ceil
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dibs.clock import boot_now, wall_now
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.store import (
    ANY_SLOT,
    ANY_TICKET,
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
    Transfer,
)
from dibs.stores import etcd_check, etcd_watch
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_flights import Flights, LeaseGone
from dibs.stores.etcd_gateway import Access, Gateway, access_to
from dibs.stores.etcd_leases import NO_TIME, Leases, Row, keepalives, whole
from dibs.stores.etcd_pools import ASK_AGAIN, Pools

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.stores.etcd_watch import EtcdWatch

CAPABILITIES = Capabilities(
    store="etcd",
    survives_restart="yes, and failover",
    fencing_token="revision",
    clock="server lease",
    waiting_line="FIFO",
    signal="watch" if etcd_watch.available else "poll",
    queue=False,
    durable=True,
    # As shipped, etcd grants no lease shorter than 2 s, which is what a ttl of 1 s becomes.
    ttl_min_s=1.0,
    ttl_max_s=30 * 24 * 3600.0,
    # Etcd leases last whole seconds, and their end is noticed up to half a second late; never early.
    resolution_s=0.99,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
)
# What a URL may carry besides.
OPTIONS = ("prefix", "ca", "cert", "key")
PREFIX = "dibs/"
# How long a free name is kept for waiters ahead that do not ask, from when it was *seen* free. A waiter looks once a
# second at least (dibs.waiting.POLL_MAX_S): whoever is alive comes within this, and the dead delay the line by a look
# and this together, within the promised 2 s.
SEEN_FREE_S = 0.95
# Free names kept for others that a store remembers.
FREE_MAX = 10_000
# How often a transfer looks again because the lease changed between the look and the write.
TRANSFER_TRIES = 8


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


class EtcdStore:
    def __init__(self, access: Access, prefix: str, watches: dict[str, EtcdWatch]) -> None:
        self._access = access
        self._gateway = Gateway(access)
        self._flights = Flights(self._gateway)
        self._leases = Leases(self._gateway, self._flights)
        self._layout = keys.Layout(prefix)
        self._watches = watches  # of the clients of this process, by their addresses
        self._pools = Pools(self._layout, self._flights, self._leases, watches, self._renew)
        self._facts: etcd_check.Facts | None = None
        self._free: dict[str, _Free] = {}

    @property
    def capabilities(self) -> Capabilities:
        if self._facts is not None and self._facts.unsafe:
            return CAPABILITIES._replace(durable=False, fencing_token="revision, unless a crash loses writes")
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            if self._facts is None:
                self._facts = self._read_facts(deadline)
            else:
                self._gateway.one("maintenance/status", "{}", deadline)
            return []
        outcomes: list[Any] = [GONE] * len(requests)
        for rows in _rounds(requests):
            for kind, act in (
                (Release, self._release),
                (Renew, self._renew),
                (Transfer, self._transfer),
                (Acquire, self._acquire),
            ):
                mine = [row for row in rows if type(row.request) is kind]
                if mine:
                    act(mine, outcomes, deadline)
        if all(outcome is ASK_AGAIN for outcome in outcomes):
            raise StoreBusy("etcd: others were quicker, time after time")
        return outcomes

    # -- releasing ------------------------------------------------------------------------------------------------

    def _release(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows, places = self._found([row for row in rows if _unsure(row.request)], rows, deadline)
        deletions: list[str] = []
        owners: list[Row | None] = []  # whose grant a deletion ends, if any
        for row in rows:
            release = row.request
            if release.ticket is not None:
                place = self._layout.place(release.name, release.ticket, release.claim_id)
                standing = places.get(row.place, [place])
                deletions += map(keys.delete, standing)
                owners += [None] * len(standing)
            if release.claim_id and not release.keep:
                deletions.append(keys.delete(self._claim_of(row)))
                owners.append(row)
        for owner, answer in zip(owners, self._flights.operations(deletions, deadline)[0], strict=True):
            if owner is not None:
                self._ended(owner, "deleted" in answer["response_delete_range"], outcomes)
        keeping = [row for row in rows if row.request.claim_id and row.request.keep]
        if keeping:
            self._release_later(keeping, outcomes, deadline)

    def _release_later(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key that is no claim's in the place of the holder's, for as long as the name is kept."""
        looks = [keys.get_whole(self._claim_of(row)) for row in rows]
        found = self._flights.operations(looks, deadline)[0]
        mine: dict[int, keys.Kept] = {}
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                mine[row.place] = key
        rows = [row for row in rows if row.place in mine]

        def text(row: Row, lease: str) -> str:
            key = mine[row.place]
            value = keys.marker_of(key, row.request.info)
            marker = keys.put(self._layout.claim(row.request.name, "", row.request.slot), value, lease)
            return keys.txn([keys.unchanged(key)], [keys.delete(key.key), marker])

        _, sent = self._leases.attach(rows, text, [ceil(row.request.keep) for row in rows], deadline)
        for row, (released, _, _) in zip(rows, sent.results, strict=True):
            self._ended(row, released, outcomes)

    def _found(self, unsure: list[Row], rows: list[Row], deadline: Deadline) -> tuple[list[Row], dict[int, list[str]]]:
        """The rows, with the slots of those that were never told theirs; and the places in line of these."""
        looks = []
        for row in unsure:
            spans = self._layout.line(row.request.name), self._layout.permit(row.request.name)
            looks += [keys.get_all(span, keys.KEYS_ONLY) for span in spans]
        answers = iter(self._flights.operations(looks, deadline)[0])
        places: dict[int, list[str]] = {}
        slots: dict[int, int] = {}
        for row in unsure:
            claim_id = row.request.claim_id
            line, permit = keys.kept(next(answers)), keys.kept(next(answers))
            if row.request.ticket == ANY_TICKET:
                places[row.place] = [key.key for key in line if key.place()[1] == claim_id]
            if row.request.slot == ANY_SLOT:  # a claim that is not found has no slot, and no key in that
                slots[row.place] = next(
                    (slot for slot, whose in map(keys.Kept.permit, permit) if whose == claim_id), ANY_SLOT
                )
        rows = [Row(row.place, row.request._replace(slot=slots.get(row.place, row.request.slot))) for row in rows]
        return rows, places

    def _ended(self, row: Row, released: bool, outcomes: list[Any]) -> None:
        outcomes[row.place] = RELEASED if released else GONE
        self._leases.ended(row.request.claim_id, released=released)
        self._pools.views.ended(row.request)

    # -- renewing -------------------------------------------------------------------------------------------------

    def _renew(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows = [row for row in rows if row.request.claim_id]
        looks = [keys.get(self._claim_of(row)) for row in rows]
        found = self._flights.operations(looks, deadline)[0]
        hanging: dict[str, list[Row]] = {}
        seen: dict[int, keys.Kept] = {}
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                hanging.setdefault(key.lease, []).append(row)
                seen[row.place] = key
        times, terms = self._leases.times_left(hanging, deadline, with_keys=True)
        # An etcd lease is kept alive when all that hang on it are renewed for its ttl. Of the others, those move to a
        # new one that would not last as long as they should: so none is shortened.
        alive = [
            lease
            for lease, group in hanging.items()
            if times[lease].keys == len(group) and {whole(row.request.ttl) for row in group} == {times[lease].ttl}
        ]
        kept_alive = set(alive)
        moving = [
            row
            for lease, group in hanging.items()
            if lease not in kept_alive
            for row in group
            if times[lease].left < ceil(row.request.ttl)
        ]
        lease_of = {index: key.lease for index, key in seen.items()}
        if moving:

            def text(row: Row, lease: str) -> str:
                key = seen[row.place]
                return keys.txn([keys.unchanged(key)], [keys.move(key.key, lease)])

            leases, sent = self._leases.attach(moving, text, [whole(row.request.ttl) for row in moving], deadline)
            lease_of.update((row.place, leases[whole(row.request.ttl)].id) for row in moving)
            terms |= sent.terms
        before = [("lease/keepalive", keepalives(alive))] if alive else []
        rows = [row for row in rows if row.place in seen]
        looks = [keys.get(key.key) for key in seen.values()]
        found, again = self._flights.operations(looks, deadline, before)
        now = wall_now()
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                if key.lease != lease_of[row.place] or len(terms | again) > 1:
                    # Somebody else moved it, or there was a change of leader: what was kept alive may be no more.
                    raise StoreUnavailable("etcd: a renewal was overtaken, by another one or by a change of leader")
                outcomes[row.place] = Renewed(now + max(row.request.ttl, times.get(key.lease, NO_TIME).left))

    # -- transferring ---------------------------------------------------------------------------------------------

    def _transfer(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key on an etcd lease of ours in the place of the holder's: the revision of that is the token."""
        rows = [row for row in rows if row.request.from_claim]
        for _ in range(TRANSFER_TRIES):
            looks = [keys.get_whole(key) for row in rows for key in (self._claim_of(row), self._source_of(row))]
            answers = iter(self._flights.operations(looks, deadline)[0])
            again: dict[int, keys.Kept] = {}
            sources: dict[int, keys.Kept] = {}
            for row in rows:
                for found in (again, sources):
                    for key in keys.kept(next(answers)):
                        if bool(key.number("take")) == bool(row.request.permits):  # (a lock takes none)
                            found[row.place] = key
            repeated = [row for row in rows if row.place in again]
            if repeated:
                self._confirm(repeated, again, outcomes, deadline)
            rows = [row for row in rows if row.place in sources and row.place not in again]
            if rows:
                rows = self._move(rows, sources, outcomes, deadline)
            if not rows:
                return
        raise StoreUnavailable("etcd: others wrote to the same lease all the time")

    def _move(
        self, rows: list[Row], sources: dict[int, keys.Kept], outcomes: list[Any], deadline: Deadline
    ) -> list[Row]:
        """Put the new claims in the place of those that were seen; the rows whose lease had changed."""
        since = wall_now()

        def text(row: Row, lease: str) -> str:
            seen = sources[row.place]
            value = keys.value_of(row.request, since, seen.shown().take)
            mine = keys.put(self._claim_of(row), value, lease)
            # (As it was read: had it been reduced since, this would take more again.)
            return keys.txn([keys.same(seen)], [keys.delete(seen.key), mine])

        ttls = [whole(row.request.ttl) for row in rows]
        leases, sent = self._leases.attach(rows, text, ttls, deadline)
        changed, granted = [], []
        for row, ttl, (succeeded, _, revision) in zip(rows, ttls, sent.results, strict=True):
            if succeeded:
                outcomes[row.place] = Granted(revision, since, row.request.slot)
                self._leases.ended(row.request.from_claim, released=False)
                granted.append((ttl, row.request.claim_id))
            else:
                changed.append(row)
        self._leases.granted(leases, granted)
        return changed

    def _source_of(self, row: Row) -> str:
        return self._layout.claim(row.request.name, row.request.from_claim, row.request.slot)

    # -- acquiring ------------------------------------------------------------------------------------------------

    def _acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        pools = [row for row in rows if row.request.permits]
        if pools:
            self._pools.acquire(pools, outcomes, deadline)
        locks = [row for row in rows if not row.request.permits]
        if locks:
            self._acquire_locks(locks, outcomes, deadline)

    def _acquire_locks(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
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
            value = f'{{"holder":{json.dumps(row.request.holder, ensure_ascii=False)}}}'
            look = [
                keys.get_all(self._layout.permit(name), keys.FIRST),
                keys.get_all(keys.Span(line.first, place), keys.LAST),
            ]
            return keys.txn([], [keys.put(place, value, lease), *look])

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
            self._confirm(mine, held, outcomes, deadline)
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

    def _confirm(self, rows: list[Row], mine: dict[int, keys.Kept], outcomes: list[Any], deadline: Deadline) -> None:
        """Grant again to those who hold already: their leases last a ttl from now, as after a renewal."""
        slots = {row.place: mine[row.place].permit()[0] for row in rows}
        asked = [(row.place, row.request) for row in rows]
        renewals = [Row(place, Renew(r.name, r.claim_id, r.ttl, slots[place])) for place, r in asked]
        self._renew(renewals, outcomes, deadline)
        for row in rows:
            if type(outcomes[row.place]) is not Renewed:
                raise StoreUnavailable("etcd: a lease ended while its grant was repeated")
            shown = mine[row.place].shown()
            outcomes[row.place] = Granted(shown.fencing_token, shown.since, slots[row.place])

    def _claim_of(self, row: Row) -> str:
        slot = 1 if type(row.request) is Acquire else row.request.slot
        return self._layout.claim(row.request.name, row.request.claim_id, slot)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        held, waiting = self._layout.between(first, before)
        answers, _ = self._flights.operations([keys.get_all(held), keys.get_all(waiting, keys.KEYS_ONLY)], deadline)
        count: dict[str, int] = {}
        for key in keys.kept(answers[1]):
            name = key.name(len(self._layout.lines))
            count[name] = count.get(name, 0) + 1
        start = len(self._layout.leases)
        found = [key for key in keys.kept(answers[0]) if key.key != self._layout.head(key.name(start))]
        times, _ = self._leases.times_left(dict.fromkeys(key.lease for key in found), deadline)
        now = wall_now()
        shown = []
        for key in found:
            name, left = key.name(start), times[key.lease].free_in
            holder, token, since, info, take = key.shown()
            others = count.get(name, 0)
            shown.append(StoredLease(name, key.permit()[0], holder, token, since, now + left, left, info, others, take))
        return sorted(shown, key=itemgetter(0, 1))

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        answers, _ = self._flights.operations([keys.get_all(self._layout.slots(name))], deadline)
        for key in keys.kept(answers[0]):
            if key.shown().fencing_token != fencing_token:
                continue
            marker = self._layout.claim(name, "", key.permit()[0])
            if key.key == marker and not now:
                return True
            ends = [keys.delete(key.key)]
            if not now:
                ends.append(keys.put(marker, keys.marker_of(key), key.lease))
            try:
                return self._flights.transactions([keys.txn([keys.unchanged(key)], ends)], deadline).results[0][0]
            except LeaseGone:
                return False
        return False

    def purge(self, older_than: float, deadline: Deadline) -> int:
        """Of free locks nothing is kept: the floor under tokens is the cluster's revision. Of others the head is."""
        return self._pools.purge(older_than, deadline)

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make; but what is wrong with address, login or rights is said now."""
        permit = self._layout.permit("")
        self._flights.operations([keys.get_all(permit, keys.FIRST), keys.delete(permit.first)], deadline)

    def schema(self) -> str:
        prefix = self._layout.prefix
        return (
            f"# Nothing to make. With authentication on, a user for dibs needs this and no more:\n"
            f"etcdctl role add dibs\netcdctl role grant-permission dibs readwrite --prefix=true {prefix}\n"
            f"etcdctl user add dibs\netcdctl user grant-role dibs dibs\n"
        )

    def check(self, deadline: Deadline) -> list[Finding]:
        self._facts = self._read_facts(deadline)
        shortest_s = whole(CAPABILITIES.ttl_min_s)
        return etcd_check.findings(self._gateway, self._access, self._facts, shortest_s, deadline)

    def _read_facts(self, deadline: Deadline) -> etcd_check.Facts:
        return etcd_check.read(self._gateway, self._layout.claim("", ""), deadline)

    def watch(self, address: str, deadline: Deadline) -> EtcdWatch | None:
        if not etcd_watch.available:
            return None
        return etcd_watch.EtcdWatch(address, Gateway(self._access), self._watches)

    def close(self) -> None:
        self._gateway.close()


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


def _unsure(release: Release) -> bool:
    """Whether it is for a claim that was never told its ticket or its slot."""
    return release.ticket == ANY_TICKET or release.slot == ANY_SLOT


def _rounds(requests: Sequence[Request]) -> list[list[Row]]:
    """The vector in rounds of different names, in the order given for each name; nearly always a single one."""
    rounds: list[list[Row]] = []
    seen: dict[str, int] = {}
    for index, request in enumerate(requests):
        number = seen.get(request.name, 0)
        seen[request.name] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(Row(index, request))
    return rounds


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``etcd://user:password@host:port,host:port/?prefix=dibs/`` points; ``etcds://`` is with TLS.

    Options: prefix (of all keys, ``dibs/``); with TLS ca (certificates to trust; the system's by default), cert and key
    (this client's own). Several hosts are members of one cluster.
    """
    prefix = options.pop("prefix", PREFIX)
    if not prefix.isprintable():
        raise InvalidOption("the URL option prefix must be printable characters, for people who look at the keys")
    access = access_to(url, options)
    hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in access.endpoints)
    watches: dict[str, EtcdWatch] = {}
    shown = f"{url.scheme}://{hosts}/" + ("" if prefix == PREFIX else f"?prefix={prefix}")
    return StoreAddress(shown, CAPABILITIES, lambda: EtcdStore(access, prefix, watches))
