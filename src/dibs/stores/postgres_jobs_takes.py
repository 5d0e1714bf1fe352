"""Takes of jobs on PostgreSQL: where to look, what is told again, and what is told when there is nothing."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.jobs import NO_TRIES_LEFT, NOTHING_CLAIMED, Taken
from dibs.store import Held
from dibs.stores import postgres_jobs_wire as wire
from dibs.stores.postgres_jobs_places import Place, Places
from dibs.stores.postgres_jobs_turns import Turns
from dibs.stores.postgres_wire import elements, float8, numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.jobs import Take
    from dibs.stores.postgres_jobs_flights import JobFlights


class Takes:
    def __init__(self, flights: JobFlights) -> None:
        self._flights = flights
        self._places = Places()
        self._turns = Turns(flights)

    def forget(self) -> None:
        """It is not known what became of the last request."""
        self._places.forget()

    def given_back(self, name: str, result: PGresult) -> None:
        """These jobs are free again, at their old places."""
        place = self._places.get(name)
        if place is not None:
            columns = [elements(result.get_value(0, column)) for column in (1, 2, 0)]
            for rank, due, job in zip(*columns, strict=True):
                place.given_back(rank, due, job)

    def ended(self, name: str, jobs: Iterable[int], now: float) -> None:
        """These jobs will not be claimed again, or not soon."""
        place = self._places.get(name)
        if place is not None:
            place.ended(jobs, now)

    def take(self, request: Take, deadline: Deadline) -> Taken | Held:
        name = request.name
        place = self._places.get(name)
        if not request.n:
            return self._mine(request, deadline) or NOTHING_CLAIMED
        if place is None or place.asked(request.claim_id):
            mine = self._mine(request, deadline)
            if mine is not None:
                return mine
        now = deadline.now()
        look_back, levels_s = place is None or place.is_due(now), 0.0
        if look_back:
            ranks, levels_s = self._levels(name, deadline)
            if place is None:
                place = self._places.begin(name, ranks)
                place.asked(request.claim_id)
            else:
                place.rewind(ranks)
        assert place is not None
        while True:
            behind = look_back or place.may_look_behind(now)
            try:
                found = self._take_once(request, place, deadline, behind=behind, look_back=look_back)
            except wire.PriorityUntold:
                ranks, took_s = self._levels(name, deadline)
                place.learn(ranks)
                levels_s += took_s
                continue
            if found.exhausted:
                self._flights.run([("BURY", (wire.ids(found.exhausted), NO_TRIES_LEFT.encode()))], deadline)
            if found.taken is not None or not found.exhausted:
                break
        if found.taken is not None:
            few = len(found.taken.jobs) + len(found.exhausted) < request.n
            if look_back or (found.everything and few):
                place.looked_behind(now, levels_s + found.took_s)
            return found.taken
        place.answered(request.claim_id)
        if not found.everything:
            if look_back:
                place.looked_behind(now, levels_s + found.took_s)
            return Held(None, 0, 0.0, max(0.0, place.rest_s(now)))
        (result,) = self._flights.run([("NEXT", (name.encode(), b"%d" % request.group_limit))], deadline)
        free_in, took = result.get_value(0, 0), float8(result.get_value(0, 1))
        place.looked_behind(now, levels_s + took)
        return Held(None, 0, 0.0, float("inf") if free_in is None else max(0.0, float8(free_in)))

    def _levels(self, name: str, deadline: Deadline) -> tuple[list[int], float]:
        """The priorities of which there are jobs, as ranks; how long it took the server to find them."""
        (result,) = self._flights.run([("LEVELS", (name.encode(),))], deadline)
        return elements(result.get_value(0, 0)), float8(result.get_value(0, 1))

    def _mine(self, request: Take, deadline: Deadline) -> Taken | None:
        """What this claim has already, from a take whose answer was lost."""
        which = (request.name.encode(), request.claim_id.encode(), b"%r" % request.ttl)
        (result,) = self._flights.run([("MINE", which)], deadline)
        rows, _ = wire.claimed(result)
        return wire.taken(result, rows) if rows else None

    def _take_once(self, request: Take, place: Place, deadline: Deadline, *, behind: bool, look_back: bool) -> _Found:
        asked = (
            request.name.encode(),
            request.claim_id.encode(),
            b"%d" % request.n,
            b"%r" % request.ttl,
            request.holder.encode(),
        )
        columns = [*zip(*place.stretches(behind=behind), strict=True), *zip(*place.gaps(), strict=True)]
        stretches = [numbers(list(column)) for column in columns]
        if request.group_limit:
            result, took_s, everything = self._turns.take(
                request, asked, stretches, deadline, behind=behind, look_back=look_back
            )
        else:
            (result,) = self._flights.run([("TAKE", (*asked, *stretches))], deadline)
            wire.check_told(result)
            took_s, everything = wire.took_s(result), behind
        rows, exhausted = wire.claimed(result)
        for rank, end in {job.rank: (job.due_at, job.id) for job, _ in rows}.items():
            place.passed(rank, *end)
        taken = wire.taken(result, rows) if rows else None
        if taken is not None and request.group_limit:
            for (job, _), told in zip(rows, taken.jobs, strict=True):
                if told.group is not None:
                    place.claimed_in_group(job.rank, job.due_at, job.id)
        return _Found(taken, exhausted, took_s, everything)


class _Found(NamedTuple):
    """What was taken, what is to be buried, how long it took the server; whether it looked at all that there is."""

    taken: Taken | None
    exhausted: list[int]
    took_s: float
    everything: bool
