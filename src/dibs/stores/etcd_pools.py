"""Permits on etcd: one transaction reads who holds and who waits, a second one grants if what was decided still holds.

A name with permits has a *head*, ``…/0``, that says how many; its holders are the keys ``…/<slot>/<claim id>`` on their
etcd leases, so that they end by themselves. What was read at a revision is granted in one of two ways:

* *Exclusively*: several permits, the first ones of a name, another number of permits. The transaction writes the head,
  and only goes through where that is as it was read and no key was made for the name since.
* *Beside others*: a single permit, in the first of a few slots that is free when the transaction runs, where the head
  is as it was read. Those slots are the smallest that were free, and no more than permits were left. So readers, and
  those who pass a semaphore, need not begin again because one of them was quicker.

Why that is never too many: let the *reach* of a decision be the last slot it may take. When it read, all slots up to
there, if they were filled, and what is taken above them would make no more than there is. It stays so while the head
does: ends and reductions make room; who is granted beside others within this reach takes what was counted as filled;
and who is granted above it has a greater reach, for which this one's free slots were counted as filled, too. Slots are
never held twice, as each grant asks for an empty one.

A name that nobody held or waited for when it was last seen is not read first: its grant rests on that being so still.
Who loses a race is shown what there is now, decides anew, and is told to ask again after ``TRIES``.

Whoever waits writes its place in line each time it asks, to be seen alive. The first in line follows all who hold, the
others the last before them who is alive.
"""

from __future__ import annotations

from itertools import count, islice

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import wall_now
from dibs.errors import StoreUnavailable
from dibs.store import LAST_TICKET, LINE_GRACE_S, Acquire, Granted, Held, Mismatch, Renew, Renewed
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_flights import OPS_MAX
from dibs.stores.etcd_leases import Row, whole
from dibs.stores.etcd_pool_view import ASSUMED, Views
from dibs.stores.permits import Grant, decide

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.etcd_flights import Flights
    from dibs.stores.etcd_leases import Leases
    from dibs.stores.etcd_pool_view import View
    from dibs.stores.etcd_renewals import Renewals
    from dibs.stores.etcd_watch import EtcdWatch
    from dibs.stores.permits import State

# How often a request is decided anew in one call because others were quicker.
TRIES = 20
# Free slots that a transaction tries, and how many such transactions travel as one: at first, and after a lost race.
# Each slot costs the text of the whole grant once more; a request may have 1.5 MB, and a grant has up to 6 kB.
FIRST_SLOTS, FIRST_TOGETHER = 2, 60
MORE_SLOTS, MORE_TOGETHER = 12, 4
# Places of waiters that ask no more, deleted with a grant; the rest is left to the next, or to the end of their leases.
CLEAR_MAX = 3
# What a transaction does for a slot: the grant, its place in line, those of others.
assert MORE_TOGETHER + MORE_SLOTS * (2 + CLEAR_MAX) <= OPS_MAX
assert FIRST_TOGETHER + FIRST_SLOTS * (2 + CLEAR_MAX) <= OPS_MAX
# The head tells purge when permits were last granted, about: it is written again with the first grant after this.
HEAD_AGE_S = 3600.0
# What is told to those who lost every race.
ASK_AGAIN = Held(None, 0, 0.0, 0.0)


class _Asked:
    """A request on its way to its outcome: what was last seen of its name, and what was decided of that."""

    grant: Grant
    entered = False
    head = ""  #: That an exclusive grant writes.
    #: The slots in which a single permit may be granted beside others; none for an exclusive grant.
    beside: list[int]

    def __init__(self, row: Row, view: View) -> None:
        self.place = row.place
        self.request: Acquire = row.request
        self.view = view


