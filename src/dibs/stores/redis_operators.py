"""What operators see of leases on Redis, break and clear away."""

from __future__ import annotations

from operator import itemgetter

from dibs._typing import TYPE_CHECKING
from dibs.errors import StoreUnavailable
from dibs.store import StoredLease
from dibs.stores.redis_keys import beginning
from dibs.stores.redis_words import GRACE, ROW_KEEP_MS

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.redis_keys import Keys
    from dibs.stores.redis_scripts import Flights


class Operators:
    def __init__(self, flights: Flights, keys: Keys, min_replicas: int) -> None:
        self._flights = flights
        self._keys = keys
        self._min_replicas = min_replicas

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        # Nothing lies between a name and the same with a control character: that is asked for by who wants this one.
        one = before == first + "\x01"
        if one:
            names = [first]
        else:
            names = sorted(self._within(first, before, deadline))
        # Who sees a mark of `once` takes the work for done, so replicas must have it, whoever wrote it.
        confirmed = one and self._min_replicas > 0
        calls, asked, wait = [], [], False
        for slot, some in self._keys.by_slot(names):
            keys = [key for name in some for key in self._keys.of(name)[:2]]
            calls.append(self._flights.script("show").calling(keys, ("1",) if confirmed else (), slot))
            asked.append(some)
        found = []
        for some, rows in zip(asked, self._flights.run(calls, deadline), strict=True):
            for name, of_name in zip(some, rows, strict=True):
                for permit, holder, token, since, until, left, info, take, waiting, unsure in of_name:
                    wait = wait or unsure == 1
                    found.append(
                        StoredLease(
                            name,
                            permit,
                            holder.decode("utf-8", "replace"),
                            int(token),
                            float(since),
                            float(until),
                            float(left),
                            None if info is None else info.decode("utf-8", "replace"),
                            waiting,
                            take,
                        )
                    )
        if wait and (trouble := self._flights.wait_for_replicas(self._min_replicas, deadline)):
            raise StoreUnavailable(trouble, maybe_applied=False)
        found.sort(key=itemgetter(0, 1))
        return found

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        return self._break(name, fencing_token, now, "", deadline)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        return self._break(name, fencing_token, True, repr(expires_at), deadline)

    def _break(self, name: str, fencing_token: int, now: bool, ending: str, deadline: Deadline) -> bool:
        arguments = (str(fencing_token), "1" if now else "", str(ROW_KEEP_MS), GRACE, ending)
        call = self._flights.script("break").calling(self._keys.of(name), arguments, self._keys.slot(name))
        return bool(self._flights.run([call], deadline)[0])

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        names = self._within(first, before, deadline)
        script, arguments = self._flights.script("purge"), (repr(older_than), GRACE, str(ROW_KEEP_MS))
        calls = [
            script.calling([key for name in some for key in self._keys.of(name)], arguments, slot)
            for slot, some in self._keys.by_slot(names)
        ]
        return sum(self._flights.run(calls, deadline))

    def _within(self, first: str, before: str, deadline: Deadline) -> set[str]:
        """The names from the one to the other that have a row."""
        keys = self._flights.scan(self._keys.of(beginning(first, before))[0][:-1], deadline)
        return {name for name in map(self._keys.name_in, keys) if name and first <= name < before}
