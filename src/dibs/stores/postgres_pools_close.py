"""Permits on PostgreSQL, looked at closely: a transaction locks the names, reads, decides, and writes.

Usually that is two round trips, however many names there are. What is decided in one statement instead is told in
``postgres_pools``.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.store import TOLD_MAX, Granted, Mismatch, StoreBusy
from dibs.stores.permits import Grant, Holding, State, Verdicts, Waiting, decide_all
from dibs.stores.postgres_wire import channels, float8, instant, integer, numbers, text, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.stores.rounds import Row

    # A verb with its parameters; and what executes statements in one round trip.
    Statement = tuple[str, Sequence[bytes | None]]
    Execute = Callable[[Sequence[Statement]], list[PGresult]]


def acquire(execute: Execute, rows: list[Row], outcomes: list[Any]) -> list[Row]:
    """Decide these acquires of permits in one transaction; return those of new names that are yet to be decided.

    A new name is one that may turn out to be a lock, and that is seen when its first permit is granted.
    """
    asked: dict[str, list[Row]] = {}
    for row in rows:
        asked.setdefault(row[0], []).append(row)
    seen, left = _look(execute, asked)
    verdicts = Verdicts()
    for name, one in seen.items():
        state = State(one.permits, one.fencing_token, one.holdings, one.line)
        verdicts.add(asked[name], decide_all(state, [row[2] for row in asked[name]], one.now), outcomes)
    met = _write(execute, verdicts, seen, outcomes)
    locks = [name for name in asked if name not in seen or name in met]
    if locks:
        _refuse_locks(execute, locks)
        for row in [*(row for name in locks for row in asked[name]), *left]:
            if row[0] in locks:
                outcomes[row[1]] = Mismatch(0)
        left = [row for row in left if row[0] not in locks]
    return left


class _Seen(NamedTuple):
    """What was read of a name, which is locked."""

    permits: int
    fencing_token: int
    #: Unix time by the server, when it was read.
    now: float
    holdings: list[Holding]
    line: list[Waiting]


def _look(execute: Execute, asked: dict[str, list[Row]]) -> tuple[dict[str, _Seen], list[Row]]:
    """Begin the transaction, and read the names, which are locked by then; names that are none's are made.

    Of those only the first acquire is left to be decided now; the others are returned.
    """
    left: list[Row] = []
    queue = ("POOL_QUEUE", (texts(list(asked)),))  # so that who takes meanwhile looks afterwards
    seen = _locked(execute, list(asked), [("BEGIN", ()), queue])
    new = [name for name in asked if name not in seen]
    if new:
        make = ("POOL_MAKE", (texts(new), numbers([asked[name][0][2].permits for name in new])))
        seen |= _locked(execute, new, [make])
        for name in new:
            left += asked[name][1:]
            del asked[name][1:]
    over = [name for name, one in seen.items() if any(holding.ends_in <= 0 for holding in one.holdings)]
    if over:
        seen |= _locked(execute, over, [("POOL_END", (texts(over),))])
    return seen, left


def _locked(execute: Execute, names: list[str], before: list[Statement]) -> dict[str, _Seen]:
    """Do what is to be done before, lock the names, and read their permits and tokens, who holds, and who waits."""
    given = texts(names)
    *_, locked, read = execute([*before, ("POOL_LOCK", (given,)), ("POOL_READ", (given,))])
    get = locked.get_value
    seen = {
        text(get(r, 0)) or "": _Seen(integer(get(r, 1)), integer(get(r, 2)), instant(get(r, 3)), [], [])
        for r in range(locked.ntuples)
    }
    for r in range(read.ntuples):
        name, claim_id, take, slot, holder, number, acquired_at, seconds = (read.get_value(r, c) for c in range(8))
        one, claim = seen.get(text(name) or ""), text(claim_id) or ""
        if one is None:
            continue
        if slot is None:
            one.line.append(Waiting(integer(number), claim, integer(take), float8(seconds)))
        else:
            since, ends_in = instant(acquired_at), float8(seconds)
            who = claim, integer(take), text(holder) or ""
            one.holdings.append(Holding(integer(slot), *who, integer(number), since, ends_in))
    return seen


def _write(execute: Execute, verdicts: Verdicts, seen: dict[str, _Seen], outcomes: list[Any]) -> set[str]:
    """Write what was decided, and commit; the names whose rows turned out to be those of locks."""
    grants, waiting, permits = verdicts.grants, verdicts.waiting, verdicts.permits
    granting = {row[0] for row, _ in grants}
    resized = [name for name, number in permits.items() if number != seen[name].permits and name not in granting]
    writes: list[Statement] = []
    if grants:
        writes.append(_grant(grants, permits))
    if resized:
        writes.append(("POOL_RESIZE", (texts(resized), numbers([permits[name] for name in resized]))))
    if waiting:
        writes.append(_enter(waiting))
    results = execute([*writes, ("COMMIT", ())])
    if waiting:
        get = results[-2].get_value
        tickets = {
            (text(get(r, 0)) or "", text(get(r, 1)) or ""): integer(get(r, 2)) for r in range(results[-2].ntuples)
        }
        for name, index, request in waiting:
            outcomes[index] = outcomes[index]._replace(ticket=tickets[name, request.claim_id])
    return _granted(results[0], grants, outcomes) if grants else set()


def _granted(result: PGresult, grants: list[tuple[Row, Grant]], outcomes: list[Any]) -> set[str]:
    """Note these grants, as far as they were written; the names of the others."""
    get = result.get_value
    since = {
        (text(get(r, 0)) or "", integer(get(r, 1))): instant(get(r, 2))
        for r in range(result.ntuples)
        if get(r, 0) is not None
    }
    others = set()
    for (name, index, _), grant in grants:
        if (name, grant.slot) in since:
            outcomes[index] = Granted(grant.fencing_token, since[name, grant.slot], grant.slot)
        else:
            others.add(name)
    return others


def _refuse_locks(execute: Execute, names: list[str]) -> None:
    """Names that are locks; StoreBusy if one is not, and only met somebody at the same moment."""
    given = texts(names)
    locks, _ = execute([("POOL_LOCKS", (given,)), ("POOL_FORGET", (given,))])
    if locks.ntuples < len(names):
        raise StoreBusy("a name changed while its permits were asked for")


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


def _enter(rows: list[Row]) -> Statement:
    requests = [row[2] for row in rows]
    return (
        "POOL_ENTER",
        (
            texts([request.name for request in requests]),
            texts([request.claim_id for request in requests]),
            channels(rows),
            numbers([request.take for request in requests]),
            numbers([request.ticket for request in requests]),
        ),
    )
