"""Permits on PostgreSQL: one statement where it is plain what becomes of a claim, else a close look in a transaction.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one. ``POOL_TAKE`` looks in its snapshot, and grants newcomers where nobody waits; but only if no other grant came in
between, which the name's row in the pool table tells: every grant raises its token. Meanwhile permits can only have
been given back. ``POOL_DECIDE`` does the same for all that is asked of a name; it looks at the line, and refuses too,
so that a name which many processes want is not locked while a client reads and writes. Whom it leaves (a lease seems
over, the claim holds already, another number of permits, another grant came in between …) goes the long way: a
transaction locks the name's row, in the order of names, before it looks and decides: see
``postgres_pools_close``.

Those who take at the same moment would all but one look in vain. So where somebody has been overtaken, or looks closely
anyway, an advisory lock that is taken in the same round trip (``POOL_QUEUE``) puts them one after the other.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from operator import itemgetter

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import Granted, Held
from dibs.stores import postgres_pools_close
from dibs.stores.postgres_wire import (
    TRUE,
    acquired,
    acquired_many,
    channels,
    float8,
    instant,
    integer,
    numbers,
    text,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.stores.postgres_link import Connection, Sql
    from dibs.stores.postgres_pools_close import Statement
    from dibs.stores.rounds import Row

# Who was overtaken by another's grant asks so many times behind whoever asks at the same moment, before it tries again
# without: to wait for each other costs less than to look in vain, but a tenth of a take that nobody disturbs.
QUEUE_TIMES = 100
# Who was refused asks so many times for that name with the statement that can also refuse, and line up.
CLOSE_TIMES = 100
# So many names are remembered for that.
CLOSE_NAMES_MAX = 1000
# That statement joins all rows with each other. Of more names it is slower than the long way, which is one for all.
DECIDED_MAX = 50


class Pools:
    """The permits of one store."""

    def __init__(self, connection: Connection, sql: dict[str, bytes]) -> None:
        self._connection, self._sql = connection, sql
        self._queue_times = 0
        #: How many times a name is still to be asked for with the statement that can refuse.
        self._close_times: dict[str, int] = {}

    def acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Decide these acquires, in the order of names; of one name each is of another claim."""
        close = self._wanted(rows)
        new, known = [row for row in rows if row[0] not in close], [row for row in rows if row[0] in close]
        refused, overtaken = self._try(new, known, outcomes, deadline)
        if refused:
            overtaken += self._try([], refused, outcomes, deadline)[1]
        rest = sorted(overtaken, key=itemgetter(0))
        while rest:
            left: list[Row] = []
            self._connection.transaction(partial(self._decide, rest, outcomes, left, deadline), deadline)
            rest = left
        if any(type(outcomes[index]) is Granted for _, index, _ in (*refused, *overtaken)):
            self._queue_times = QUEUE_TIMES
        lined_up = _lined_up(rows, outcomes)
        if lined_up:
            self._try([], lined_up, outcomes, deadline)
        self._remember(close, {name for name, index, _ in rows if type(outcomes[index]) is Held})

    def _wanted(self, rows: list[Row]) -> set[str]:
        """The names of which more than newcomers, or more than one, are likely to be asked for."""
        wanted = {row[0] for row in rows if row[2].ticket is not None}
        wanted.update(row[0] for row, after in pairwise(rows) if row[0] == after[0])
        lately = {row[0] for row in rows} & self._close_times.keys() if self._close_times else set()
        return wanted | lately if len(wanted | lately) <= DECIDED_MAX else wanted

    def _remember(self, close: set[str], held: set[str]) -> None:
        times = self._close_times
        if len(times) > CLOSE_NAMES_MAX:
            times.clear()
        for name in close & times.keys():
            times[name] -= 1
            if not times[name]:
                del times[name]
        times.update(dict.fromkeys(held, CLOSE_TIMES))

    def _try(
        self, new: list[Row], known: list[Row], outcomes: list[Any], deadline: Deadline
    ) -> tuple[list[Row], list[Row]]:
        """Decide in one round trip what is plain; return of the newcomers, and of the others, what is not."""
        few = len({row[0] for row in known}) <= DECIDED_MAX
        sent = [(part, make) for part, make in ((new, _take), (known if few else [], _decide)) if part]
        if not sent:
            return [], known
        statements = [make(part) for part, make in sent]
        if self._queue_times or known or len(new) > 1:
            self._queue_times = max(0, self._queue_times - 1)
            names = sorted({row[0] for part, _ in sent for row in part})
            statements.insert(0, ("POOL_QUEUE", (texts(names),)))
        results = self._connection.run_all(self._texts(statements), deadline)[-len(sent) :]
        left = [_taken(result, part, outcomes) for (part, _), result in zip(sent, results, strict=True)]
        return left[0] if new else [], left[-1] if known and few else known

    def _decide(self, rows: list[Row], outcomes: list[Any], left: list[Row], deadline: Deadline) -> None:
        def execute(statements: Sequence[Statement]) -> list[PGresult]:
            return self._connection.execute_all(self._texts(statements), deadline)

        left[:] = postgres_pools_close.acquire(execute, rows, outcomes)

    def _texts(self, statements: Sequence[Statement]) -> list[Sql]:
        return [(self._sql[verb], given) for verb, given in statements]


def _take(rows: list[Row]) -> Statement:
    """What grants newcomers, one a name."""
    columns, request = acquired(rows)[:-1], rows[0][2]
    if len(rows) > 1:
        return "POOL_TAKE", (*columns, *_permits(rows))
    return "POOL_TAKE_NEW", (*columns, b"%d" % request.permits, b"%d" % request.take)


def _decide(rows: list[Row]) -> Statement:
    """What decides for all that is asked of a name."""
    return "POOL_DECIDE", (*acquired_many(rows), *_permits(rows), channels(rows))


def _lined_up(rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Who has just lined up, with nobody ahead, and asks again at once: a release in between had nobody to tell.

    (Had there been somebody, that one tells who comes next.) Not where a later one of this call was granted: it may
    have given some of its permits back, which is to be decided in the order given.
    """
    found: list[Row] = []
    granted = set()
    for name, index, request in reversed(rows):
        outcome = outcomes[index]
        if type(outcome) is Granted:
            granted.add(name)
        elif type(outcome) is Held and request.ticket is None and name not in granted:
            ticket = None if outcome.ahead else outcome.ticket
            if ticket is not None:
                found.append((name, index, request._replace(ticket=ticket)))
    return found[::-1]


def _permits(rows: list[Row]) -> tuple[bytes, bytes]:
    return numbers([row[2].permits for row in rows]), numbers([row[2].take for row in rows])


def _taken(result: PGresult, rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Note what was granted so, and plainly refused; return the rest."""
    get = result.get_value
    decided = set()
    for r in range(result.ntuples):
        place, token, since, slot = integer(get(r, 0)) - 1, integer(get(r, 1)), instant(get(r, 2)), get(r, 3)
        decided.add(place)
        if slot is not None:
            outcomes[rows[place][1]] = Granted(token, since, integer(slot))
        else:
            ticket = get(r, 6)
            outcomes[rows[place][1]] = Held(
                text(get(r, 4)),
                token,
                since,
                max(0.0, float8(get(r, 5))),
                None if ticket is None else integer(ticket),
                get(r, 7) == TRUE,
            )
    return [row for place, row in enumerate(rows) if place not in decided]