class Pools:
    """Decides for one store."""

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
        self.views = Views(layout)

    def acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Decide these acquires of permits, one a name."""
        looking, asking = [], []
        for row in rows:
            view = self.views.idle(row.request)
            if view is None:
                looking.append(row)
            else:
                asking.append(_Asked(row, view))
        if looking:
            asking += self._look(looking, deadline)
        for asked in asking:
            outcomes[asked.place] = ASK_AGAIN
        refused: list[_Asked] = []
        for number in range(TRIES):
            granting: list[_Asked] = []
            repeating: list[_Asked] = []
            entering: list[_Asked] = []
            for asked in asking:
                request, permits = asked.request, asked.view.permits
                state = asked.view.state()
                decision = Mismatch(0) if permits == 0 else decide(state, request)
                if isinstance(decision, Mismatch):
                    outcomes[asked.place] = decision
                elif isinstance(decision, Grant):
                    asked.grant = decision
                    asked.beside = _beside(asked.view, state, decision, MORE_SLOTS if number else FIRST_SLOTS)
                    (granting if decision.again is None else repeating).append(asked)
                elif (request.wake is not None and not asked.entered) or permits != request.permits:
                    entering.append(asked)
                else:
                    refused.append(asked)
            asking = []
            if repeating:
                asking += self._repeat(repeating, outcomes, deadline)
            if granting:
                asking += self._grant(granting, outcomes, deadline, MORE_TOGETHER if number else FIRST_TOGETHER)
            if entering:
                asking += self._enter(entering, deadline)
            if not asking:
                break
        if refused:
            self._refuse(refused, outcomes, deadline)

    def _look(self, rows: list[Row], deadline: Deadline) -> list[_Asked]:
        texts = [keys.txn((), self.views.asked(row.request.name)) for row in rows]
        sent = self._flights.transactions(texts, deadline)
        return [
            _Asked(row, self.views.seen(row.request.name, answers, revision))
            for row, (_, answers, revision) in zip(rows, sent.results, strict=True)
        ]

    # -- granting -------------------------------------------------------------------------------------------------

    def _grant(self, asking: list[_Asked], outcomes: list[Any], deadline: Deadline, together_max: int) -> list[_Asked]:
        """Make the keys of those who are to be granted; those for whom somebody else was quicker."""
        since = wall_now()
        ttls = [whole(asked.request.ttl) for asked in asking]
        leases, sent = self._leases.attach(
            asking, lambda asked, lease: self._granting(asked, lease, since), ttls, deadline, together_max
        )
        granted, late = [], []
        for asked, (succeeded, answers, revision) in zip(asking, sent.results, strict=True):
            request = asked.request
            slot, shown = _slot_of(asked.beside or [asked.grant.slot], succeeded, answers)
            if slot is None:
                asked.view = self.views.seen(request.name, shown, revision)
                late.append(asked)
            else:
                outcomes[asked.place] = Granted(revision, since, slot)
                granted.append((whole(request.ttl), request.claim_id))
                self.views.granted(request, asked.view, asked.head, revision)
        self._leases.granted(leases, granted)
        return late

    def _granting(self, asked: _Asked, lease: str, since: float) -> str:
        """The transaction that grants, or shows what there is."""
        request, view, otherwise = asked.request, asked.view, self.views.asked(asked.request.name)
        name, value, own = request.name, keys.value_of(request, since, request.take), view.own(request)
        silent = (
            keys.delete(key.key)
            for key, silence in zip(view.line, view.silences, strict=True)
            if key is not own and silence >= LINE_GRACE_S
        )
        leaving = [*islice(silent, CLEAR_MAX), *([] if own is None else [keys.delete(own.key)])]
        asked.head = ""
        for slot in reversed(asked.beside):
            assert view.head is not None
            granting = [keys.put(self._layout.claim(name, request.claim_id, slot), value, lease), *leaving]
            free = [keys.same(view.head), keys.nothing_in(self._layout.slot(name, slot))]
            text = keys.txn(self._alone(name, view) if view.revision == ASSUMED else free, granting, otherwise)
            otherwise = [keys.nested(text)]
        if asked.beside:
            return text
        granting = [keys.put(self._layout.claim(name, request.claim_id, asked.grant.slot), value, lease), *leaving]
        asked.head = keys.head_of(asked.grant.permits, since)
        granting.append(keys.put(self._layout.head(name), asked.head, "0"))
        return keys.txn(self._alone(name, view), granting, otherwise)

    def _alone(self, name: str, view: View) -> list[str]:
        """The comparisons that are true while nobody was granted anything since a view, nor the limit changed."""
        permit = self._layout.permit(name)
        if view.revision == ASSUMED and view.head is not None:
            still_idle = [keys.nothing_in(self._layout.slots(name)), keys.nothing_in(self._layout.line(name))]
            return [keys.same(view.head), *still_idle]
        if view.head is None:
            return [keys.nothing_in(permit)]
        return [keys.same(view.head), keys.none_newer(permit, view.revision)]

    def _repeat(self, asking: list[_Asked], outcomes: list[Any], deadline: Deadline) -> list[_Asked]:
        """Grant again to those who hold, fewer permits if they ask for fewer; those whose key has changed meanwhile."""
        late = self._reduce(asking, deadline)
        asking = [asked for asked in asking if asked not in late]
        renewals = []
        for asked in asking:
            request = asked.request
            renewals.append(Row(asked.place, Renew(request.name, request.claim_id, request.ttl, asked.grant.slot)))
        self._renewals.renew(renewals, outcomes, deadline)
        for asked in asking:
            if type(outcomes[asked.place]) is not Renewed:
                raise StoreUnavailable("etcd: a lease ended while its grant was repeated")
            held = asked.grant.again
            assert held is not None
            outcomes[asked.place] = Granted(held.fencing_token, held.acquired_at, held.slot)
        return late

    def _reduce(self, asking: list[_Asked], deadline: Deadline) -> list[_Asked]:
        """Write how many permits they keep who ask for fewer than they hold; those whose key has changed meanwhile."""
        texts: list[str] = []
        fewer: list[_Asked] = []
        for asked in asking:
            request, grant = asked.request, asked.grant
            assert grant.again is not None
            if grant.take == grant.again.take:
                continue
            claim = self._layout.claim(request.name, request.claim_id, grant.slot)
            key = next(key for key in asked.view.holders if key.key == claim)
            put = keys.put(claim, keys.value_of(request, grant.again.acquired_at, request.take), key.lease)
            # As it was read: were it reduced further meanwhile, this would be more again.
            texts.append(keys.txn([keys.same(key)], [put], self.views.asked(request.name)))
            fewer.append(asked)
        late = []
        sent = self._flights.transactions(texts, deadline) if texts else None
        for asked, (succeeded, answers, revision) in zip(fewer, sent.results if sent else (), strict=True):
            if not succeeded:
                asked.view = self.views.seen(asked.request.name, answers, revision)
                late.append(asked)
        return late

    # -- the line, and who is refused -----------------------------------------------------------------------------

    def _enter(self, asking: list[_Asked], deadline: Deadline) -> list[_Asked]:
        """Put these in line, or let them be seen asking there, and set the limit; all of them, with what there is then.

        In between there may have been a release that had nobody to tell.
        """
        sent = self._leases.in_line(asking, self._entering, deadline)
        for asked, (succeeded, answers, revision) in zip(asking, sent.results, strict=True):
            asked.view = self.views.seen(asked.request.name, answers, revision)
            asked.entered = asked.entered or succeeded
        return asking

    def _entering(self, asked: _Asked, lease: str) -> str:
        request, view = asked.request, asked.view
        name, rests_on, acts = request.name, [], []
        if request.wake is not None:
            own = view.own(request)
            ticket = request.ticket if own is None else own.place()[0]
            if not ticket:
                ticket = max(view.revision, view.line[-1].place()[0] + 1 if view.line else 0)
            acts.append(keys.put(self._layout.place(name, ticket, request.claim_id), keys.place_of(request), lease))
        if view.permits != request.permits:
            rests_on = self._alone(name, view)
            acts.append(keys.put(self._layout.head(name), keys.head_of(request.permits, wall_now()), "0"))
        show = self.views.asked(name)
        return keys.txn(rests_on, [*acts, *show], show)

    def _refuse(self, asking: list[_Asked], outcomes: list[Any], deadline: Deadline) -> None:
        """Say who has the permits and for how long, and follow whoever stands in the way."""
        leases = {key.lease for asked in asking for key in asked.view.holders}
        times, _ = self._leases.times_left(leases, deadline) if leases else ({}, set())
        ends_in = {lease: time.free_in for lease, time in times.items()}
        for asked in asking:
            request, view = asked.request, asked.view
            own = view.own(request)
            place = LAST_TICKET if own is None else own.place()[0]
            held = decide(view.state(ends_in), request)
            assert isinstance(held, Held)  # as before: it does not depend on when leases end
            ahead = [
                (silence, key.key)
                for key, silence in zip(view.line, view.silences, strict=True)
                if key.place()[0] < place and silence < LINE_GRACE_S
            ]
            if held.holder is None and ahead:
                held = held._replace(free_in=LINE_GRACE_S - max(silence for silence, _ in ahead))
            outcomes[asked.place] = held if own is None else held._replace(ticket=place)
            watch = self._watches.get(request.wake) if request.wake is not None else None
            if watch is not None and ahead:
                watch.follow(request.name, ahead[-1][1], view.revision)
            elif watch is not None:
                number = len(view.holders) + (view.head is not None)
                watch.follow_all(request.name, self._layout.permit(request.name), view.revision, number)

    # -- what operators do ----------------------------------------------------------------------------------------

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        """Forget the number of permits of names that nobody holds or waits for; how many there were."""
        within, _ = self._layout.between(first, before)
        (answer,), _ = self._flights.operations([keys.get_all(within)], deadline)
        since, texts = wall_now() - older_than, []
        for key in keys.kept(answer):
            name = key.name(self._layout.leases)
            if key.key == self._layout.head(name) and key.number("at") <= since:
                idle = [keys.nothing_in(self._layout.slots(name)), keys.nothing_in(self._layout.line(name))]
                texts.append(keys.txn([keys.same(key), *idle], [keys.delete(key.key)]))
        if not texts:
            return 0
        sent = self._flights.transactions(texts, deadline, together_max=OPS_MAX - 3)
        return sum(succeeded for succeeded, _, _ in sent.results)


def _beside(view: View, state: State, grant: Grant, slots_max: int) -> list[int]:
    """The slots in which a single permit can be granted beside others; none where it takes an exclusive grant."""
    head = view.head
    if head is None or grant.take > 1 or grant.permits != state.permits:
        return []
    if abs(wall_now() - head.number("at")) > HEAD_AGE_S:
        return []
    if view.revision == ASSUMED:
        return [grant.slot]
    taken = {holding.slot for holding in state.holdings}
    free = (slot for slot in count(1) if slot not in taken)
    return list(islice(free, min(slots_max, grant.left + 1)))


def _slot_of(slots: list[int], succeeded: bool, answers: list[Any]) -> tuple[int | None, list[Any]]:
    """In which of the slots a transaction granted; None, and what it showed, where it did not."""
    for slot in slots:
        if succeeded:
            return slot, answers
        if "response_txn" not in answers[0]:
            break
        part = answers[0]["response_txn"]
        succeeded, answers = part.get("succeeded", False), part.get("responses", [])
    return None, answers
