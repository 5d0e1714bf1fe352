"""Takes of jobs on PostgreSQL: where to look, what is told again, and what is told when there is nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.jobs import NO_TRIES_LEFT, Taken
from dibs.store import Held
from dibs.stores import postgres_jobs_wire as wire
from dibs.stores.postgres_jobs_flights import BEGIN, COMMIT
from dibs.stores.postgres_jobs_places import Place, Places
from dibs.stores.postgres_wire import elements, float8, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.jobs import Take
    from dibs.stores.postgres_jobs_flights import JobFlights


class Takes:
    def __init__(self, flights: JobFlights) -> None:
        self._flights = flights
        self._places = Places()

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

    def take(self, request: Take, deadline: Deadline) -> Taken | Held:
        name = request.name
        place = self._places.get(name)
        if place is None or place.asked(request.claim_id):
            mine = self._mine(request, deadline)
            if mine is not None:
                return mine
        now = now_of(deadline)
        look_back, levels_s = place is None or place.is_due(now), 0.0
        if look_back:
            (result,) = self._flights.run([("LEVELS", (name.encode(),))], deadline)
            ranks, levels_s = elements(result.get_value(0, 0)), float8(result.get_value(0, 1))
            if place is None:
                place = self._places.begin(name, ranks)
                place.asked(request.claim_id)
            else:
                place.rewind(ranks)
        assert place is not None
        while True:
            behind = look_back or place.may_look_behind(now)
            taken, exhausted, took_s = self._take_once(request, place, behind, deadline)
            if exhausted:
                self._flights.run([("BURY", (wire.ids(exhausted), NO_TRIES_LEFT.encode()))], deadline)
            if taken is not None or not exhausted:
                break
        if taken is not None:
            if look_back or (behind and len(taken.jobs) + len(exhausted) < request.n):
                place.looked_behind(now, levels_s + took_s)
            return taken
        place.answered(request.claim_id)
        if not behind:
            return Held(None, 0, 0.0, max(0.0, place.rest_s(now)))
        (result,) = self._flights.run([("NEXT", (name.encode(), b"%d" % request.group_limit))], deadline)
        free_in, took = result.get_value(0, 0), float8(result.get_value(0, 1))
        place.looked_behind(now, levels_s + took)
        return Held(None, 0, 0.0, float("inf") if free_in is None else max(0.0, float8(free_in)))

    def _mine(self, request: Take, deadline: Deadline) -> Taken | None:
        """What this claim has already, from a take whose answer was lost."""
        which = (request.name.encode(), request.claim_id.encode(), b"%r" % request.ttl)
        (result,) = self._flights.run([("MINE", which)], deadline)
        rows, _ = wire.claimed(result)
        return wire.taken(result, rows) if rows else None

    def _take_once(
        self, request: Take, place: Place, behind: bool, deadline: Deadline
    ) -> tuple[Taken | None, list[int], float]:
        """What was taken, what is to be buried, and how long it took the server."""
        columns = zip(*place.stretches(behind=behind), strict=True)
        given = (
            request.name.encode(),
            request.claim_id.encode(),
            b"%d" % request.n,
            b"%r" % request.ttl,
            request.holder.encode(),
            *(numbers(list(column)) for column in columns),
        )
        if request.group_limit:
            result = self._take_in_turn(request, (*given, b"%d" % request.group_limit), deadline)
        else:
            (result,) = self._flights.run([("TAKE", given)], deadline)
        rows, exhausted = wire.claimed(result)
        if not rows:
            return None, exhausted, 0.0
        for rank, end in {job.rank: (job.due_at, job.id) for job, _ in rows}.items():
            place.ended(rank, *end)
        return wire.taken(result, rows), exhausted, float8(result.get_value(rows[0][1], 5))

    def _take_in_turn(self, request: Take, given: Sequence[bytes | None], deadline: Deadline) -> PGresult:
        results: list[PGresult] = []
        statements = [
            BEGIN,
            (self._flights.sql["TAKE_QUEUE"], (request.name.encode(),)),
            (self._flights.sql["TAKE_TURNS"], given),
            COMMIT,
        ]

        def work() -> None:
            results[:] = self._flights.execute(statements, deadline)

        self._flights.transaction(work, deadline)
        return results[2]


def now_of(deadline: Deadline) -> float:
    """This moment, on the clock of the deadline."""
    return deadline.at - deadline.remaining()
