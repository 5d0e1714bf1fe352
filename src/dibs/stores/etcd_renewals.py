"""How leases on etcd are renewed: their etcd leases are kept alive, or their keys move to others."""

from __future__ import annotations

from math import ceil

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import wall_now
from dibs.errors import StoreUnavailable
from dibs.store import Granted, Renew, Renewed
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_leases import NO_TIME, Row, keepalives, whole

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.etcd_flights import Flights
    from dibs.stores.etcd_leases import Leases


class Renewals:
    def __init__(self, layout: keys.Layout, flights: Flights, leases: Leases) -> None:
        self._layout = layout
        self._flights = flights
        self._leases = leases

    def renew(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows = [row for row in rows if row.request.claim_id]
        looks = [keys.get(self._layout.claim_of(row.request)) for row in rows]
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

    def confirm(self, rows: list[Row], mine: dict[int, keys.Kept], outcomes: list[Any], deadline: Deadline) -> None:
        """Grant again to those who hold already: their leases last a ttl from now, as after a renewal."""
        slots = {row.place: mine[row.place].permit()[0] for row in rows}
        asked = [(row.place, row.request) for row in rows]
        renewals = [Row(place, Renew(r.name, r.claim_id, r.ttl, slots[place])) for place, r in asked]
        self.renew(renewals, outcomes, deadline)
        for row in rows:
            if type(outcomes[row.place]) is not Renewed:
                raise StoreUnavailable("etcd: a lease ended while its grant was repeated")
            shown = mine[row.place].shown()
            outcomes[row.place] = Granted(shown.fencing_token, shown.since, slots[row.place])
