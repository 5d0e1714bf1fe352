"""etcd: a lease is a key that one transaction made because the name had none, attached to an etcd lease of its ttl.

*A permit* is the range of keys ``<prefix>lease/<name>\\0/1/``; *a grant* is the transaction "no key in that range: put
``…/1/<claim id>``". As the claim id stands in the key, being the holder is the existence of one's own key: a release
deletes that key and no other, a repetition finds it there. Values are JSON for people: holder, since, ttl, info.

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
from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from dibs.clock import boot_now, wall_now
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.store import (
    ANY_TICKET,
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoredLease,
    Transfer,
)
from dibs.stores import etcd_check, etcd_watch
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_gateway import Access, Gateway, NoSpace, Refusal, access_to
from dibs.trust import DRIFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
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
)
# What a URL may carry besides.
OPTIONS = ("prefix", "ca", "cert", "key")
PREFIX = "dibs/"
# etcd takes 128 operations a transaction (--max-txn-ops), and counts those of nested ones with their parents'.
OPS_MAX = 120
# Questions after etcd leases in one flight.
FLIGHT_MAX = 500
# Places in line vanish this long after their client's last question.
LINE_TTL_S = 10
# How long a free name is kept for waiters ahead that do not ask, from when it was *seen* free. A waiter looks once a
# second at least (dibs.waiting.POLL_MAX_S): whoever is alive comes within this, and the dead delay the line by a look
# and this together, within the promised 2 s.
SEEN_FREE_S = 0.95
# What a store remembers: free names kept for others, grants whose etcd lease it will use again, idle leases of a ttl.
FREE_MAX = 10_000
USES_MAX = 100_000
IDLE_MAX = 64
# How often a transfer looks again because the lease changed between the look and the write.
TRANSFER_TRIES = 8
# Of an etcd lease in its last second no more is known than that.
LAST_SECOND_S = 0.5


class _Row(NamedTuple):
    """A request and its place in the vector."""

    place: int
    request: Any


class _Lease(NamedTuple):
    """An etcd lease for grants: its id, its ttl, and when it was asked for or for its last keepalive."""

    id: str
    ttl: int
    asked_at: float

    def lasts(self, ttl: float, now: float) -> bool:
        """Whether it certainly lasts ``ttl`` seconds from ``now``, whatever the clocks."""
        return (now - self.asked_at) / (1.0 - DRIFT) <= self.ttl - ttl


class _Sent(NamedTuple):
    """What became of a flight of transactions."""

    #: Of each: whether its comparisons held, the answers of the branch taken, and the revision.
    results: list[tuple[bool, list[Any], int]]
    #: The terms of raft in which anything of it was answered.
    terms: set[str]


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


class _LeaseGone(Exception):
    """A transaction would have hung a key on an etcd lease that is not there."""


class EtcdStore:
    def __init__(self, access: Access, prefix: str, watches: dict[str, EtcdWatch]) -> None:
        self._access = access
        self._gateway = Gateway(access)
        self._layout = keys.Layout(prefix)
        self._watches = watches  # of the clients of this process, by their addresses
        self._facts: etcd_check.Facts | None = None
        # Etcd leases on which nothing hangs, by ttl.
        self._idle: dict[int, deque[_Lease]] = {}
        # Those on which grants of this store hang, by claim; how many grants do, by the lease's id.
        self._lease_of: dict[str, _Lease] = {}
        self._grants_on: dict[str, int] = {}
        self._line_lease = ""
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
        return outcomes

    # -- releasing ------------------------------------------------------------------------------------------------

    def _release(self, rows: list[_Row], outcomes: list[Any], deadline: Deadline) -> None:
        places = self._places_of([row for row in rows if row.request.ticket == ANY_TICKET], deadline)
        deletions: list[str] = []
        owners: list[_Row | None] = []  # whose grant a deletion ends, if any
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
        for owner, answer in zip(owners, self._operations(deletions, deadline)[0], strict=True):
            if owner is not None:
                self._ended(owner, "deleted" in answer["response_delete_range"], outcomes)
        keeping = [row for row in rows if row.request.claim_id and row.request.keep]
        if keeping:
            self._release_later(keeping, outcomes, deadline)

    def _release_later(self, rows: list[_Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key that is no claim's in the place of the holder's, for as long as the name is kept."""
        spans = [keys.get_all(self._layout.permit(row.request.name), keys.FIRST) for row in rows]
        found = self._operations(spans, deadline)[0]
        mine: dict[int, keys.Kept] = {}
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                if key.key == self._claim_of(row):
                    mine[row.place] = key
        rows = [row for row in rows if row.place in mine]

        def text(row: _Row, lease: str) -> str:
            key = mine[row.place]
            value = keys.marker_of(key, row.request.info)
            marker = keys.put(self._layout.claim(row.request.name, ""), value, lease)
            return keys.txn([keys.unchanged(key)], [keys.delete(key.key), marker])

        _, sent = self._attach(rows, text, [ceil(row.request.keep) for row in rows], deadline)
        for row, (released, _, _) in zip(rows, sent.results, strict=True):
            self._ended(row, released, outcomes)

    def _places_of(self, rows: list[_Row], deadline: Deadline) -> dict[int, list[str]]:
        """The places in line of claims that were never told their ticket."""
        lines = [keys.get_all(self._layout.line(row.request.name), keys.KEYS_ONLY) for row in rows]
        return {
            row.place: [key.key for key in keys.kept(answer) if key.place()[1] == row.request.claim_id]
            for row, answer in zip(rows, self._operations(lines, deadline)[0], strict=True)
        }

    def _ended(self, row: _Row, released: bool, outcomes: list[Any]) -> None:
        """Note the end of a grant. An etcd lease on which all grants have ended is put by for the next."""
        outcomes[row.place] = RELEASED if released else GONE
        lease = self._lease_of.pop(row.request.claim_id, None)
        if lease is None:
            return
        grants = self._grants_on.pop(lease.id, 0)
        if not released or not grants:  # it was broken, perhaps, and its marker hangs there
            return
        if grants > 1:
            self._grants_on[lease.id] = grants - 1
        else:
            self._put_by(lease)

    def _put_by(self, lease: _Lease) -> None:
        self._idle.setdefault(lease.ttl, deque(maxlen=IDLE_MAX)).append(lease)

    # -- renewing -------------------------------------------------------------------------------------------------

    def _renew(self, rows: list[_Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows = [row for row in rows if row.request.claim_id]
        looks = [keys.get(self._layout.claim(row.request.name, row.request.claim_id)) for row in rows]
        found = self._operations(looks, deadline)[0]
        hanging: dict[str, list[_Row]] = {}
        seen: dict[int, keys.Kept] = {}
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                hanging.setdefault(key.lease, []).append(row)
                seen[row.place] = key
        times, terms = self._times_left(hanging, deadline, with_keys=True)
        # An etcd lease is kept alive when all that hang on it are renewed for its ttl. Of the others, those move to a
        # new one that would not last as long as they should: so none is shortened.
        alive = [
            lease
            for lease, group in hanging.items()
            if times[lease].keys == len(group) and {_whole(row.request.ttl) for row in group} == {times[lease].ttl}
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

            def text(row: _Row, lease: str) -> str:
                key = seen[row.place]
                return keys.txn([keys.unchanged(key)], [keys.move(key.key, lease)])

            leases, sent = self._attach(moving, text, [_whole(row.request.ttl) for row in moving], deadline)
            lease_of.update((row.place, leases[_whole(row.request.ttl)].id) for row in moving)
            terms |= sent.terms
        before = [("lease/keepalive", _keepalives(alive))] if alive else []
        rows = [row for row in rows if row.place in seen]
        looks = [keys.get(key.key) for key in seen.values()]
        found, again = self._operations(looks, deadline, before)
        now = wall_now()
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                if key.lease != lease_of[row.place] or len(terms | again) > 1:
                    # Somebody else moved it, or there was a change of leader: what was kept alive may be no more.
                    raise StoreUnavailable("etcd: a renewal was overtaken, by another one or by a change of leader")
                outcomes[row.place] = Renewed(now + max(row.request.ttl, times.get(key.lease, _NO_TIME).left))

    def _times_left(
        self, leases: Iterable[str], deadline: Deadline, *, with_keys: bool = False
    ) -> tuple[dict[str, _Time], set[str]]:
        """How long etcd leases have left, and the terms in which that was answered."""
        asked = [lease for lease in leases if lease != "0"]
        more = ',"keys":true' if with_keys else ""
        times: dict[str, _Time] = {"0": _NO_TIME}
        terms: set[str] = set()
        for start in range(0, len(asked), FLIGHT_MAX):
            part = asked[start : start + FLIGHT_MAX]
            flight = [("lease/timetolive", f'{{"ID":"{lease}"{more}}}') for lease in part]
            for lease, answer in zip(part, self._gateway.flight(flight, deadline), strict=True):
                if type(answer) is Refusal:
                    times[lease] = _NO_TIME
                    continue
                left = max(0, int(answer.get("TTL", 0)))  # -1 when it is gone
                times[lease] = _Time(int(answer.get("grantedTTL", 0)), left, len(answer.get("keys", ())))
                terms.add(answer["header"]["raft_term"])
        return times, terms

    # -- transferring ---------------------------------------------------------------------------------------------

    def _transfer(self, rows: list[_Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key on an etcd lease of ours in the place of the holder's: the revision of that is the token."""
        rows = [row for row in rows if row.request.from_claim]
        for _ in range(TRANSFER_TRIES):
            looks = [keys.get_all(self._layout.permit(row.request.name), keys.FIRST) for row in rows]
            holders = {
                row.place: key
                for row, answer in zip(rows, self._operations(looks, deadline)[0], strict=True)
                for key in keys.kept(answer)
            }
            again = [row for row in rows if row.place in holders and holders[row.place].key == self._claim_of(row)]
            if again:
                views = {row.place: _View(0, holders[row.place], [], None, False) for row in again}
                self._confirm(again, views, outcomes, deadline)
            moving = [row for row in rows if row.place in holders and holders[row.place].key == self._source_of(row)]
            if not moving:
                return
            rows = self._move(moving, holders, outcomes, deadline)
        if rows:
            raise StoreUnavailable("etcd: others wrote to the same lease all the time")

    def _move(
        self, rows: list[_Row], holders: dict[int, keys.Kept], outcomes: list[Any], deadline: Deadline
    ) -> list[_Row]:
        """Put the new claims in the place of those that were seen; the rows whose lease had changed."""
        since = wall_now()

        def text(row: _Row, lease: str) -> str:
            seen = holders[row.place]
            mine = keys.put(self._claim_of(row), keys.value_of(row.request, since), lease)
            return keys.txn([keys.unchanged(seen)], [keys.delete(seen.key), mine])

        _, sent = self._attach(rows, text, [_whole(row.request.ttl) for row in rows], deadline)
        changed = []
        for row, (succeeded, _, revision) in zip(rows, sent.results, strict=True):
            if succeeded:
                outcomes[row.place] = Granted(revision, since)
                self._lease_of.pop(row.request.from_claim, None)
            else:
                changed.append(row)
        return changed

    def _source_of(self, row: _Row) -> str:
        return self._layout.claim(row.request.name, row.request.from_claim)

    # -- acquiring ------------------------------------------------------------------------------------------------

    def _acquire(self, rows: list[_Row], outcomes: list[Any], deadline: Deadline) -> None:
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
        late = [row for row in late if row.request.wake is not None and not views[row.place].in_line]
        if late:  # somebody else was quicker
            self._enter(late, views, deadline)
        self._answer([row for row in rows if type(outcomes[row.place]) is not Granted], views, outcomes, deadline)

    def _was_woken(self, request: Acquire) -> bool:
        watch = self._watches.get(request.wake) if request.wake is not None else None
        return watch is not None and watch.has_told(request.name)

    def _grant(
        self, rows: list[_Row], views: dict[int, _View], outcomes: list[Any], deadline: Deadline, *, hopeful: bool
    ) -> list[_Row]:
        """Make the keys of those whose name has none; the others. ``hopeful``: only where nobody stands before them."""
        since = wall_now()

        def text(row: _Row, lease: str) -> str:
            request = row.request
            permit, line, own = self._layout.permit(request.name), self._layout.line(request.name), []
            ticket = request.ticket if hopeful else views[row.place].ticket
            granting = [keys.put(self._claim_of(row), keys.value_of(request, since), lease)]
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

        ttls = [_whole(row.request.ttl) for row in rows]
        leases, sent = self._attach(rows, text, ttls, deadline)
        refused = []
        granted = dict.fromkeys(leases, 0)
        for row, (succeeded, answers, revision) in zip(rows, sent.results, strict=True):
            if succeeded:
                ttl = _whole(row.request.ttl)
                outcomes[row.place] = Granted(revision, since)
                self._free.pop(row.request.name, None)
                granted[ttl] += 1
                if len(self._lease_of) < USES_MAX:
                    self._lease_of[row.request.claim_id] = leases[ttl]
                continue
            refused.append(row)
            if hopeful:
                views[row.place] = _seen(row.request, answers, revision)
            else:
                holder = next(iter(keys.kept(answers[0])), None)
                views[row.place] = views[row.place]._replace(revision=revision, holder=holder)
        for ttl, lease in leases.items():
            if granted[ttl]:
                self._grants_on[lease.id] = granted[ttl]
            else:
                self._put_by(lease)
        return refused

    def _look(self, rows: list[_Row], views: dict[int, _View], deadline: Deadline) -> None:
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
        before = [("lease/keepalive", _keepalives([self._line_lease]))] if self._line_lease else []
        for row, (_, answers, revision) in zip(rows, self._transactions(texts, deadline, before).results, strict=True):
            views[row.place] = _seen(row.request, answers, revision)

    def _enter(self, rows: list[_Row], views: dict[int, _View], deadline: Deadline) -> list[_Row]:
        """Put these in line, or let them be seen asking there; who turns out to be first of a free name."""
        for row in rows:
            view = views[row.place]
            if view.ticket is None:
                last = view.ahead[-1].place()[0] if view.ahead else 0
                views[row.place] = view._replace(ticket=max(view.revision, last + 1))

        def text(row: _Row, lease: str) -> str:
            name, ticket = row.request.name, views[row.place].ticket
            assert ticket is not None
            place, line = self._layout.place(name, ticket, row.request.claim_id), self._layout.line(name)
            value = f'{{"holder":{json.dumps(row.request.holder, ensure_ascii=False)}}}'
            look = [
                keys.get_all(self._layout.permit(name), keys.FIRST),
                keys.get_all(keys.Span(line.first, place), keys.LAST),
            ]
            return keys.txn([], [keys.put(place, value, lease), *look])

        sent = self._in_line(rows, text, deadline)
        first = []
        for row, (_, (_put, permit, line), revision) in zip(rows, sent.results, strict=True):
            holder = next(iter(keys.kept(permit)), None)
            view = _View(revision, holder, keys.kept(line), views[row.place].ticket, True)
            views[row.place] = view
            if holder is None and not view.ahead:  # released in between, when there was nobody to tell
                first.append(row)
        return first

    def _in_line(self, rows: list[_Row], text: Callable[[_Row, str], str], deadline: Deadline) -> _Sent:
        """Send transactions that put places in line, which hang on an etcd lease of this store."""
        if self._line_lease:
            alive = ("lease/keepalive", _keepalives([self._line_lease]))
            try:
                return self._transactions([text(row, self._line_lease) for row in rows], deadline, [alive])
            except _LeaseGone:
                pass  # nobody here has asked for so long that all places are gone
        self._line_lease = self._new_leases([LINE_TTL_S], deadline)[0]
        return self._transactions([text(row, self._line_lease) for row in rows], deadline)

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

    def _answer(self, rows: list[_Row], views: dict[int, _View], outcomes: list[Any], deadline: Deadline) -> None:
        """Say to those who were not granted a name who has it, or that it is theirs already."""
        mine = [row for row in rows if (key := views[row.place].holder) is not None and key.key == self._claim_of(row)]
        if mine:
            self._confirm(mine, views, outcomes, deadline)
        rows = [row for row in rows if outcomes[row.place] is GONE]
        holders = {row.place: key for row in rows if (key := views[row.place].holder) is not None}
        times, _ = self._times_left({key.lease for key in holders.values()}, deadline) if holders else ({}, set())
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

    def _confirm(self, rows: list[_Row], views: dict[int, _View], outcomes: list[Any], deadline: Deadline) -> None:
        """Grant again to those who hold already: their leases last a ttl from now, as after a renewal."""
        self._renew(rows, outcomes, deadline)
        for row in rows:
            holder = views[row.place].holder
            assert holder is not None
            if type(outcomes[row.place]) is not Renewed:
                raise StoreUnavailable("etcd: a lease ended while its grant was repeated")
            shown = holder.shown()
            outcomes[row.place] = Granted(shown.fencing_token, shown.since)

    def _claim_of(self, row: _Row) -> str:
        return self._layout.claim(row.request.name, row.request.claim_id)

    # -- etcd leases, and flights ---------------------------------------------------------------------------------

    def _attach(
        self, rows: list[_Row], text: Callable[[_Row, str], str], ttls: list[int], deadline: Deadline
    ) -> tuple[dict[int, _Lease], _Sent]:
        """Send a transaction for each row that may hang a key on an etcd lease of its ttl; one lease for each ttl.

        From now on the leases last what the rows' requests ask for, or longer.
        """
        now = boot_now()
        for again in (False, True):
            leases: dict[int, _Lease] = {}
            older: list[str] = []
            for ttl in set(ttls):
                if again:
                    self._idle.pop(ttl, None)  # as old as the one that was gone
                elif self._idle.get(ttl):
                    lease = leases[ttl] = self._idle[ttl].pop()
                    asked = [row.request for row, its in zip(rows, ttls, strict=True) if its == ttl]
                    if not all(type(one) is Acquire and lease.lasts(one.ttl, now) for one in asked):
                        older.append(lease.id)
                        leases[ttl] = lease._replace(asked_at=now)
            before = [("lease/keepalive", _keepalives(older))] if older else []
            missing = [ttl for ttl in set(ttls) if ttl not in leases]
            for ttl, new in zip(missing, self._new_leases(missing, deadline), strict=True):
                leases[ttl] = _Lease(new, ttl, now)
            texts = [text(row, leases[ttl].id) for row, ttl in zip(rows, ttls, strict=True)]
            try:
                sent = self._transactions(texts, deadline, before)
            except _LeaseGone:
                continue
            if before and len(sent.terms) > 1:
                raise StoreUnavailable("etcd: the leader changed during a keepalive, which may have been in vain")
            return leases, sent
        raise StoreUnavailable("etcd: a lease was gone as soon as it was granted")

    def _new_leases(self, ttls: list[int], deadline: Deadline) -> list[str]:
        if not ttls:
            return []
        answers = self._gateway.flight([("lease/grant", f'{{"TTL":"{ttl}"}}') for ttl in ttls], deadline)
        return [answer["ID"] for answer in answers]

    def _transactions(self, texts: list[str], deadline: Deadline, before: Sequence[tuple[str, str]] = ()) -> _Sent:
        """Send transactions, each atomic by itself: many as parts of one, which etcd writes to its log at once."""
        flight = list(before)
        if len(texts) == 1:
            flight.append(("kv/txn", texts[0]))
        else:
            for start in range(0, len(texts), OPS_MAX):
                nested = (f'{{"request_txn":{text}}}' for text in texts[start : start + OPS_MAX])
                flight.append(("kv/txn", keys.txn((), nested)))
        answers = self._gateway.flight(flight, deadline)
        results: list[tuple[bool, list[Any], int]] = []
        for answer in answers[len(before) :]:
            if type(answer) is Refusal:
                raise _LeaseGone
            revision = int(answer["header"]["revision"])
            parts = [answer] if len(texts) == 1 else [part["response_txn"] for part in answer["responses"]]
            results += [(part.get("succeeded", False), part.get("responses", []), revision) for part in parts]
        return _Sent(results, _terms(answers))

    def _operations(
        self, operations: list[str], deadline: Deadline, before: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[Any], set[str]]:
        """Send reads or deletions; their answers, and the terms in which they were given."""
        if not operations and not before:
            return [], set()
        if len(operations) > 1:
            starts = range(0, len(operations), OPS_MAX)
            together = [("kv/txn", keys.txn((), operations[start : start + OPS_MAX])) for start in starts]
            try:
                answers = self._gateway.flight([*before, *together], deadline)
                return [part for answer in answers[len(before) :] for part in answer["responses"]], _terms(answers)
            except NoSpace:
                pass  # etcd up to 3.5.1 then refuses all transactions, but no read or deletion by itself
        single = [keys.by_itself(operation) for operation in operations]
        answers = self._gateway.flight([*before, *((path, body) for path, body, _ in single)], deadline)
        named = zip(single, answers[len(before) :], strict=True)
        return [{name: answer} for (_, _, name), answer in named], _terms(answers)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        held, waiting = self._layout.between(first, before)
        answers, _ = self._operations([keys.get_all(held), keys.get_all(waiting, keys.KEYS_ONLY)], deadline)
        count: dict[str, int] = {}
        for key in keys.kept(answers[1]):
            name = key.name(len(self._layout.lines))
            count[name] = count.get(name, 0) + 1
        found = keys.kept(answers[0])
        times, _ = self._times_left(dict.fromkeys(key.lease for key in found), deadline)
        now = wall_now()
        shown = []
        for key in found:
            name, left = key.name(len(self._layout.leases)), times[key.lease].free_in
            holder, token, since, info = key.shown()
            shown.append(StoredLease(name, 1, holder, token, since, now + left, left, info, count.get(name, 0)))
        return shown

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        answers, _ = self._operations([keys.get_all(self._layout.permit(name), keys.FIRST)], deadline)
        marker = self._layout.claim(name, "")
        for key in keys.kept(answers[0]):
            if key.shown().fencing_token != fencing_token:
                continue
            if key.key == marker and not now:
                return True
            ends = [keys.delete(key.key)]
            if not now:
                ends.append(keys.put(marker, keys.marker_of(key), key.lease))
            try:
                return self._transactions([keys.txn([keys.unchanged(key)], ends)], deadline).results[0][0]
            except _LeaseGone:
                return False
        return False

    def purge(self, older_than: float, deadline: Deadline) -> int:
        """Nothing is kept of what is free: the floor under the tokens is the cluster's own revision."""
        return 0

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make; but what is wrong with address, login or rights is said now."""
        permit = self._layout.permit("")
        self._operations([keys.get_all(permit, keys.FIRST), keys.delete(permit.first)], deadline)

    def schema(self) -> str:
        prefix = self._layout.prefix
        return (
            f"# Nothing to make. With authentication on, a user for dibs needs this and no more:\n"
            f"etcdctl role add dibs\netcdctl role grant-permission dibs readwrite --prefix=true {prefix}\n"
            f"etcdctl user add dibs\netcdctl user grant-role dibs dibs\n"
        )

    def check(self, deadline: Deadline) -> list[Finding]:
        self._facts = self._read_facts(deadline)
        shortest_s = _whole(CAPABILITIES.ttl_min_s)
        return etcd_check.findings(self._gateway, self._access, self._facts, shortest_s, deadline)

    def _read_facts(self, deadline: Deadline) -> etcd_check.Facts:
        return etcd_check.read(self._gateway, self._layout.claim("", ""), deadline)

    def watch(self, address: str, deadline: Deadline) -> EtcdWatch | None:
        if not etcd_watch.available:
            return None
        return etcd_watch.EtcdWatch(address, Gateway(self._access), self._watches)

    def close(self) -> None:
        self._gateway.close()


class _Time(NamedTuple):
    """Of an etcd lease: its ttl, the whole seconds it has left, and how many keys hang on it."""

    ttl: int
    left: int
    keys: int

    @property
    def free_in(self) -> float:
        """Seconds after which it may have ended."""
        return float(self.left) if self.left else LAST_SECOND_S


_NO_TIME = _Time(0, 0, 0)


def _whole(ttl: float) -> int:
    """The ttl of the etcd lease for one: the next whole second above it, so that a lease just used can serve again."""
    return int(ttl) + 1


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


def _terms(answers: list[Any]) -> set[str]:
    """The terms of raft in which a flight was answered; a keepalive's answer is a list."""
    headers = (message["header"] for answer in answers for message in (answer if type(answer) is list else [answer]))
    return {header["raft_term"] for header in headers}


def _keepalives(leases: Iterable[str]) -> str:
    return "".join(f'{{"ID":"{lease}"}}' for lease in leases)


def _rounds(requests: Sequence[Request]) -> list[list[_Row]]:
    """The vector in rounds of different names, in the order given for each name; nearly always a single one."""
    rounds: list[list[_Row]] = []
    seen: dict[str, int] = {}
    for index, request in enumerate(requests):
        number = seen.get(request.name, 0)
        seen[request.name] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(_Row(index, request))
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
