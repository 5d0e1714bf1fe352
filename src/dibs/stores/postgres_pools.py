"""Permits on PostgreSQL: one statement where it is plain that there are enough, else a transaction that looks closely.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one. ``POOL_TAKE`` looks in its snapshot, and grants only if no other grant came in between, which the name's row in the
pool table tells: every grant raises its token. Meanwhile permits can only have been given back. Who is not granted so
(nothing left, others in line before it, a lease that seems over, another number of permits …) goes the long way: a
transaction locks the name's row, in the order of names, before it looks and decides.

Those who take at the same moment would all but one look in vain. So where somebody has been overtaken, an advisory lock
that is taken in the same round trip (``POOL_QUEUE``) puts them one after the other.
"""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import Granted, Held, Mismatch, StoreBusy
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
from dibs.stores.postgres_wire import acquired, float8, instant, integer, numbers, text, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.store import Acquire
    from dibs.stores.postgres_link import Connection, Sql
    from dibs.stores.rounds import Row

    # A verb with its parameters; and what executes statements in one round trip.
    Statement = tuple[str, Sequence[bytes | None]]
    Execute = Callable[[Sequence[Statement]], list[PGresult]]

# Who was overtaken by another's grant asks so many times behind whoever asks at the same moment, before it tries again
# without: to wait for each other costs less than to look in vain, but a tenth of a take that nobody disturbs.
QUEUE_TIMES = 100


class Pools:
    """The permits of one store."""

    def __init__(self, connection: Connection, sql: dict[str, bytes]) -> None:
        self._connection, self._sql = connection, sql
        self._queue_times = 0

    def acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Decide these acquires, one a name."""
        statements = [_take(rows)]
        if self._queue_times or len(rows) > 1:
            self._queue_times = max(0, self._queue_times - 1)
            statements.insert(0, ("POOL_QUEUE", (texts([row[0] for row in rows]),)))
        taken = self._connection.run_all(self._texts(statements), deadline)[-1]
        rest = _taken(taken, rows, outcomes)
        if rest:
            self._connection.transaction(partial(self._decide, rest, outcomes, deadline), deadline)
            if any(type(outcomes[index]) is Granted for _, index, _ in rest):
                self._queue_times = QUEUE_TIMES

    def _decide(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        def execute(statements: Sequence[Statement]) -> list[PGresult]:
            return self._connection.execute_all(self._texts(statements), deadline)

        acquire(execute, rows, outcomes)

    def _texts(self, statements: Sequence[Statement]) -> list[Sql]:
        return [(self._sql[verb], given) for verb, given in statements]


def _take(rows: list[Row]) -> Statement:
    """What grants where it is plain that there are enough."""
    columns, request = acquired(rows), rows[0][2]
    if len(rows) > 1:
        return "POOL_TAKE", (
            *columns,
            numbers([row[2].permits for row in rows]),
            numbers([row[2].take for row in rows]),
        )
    verb = "POOL_TAKE_ONE"
    if request.ticket is None:
        verb, columns = "POOL_TAKE_NEW", columns[:-1]
    return verb, (*columns, b"%d" % request.permits, b"%d" % request.take)


def _taken(result: PGresult, rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Note what was granted so; return the rest."""
    get = result.get_value
    granted = set()
    for r in range(result.ntuples):
        place = integer(get(r, 0)) - 1
        granted.add(place)
        outcomes[rows[place][1]] = Granted(integer(get(r, 1)), instant(get(r, 2)), integer(get(r, 3)))
    return [row for place, row in enumerate(rows) if place not in granted]


