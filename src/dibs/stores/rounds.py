"""How the SQL stores go through a vector of requests: in rounds, a statement a verb, refused acquires looked into once.

Here is what does not depend on the dialect: the order in which requests are tried, who is asked again at once, and
what a refused caller is told. The statements, and how values travel, are each store's own.
"""

from __future__ import annotations

from math import inf
from operator import itemgetter

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from dibs.store import GONE, LINE_GRACE_S, Acquire, Held, Outcome, Release, Renew, Request, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline

# A request with its name, by which rows are locked in order, and its place in the vector.
Row = tuple[str, int, Any]


class Verbs(Protocol):
    """What a dialect does for one round; each puts its outcomes into the places of the rows."""

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, more: bool) -> None:
        """Release; ``more``: something else follows at once, in this round."""
        ...

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None: ...
    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None: ...
    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        """Grant what can be granted, to newcomers or by the rules of the line; return the rest."""
        ...

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Decide acquires of permits, in this order; those of one name are of different claims."""
        ...

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        """Make missing rows, line up who wants to wait, say who holds the rest; return whom to ask for once more."""
        ...


def act(verbs: Verbs, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
    """Try every request; their outcomes in the order of the requests."""
    outcomes: list[Any] = [GONE] * len(requests)
    if len(requests) == 1:  # most calls: nothing to sort
        (request,) = requests
        verb = _VERBS[type(request)]
        verb(verbs, [(request[0], 0, request)], outcomes, deadline, False)
        return outcomes
    for rows in _rounds(requests):
        # What can be sent in one statement a verb, in the order of names, releases first.
        rows.sort(key=itemgetter(0))
        for kind, verb in _VERBS.items():
            of_kind = [row for row in rows if type(row[2]) is kind]
            if of_kind:
                verb(verbs, of_kind, outcomes, deadline, len(of_kind) < len(rows))
    return outcomes


def _release(verbs: Verbs, rows: list[Row], outcomes: list[Any], deadline: Deadline, others: bool) -> None:
    verbs.release_rows(rows, outcomes, deadline, more=others)  # which come after these


def _renew(verbs: Verbs, rows: list[Row], outcomes: list[Any], deadline: Deadline, others: bool) -> None:
    verbs.renew_rows(rows, outcomes, deadline)


def _transfer(verbs: Verbs, rows: list[Row], outcomes: list[Any], deadline: Deadline, others: bool) -> None:
    verbs.transfer_rows(rows, outcomes, deadline)


def _acquire(verbs: Verbs, rows: list[Row], outcomes: list[Any], deadline: Deadline, others: bool) -> None:
    pools = [row for row in rows if row[2].permits]
    if pools:
        verbs.acquire_permits(pools, outcomes, deadline)
        rows = [row for row in rows if not row[2].permits]
    newcomers = [row for row in rows if row[2].ticket is None]
    waiters = [row for row in rows if row[2].ticket is not None] if len(newcomers) < len(rows) else []
    refused = verbs.acquire_rows(newcomers, outcomes, deadline, in_line=False) if newcomers else []
    if waiters:
        refused += verbs.acquire_rows(waiters, outcomes, deadline, in_line=True)
    if not refused:
        return
    # Asked again at once: who has just lined up (a release in between had nobody to tell), who finds only dead waiters
    # before it, and who met another that made the same row. What is told then is told to the caller.
    again = verbs.enter_rows(refused, outcomes, deadline)
    if again:
        refused = verbs.acquire_rows(again, outcomes, deadline, in_line=True)
        if any(outcomes[index].fencing_token == 0 for _, index, _ in refused):
            verbs.enter_rows(refused, outcomes, deadline)


class Seen(NamedTuple):
    """What a store saw of a name that it did not grant. ``ticket`` is the asker's place in line, if it has one.

    ``again_in``: see Held.
    """

    holder: str | None
    fencing_token: int
    acquired_at: float
    free: bool
    ahead: bool
    free_in: float
    ticket: int | None
    again_in: float = inf


def told(row: Row, seen: Seen | None, outcomes: list[Any], again: list[Row]) -> None:
    """Make a refusal of what was seen, and note whether the row is worth asking for once more.

    Nothing is seen where somebody else made the name's row at the same moment.
    """
    name, index, request = row
    if seen is None:
        outcomes[index] = Held(None, 0, 0.0, 0.0)
        again.append(row)
        return
    holder, token, acquired_at, free, ahead, free_in, ticket, again_in = seen
    if free:
        # Kept for those ahead: they have the rest of the grace to ask; after it only those count who did just now.
        kept_for = free_in + LINE_GRACE_S
        holder, free_in = None, 0.0 if not ahead else kept_for if kept_for > 0 else LINE_GRACE_S
    free_in = max(0.0, free_in)  # 0 with a holder: its lease is over, and pinned
    outcomes[index] = Held(holder, token, acquired_at, free_in, ticket, ahead, None, again_in)
    if (free and not ahead) or (ticket is not None and request.ticket is None):
        again.append((name, index, request._replace(ticket=ticket)))


def _rounds(requests: Sequence[Request]) -> list[list[Row]]:
    """The vector in rounds that keep the order of requests for one name; nearly always a single one.

    A round sends releases, then renewals, transfers, and acquires, and of the last two at most one a name; but of
    permits as many as there are claims.
    """
    rows: list[Row] = [(request[0], index, request) for index, request in enumerate(requests)]
    if len({row[0] for row in rows}) == len(rows):
        return [rows]
    rounds: list[list[Row]] = []
    last: dict[str, tuple[int, int]] = {}  # by name: the round of its latest request, and the rank of that verb
    sent: set[tuple[int, str, str]] = set()
    for row in rows:
        name, _, request = row
        rank = _RANKS[type(request)]
        if rank == _RANKS[Acquire] and request.permits:
            rank = _OF_PERMITS
        number, rank_before = last.get(name, (0, -1))
        if (
            rank < rank_before
            or (rank == rank_before and (rank in _ONCE or (number, name, request[1]) in sent))
            or (rank == _OF_PERMITS and rank_before == _RANKS[Acquire])
        ):
            number += 1
        last[name] = number, rank
        sent.add((number, name, request[1]))
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(row)
    return rounds


# In the order in which a round sends them.
_VERBS = {Release: _release, Renew: _renew, Transfer: _transfer, Acquire: _acquire}
_RANKS: dict[type, int] = {kind: rank for rank, kind in enumerate(_VERBS)}
_ONCE = _RANKS[Transfer], _RANKS[Acquire]
_OF_PERMITS = len(_RANKS)
