"""Permits on PostgreSQL: one statement where it is plain what becomes of a claim, else a close look in a transaction.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one. ``POOL_TAKE`` looks in its snapshot, and grants newcomers where nobody waits; but only if no other grant came in
between, which the name's row in the pool table tells: every grant raises its token. Meanwhile permits can only have
been given back. ``POOL_DECIDE`` does the same for all that is asked of a name; it looks at the line, and refuses too,
so that a name which many processes want is not locked while a client reads and writes. Whom it leaves (a lease seems
over, the claim holds already, another number of permits, another grant came in between …) goes the long way: a
transaction locks the name's row, in the order of names, before it looks and decides.

Those who take at the same moment would all but one look in vain. So where somebody has been overtaken, or looks closely
anyway, an advisory lock that is taken in the same round trip (``POOL_QUEUE``) puts them one after the other.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from operator import itemgetter

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.store import TOLD_MAX, Granted, Held, Mismatch, StoreBusy
from dibs.stores.permits import Grant, Holding, State, Waiting, decide_all
from dibs.stores.postgres_wire import TRUE, acquired, acquired_many, float8, instant, integer, numbers, text, texts

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

        left[:] = acquire(execute, rows, outcomes)

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
    wakes = texts([_channel(row[2]) for row in rows])
    return "POOL_DECIDE", (*acquired_many(rows), *_permits(rows), wakes)


def _channel(request: Acquire) -> str | None:
    return request.wake and "dibs_" + request.wake


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


def acquire(execute: Execute, rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Decide these acquires of permits in one transaction; return those of new names that are yet to be decided.

    A new name is one that may turn out to be a lock, and that is seen when its first permit is granted.
    """
    asked: dict[str, list[Row]] = {}
    for row in rows:
        asked.setdefault(row[0], []).append(row)
    left: list[Row] = []
    queue = ("POOL_QUEUE", (texts(list(asked)),))  # so that who takes meanwhile looks afterwards
    heads, holdings, lines = _locked(execute, list(asked), [("BEGIN", ()), queue])
    new = [name for name in asked if name not in heads]
    if new:
        make = ("POOL_MAKE", (texts(new), numbers([asked[name][0][2].permits for name in new])))
        more = _locked(execute, new, [make])
        heads, holdings, lines = heads | more[0], holdings | more[1], lines | more[2]
        for name in new:
            left += asked[name][1:]
            del asked[name][1:]
    over = [name for name, held in holdings.items() if any(holding.ends_in <= 0 for holding in held)]
    if over:
        more = _locked(execute, over, [("POOL_END", (texts(over),))])
        holdings |= more[1]
    grants: list[tuple[Row, Grant]] = []
    entering: list[Row] = []
    permits = {name: head.permits for name, head in heads.items()}
    for name, head in heads.items():
        state = State(head.permits, head.fencing_token, holdings.get(name, ()), lines.get(name, ()))
        decisions = decide_all(state, [row[2] for row in asked[name]], head.now)
        for row, decision in zip(asked[name], decisions, strict=True):
            if isinstance(decision, Grant):
                grants.append((row, decision))
                permits[name] = decision.permits
                continue
            outcomes[row[1]] = decision
            if isinstance(decision, Held):
                permits[name] = row[2].permits
                if row[2].wake is not None:
                    entering.append(row)
    granting = {row[0] for row, _ in grants}
    resized = [name for name, number in permits.items() if number != heads[name].permits and name not in granting]
    writes: list[Statement] = []
    if grants:
        writes.append(_grant(grants, permits))
    if resized:
        writes.append(("POOL_RESIZE", (texts(resized), numbers([permits[name] for name in resized]))))
    if entering:
        writes.append(_enter([row[2] for row in entering]))
    results = execute([*writes, ("COMMIT", ())])
    strangers = [name for name in asked if name not in heads]
    if grants:
        get = results[0].get_value
        since = {
            (text(get(r, 0)) or "", integer(get(r, 1))): instant(get(r, 2))
            for r in range(results[0].ntuples)
            if get(r, 0) is not None
        }
        for (name, index, _), grant in grants:
            if (name, grant.slot) in since:
                outcomes[index] = Granted(grant.fencing_token, since[name, grant.slot], grant.slot)
            elif name not in strangers:
                strangers.append(name)
    if entering:
        get = results[-2].get_value
        tickets = {
            (text(get(r, 0)) or "", text(get(r, 1)) or ""): integer(get(r, 2)) for r in range(results[-2].ntuples)
        }
        for name, index, request in entering:
            outcomes[index] = outcomes[index]._replace(ticket=tickets[name, request.claim_id])
    if strangers:
        _refuse_locks(execute, strangers)
        for row in [*(row for name in strangers for row in asked[name]), *left]:
            if row[0] in strangers:
                outcomes[row[1]] = Mismatch(0)
        left = [row for row in left if row[0] not in strangers]
    return left


def _refuse_locks(execute: Execute, names: list[str]) -> None:
    """Names that are locks; StoreBusy if one is not, and only met somebody at the same moment."""
    given = texts(names)
    locks, _ = execute([("POOL_LOCKS", (given,)), ("POOL_FORGET", (given,))])
    if locks.ntuples < len(names):
        raise StoreBusy("a name changed while its permits were asked for")


class _Head(NamedTuple):
    permits: int
    fencing_token: int
    #: Unix time by the server, when it was read.
    now: float


def _locked(
    execute: Execute, names: list[str], before: list[Statement]
) -> tuple[dict[str, _Head], dict[str, list[Holding]], dict[str, list[Waiting]]]:
    """Do what is to be done before, lock the names, and read their permits and tokens, who holds, and who waits."""
    given = texts(names)
    *_, locked, read = execute([*before, ("POOL_LOCK", (given,)), ("POOL_READ", (given,))])
    get = locked.get_value
    heads = {
        text(get(r, 0)) or "": _Head(integer(get(r, 1)), integer(get(r, 2)), instant(get(r, 3)))
        for r in range(locked.ntuples)
    }
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


def _grant(grants: list[tuple[Row, Grant]], permits: dict[str, int]) -> Statement:
    """``permits`` is how many each name has from now on."""
    room = {row[0]: grant.left for row, grant in grants}  # after the last grant of each
    return (
        "POOL_GRANT",
        (
            texts([name for (name, _, _), _ in grants]),
            numbers([grant.slot for _, grant in grants]),
            texts([request.claim_id for (_, _, request), _ in grants]),
            texts([request.holder for (_, _, request), _ in grants]),
            numbers([grant.fencing_token for _, grant in grants]),
            numbers([request.ttl for (_, _, request), _ in grants]),
            texts([request.info for (_, _, request), _ in grants]),
            numbers([grant.take for _, grant in grants]),
            numbers([permits[name] for (name, _, _), _ in grants]),
            numbers([min(room[name], TOLD_MAX) for (name, _, _), _ in grants]),
        ),
    )


def _enter(requests: list[Acquire]) -> Statement:
    return (
        "POOL_ENTER",
        (
            texts([request.name for request in requests]),
            texts([request.claim_id for request in requests]),
            texts([_channel(request) for request in requests]),
            numbers([request.take for request in requests]),
            numbers([request.ticket for request in requests]),
        ),
    )