def acquire(execute: Execute, rows: list[Row], outcomes: list[Any]) -> None:
    """Decide these acquires of permits, one a name, in one transaction."""
    asked: dict[str, tuple[int, Acquire]] = {name: (index, request) for name, index, request in rows}
    heads, holdings, lines = _locked(execute, list(asked), [("BEGIN", ())])
    new = [name for name in asked if name not in heads]
    if new:
        make = ("POOL_MAKE", (texts(new), numbers([asked[name][1].permits for name in new])))
        more = _locked(execute, new, [make])
        heads, holdings, lines = heads | more[0], holdings | more[1], lines | more[2]
    over = [name for name, held in holdings.items() if any(holding.ends_in <= 0 for holding in held)]
    if over:
        more = _locked(execute, over, [("POOL_END", (texts(over),))])
        holdings |= more[1]
    decisions = {
        name: decide(State(*heads[name], holdings.get(name, ()), lines.get(name, ())), request)
        for name, (_, request) in asked.items()
        if name in heads
    }
    grants = [(asked[name][1], decision) for name, decision in decisions.items() if isinstance(decision, Grant)]
    held = [asked[name][1] for name, decision in decisions.items() if isinstance(decision, Held)]
    resized = [request for request in held if request.permits != heads[request.name][0]]
    entering = [request for request in held if request.wake is not None]
    writes: list[Statement] = []
    if grants:
        writes.append(_grant(grants))
    if resized:
        limits = numbers([request.permits for request in resized])
        writes.append(("POOL_RESIZE", (texts([request.name for request in resized]), limits)))
    if entering:
        writes.append(_enter(entering))
    results = execute([*writes, ("COMMIT", ())])
    for name, decision in decisions.items():
        if not isinstance(decision, Grant):
            outcomes[asked[name][0]] = decision
    strangers = [name for name in asked if name not in heads]
    if grants:
        get = results[0].get_value
        granted = {text(get(r, 0)) or "": instant(get(r, 1)) for r in range(results[0].ntuples)}
        for request, grant in grants:
            if request.name in granted:
                index = asked[request.name][0]
                outcomes[index] = Granted(grant.fencing_token, granted[request.name], grant.slot)
            else:
                strangers.append(request.name)
    if entering:
        get = results[-2].get_value
        for r in range(results[-2].ntuples):
            index = asked[text(get(r, 0)) or ""][0]
            outcomes[index] = outcomes[index]._replace(ticket=integer(get(r, 1)))
    if strangers:
        _refuse_locks(execute, strangers)
        for name in strangers:
            outcomes[asked[name][0]] = Mismatch(0)


def _refuse_locks(execute: Execute, names: list[str]) -> None:
    """Names that are locks; StoreBusy if one is not, and only met somebody at the same moment."""
    given = texts(names)
    locks, _ = execute([("POOL_LOCKS", (given,)), ("POOL_FORGET", (given,))])
    if locks.ntuples < len(names):
        raise StoreBusy("a name changed while its permits were asked for")


def _locked(
    execute: Execute, names: list[str], before: list[Statement]
) -> tuple[dict[str, tuple[int, int]], dict[str, list[Holding]], dict[str, list[Waiting]]]:
    """Do what is to be done before, lock the names, and read their permits and tokens, who holds, and who waits."""
    given = texts(names)
    *_, locked, read = execute([*before, ("POOL_LOCK", (given,)), ("POOL_READ", (given,))])
    get = locked.get_value
    heads = {text(get(r, 0)) or "": (integer(get(r, 1)), integer(get(r, 2))) for r in range(locked.ntuples)}
    holdings: dict[str, list[Holding]] = {head: [] for head in heads}
    lines: dict[str, list[Waiting]] = {head: [] for head in heads}
    for r in range(read.ntuples):
        name, claim_id, take, slot, holder, number, acquired_at, seconds = (read.get_value(r, c) for c in range(8))
        key, claim = text(name) or "", text(claim_id) or ""
        if key not in heads:
            continue
        if slot is None:
            lines[key].append(Waiting(integer(number), claim, integer(take), float8(seconds)))
        else:
            since, ends_in = instant(acquired_at), float8(seconds)
            who = claim, integer(take), text(holder) or ""
            holdings[key].append(Holding(integer(slot), *who, integer(number), since, ends_in))
    return heads, holdings, lines


def _grant(grants: list[tuple[Acquire, Grant]]) -> Statement:
    more = ["true" if grant.left > 0 else "false" for _, grant in grants]
    return (
        "POOL_GRANT",
        (
            texts([request.name for request, _ in grants]),
            numbers([grant.slot for _, grant in grants]),
            texts([request.claim_id for request, _ in grants]),
            texts([request.holder for request, _ in grants]),
            numbers([grant.fencing_token for _, grant in grants]),
            numbers([request.ttl for request, _ in grants]),
            texts([request.info for request, _ in grants]),
            numbers([grant.take for _, grant in grants]),
            numbers([grant.permits for _, grant in grants]),
            ("{" + ",".join(more) + "}").encode(),
        ),
    )


def _enter(requests: list[Acquire]) -> Statement:
    return (
        "POOL_ENTER",
        (
            texts([request.name for request in requests]),
            texts([request.claim_id for request in requests]),
            texts([request.wake and "dibs_" + request.wake for request in requests]),
            numbers([request.take for request in requests]),
            numbers([request.ticket for request in requests]),
        ),
    )
