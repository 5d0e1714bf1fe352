"""Takes of jobs on PostgreSQL with a limit on groups: one at a time for each queue, in two steps.

The first jobs in their order are examined for those that have their turn. Where many jobs of busy groups stand first,
there may be none among so many; then it goes by groups, of which it looks at nothing but the first jobs.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.stores import postgres_jobs_wire as wire
from dibs.stores.postgres_jobs_flights import BEGIN, COMMIT
from dibs.stores.postgres_wire import float8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.jobs import Take
    from dibs.stores.postgres_jobs_flights import JobFlights, Statement

# So many jobs are examined in their order for each that is asked for; if none of them has its turn, so many in all.
LOOK_FIRST = 20
LOOK_MAX = 500


class Turns:
    def __init__(self, flights: JobFlights) -> None:
        self._flights = flights

    def take(
        self,
        request: Take,
        asked: Sequence[bytes | None],
        stretches: Sequence[bytes | None],
        deadline: Deadline,
        *,
        behind: bool,
        look_back: bool,
    ) -> tuple[PGresult, float, bool]:
        """What was taken, how long that took the server, and whether all that there is was looked at in vain.

        ``behind``: the stretches are all of the order. ``look_back``: it is time for what takes long: to pass over
        everything for jobs without a group, and over all notes.
        """
        limit, took_s = b"%d" % request.group_limit, 0.0
        statements: list[Statement] = [("CLEAR", asked[:1])] if look_back else []
        looks = min(LOOK_FIRST * request.n, LOOK_MAX), LOOK_MAX
        for look_max in dict.fromkeys(looks):
            statements.append(("TAKE_IN_ORDER", (*asked, *stretches, limit, b"%d" % look_max)))
            *cleared, result = self._alone(asked[:1], statements, deadline)
            wire.check_told(result)
            took_s += wire.took_s(result) + sum(float8(told.get_value(0, 1)) for told in cleared)
            looked = wire.looked_in_vain(result)
            if looked is None:
                return result, took_s, False
            if looked < look_max:
                if behind:
                    return result, took_s, True
                break
            statements = []
        by_groups = (*asked, limit, b"%d" % LOOK_MAX if look_back else b"0")
        (result,) = self._alone(asked[:1], [("TAKE_BY_GROUPS", by_groups)], deadline)
        return result, took_s + wire.took_s(result), False

    def _alone(
        self, name: Sequence[bytes | None], statements: Sequence[Statement], deadline: Deadline
    ) -> list[PGresult]:
        """The answers to these statements, in a transaction that no other take of the queue overlaps."""
        asked = [("TAKE_QUEUE", name), *statements]
        flight = [BEGIN, *((self._flights.sql[verb], given) for verb, given in asked), COMMIT]
        results: list[PGresult] = []

        def work() -> None:
            results[:] = self._flights.execute(flight, deadline)

        self._flights.transaction(work, deadline)
        return results[2:-1]
