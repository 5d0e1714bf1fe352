"""Who gets permits of a pool: one decision, the same for every store.

A store reads what is here called ``State``, asks ``decide``, and writes what it is told: while it holds the name
against everybody else, or in a transaction that fails when something came in between. (A lock needs no such reading:
one conditional write decides.) A grant takes from the line whoever has not asked for ``LINE_GRACE_S``; should one of
them ask again, it comes back to its old place.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.store import LAST_TICKET, LINE_GRACE_S, Acquire, Held, Mismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.stores.rounds import Row


class Holding(NamedTuple):
    """A claim that holds the name now."""

    slot: int
    claim_id: str
    take: int
    holder: str
    fencing_token: int
    acquired_at: float
    #: Seconds until it ends unless renewed.
    ends_in: float


class Waiting(NamedTuple):
    """A claim in line."""

    ticket: int
    claim_id: str
    take: int
    #: Seconds since it asked.
    silent_for: float


class State(NamedTuple):
    """What a store knows of a name. ``permits`` is None for a name that it does not know, 0 for a lock."""

    permits: int | None
    fencing_token: int
    holdings: Sequence[Holding]
    line: Sequence[Waiting]


class Grant(NamedTuple):
    """Write this: the claim holds ``slot`` under ``fencing_token``; a claim that held already keeps both."""

    slot: int
    fencing_token: int
    again: Holding | None
    take: int
    #: Permits are left: whoever is next in line should be told.
    left: int
    #: How many permits the name has from now on.
    permits: int


def decide_all(state: State, requests: Sequence[Acquire], now: float) -> list[Grant | Held | Mismatch]:
    """What becomes of several acquires of one name, each of another claim, one after the other; ``now`` is Unix time.

    What they leave behind is in the decisions: the name has as many permits from now on as the last says.
    """
    if len(requests) == 1:
        return [decide(state, requests[0])]
    permits, token, holdings, line = state.permits, state.fencing_token, [*state.holdings], [*state.line]
    decisions: list[Grant | Held | Mismatch] = []
    for request in requests:
        decision = decide(State(permits, token, holdings, line), request)
        decisions.append(decision)
        if isinstance(decision, Mismatch):
            continue
        if isinstance(decision, Grant):
            permits, token, again = decision.permits, max(token, decision.fencing_token), decision.again
            since, ends_in = (again.acquired_at, max(again.ends_in, request.ttl)) if again else (now, request.ttl)
            held = decision.slot, request.claim_id, decision.take, request.holder, decision.fencing_token
            holdings = [*(holding for holding in holdings if holding is not again), Holding(*held, since, ends_in)]
            line = [w for w in line if w.claim_id != request.claim_id and w.silent_for < LINE_GRACE_S]
        else:
            permits = request.permits
            if request.wake is not None:
                # Its number, if it has none, is yet to be given: it is greater than any that is there.
                own = next((waiter for waiter in line if waiter.claim_id == request.claim_id), None)
                ticket = own.ticket if own else request.ticket or LAST_TICKET - 1
                line = [waiter for waiter in line if waiter is not own]
                line.append(Waiting(ticket, request.claim_id, request.take, 0.0))
    return decisions


class Verdicts:
    """What a store is to write of what it has decided for the acquires of one call."""

    def __init__(self) -> None:
        self.grants: list[tuple[Row, Grant]] = []
        #: Who was refused and wants to wait.
        self.waiting: list[Row] = []
        #: How many permits each name has from now on.
        self.permits: dict[str, int] = {}

    def add(self, rows: Sequence[Row], decisions: Sequence[Grant | Held | Mismatch], outcomes: list[Any]) -> None:
        """Note what became of these acquires of one name; a refusal is put into its place of the outcomes."""
        for row, decision in zip(rows, decisions, strict=True):
            name, index, request = row
            if isinstance(decision, Grant):
                self.grants.append((row, decision))
                self.permits[name] = decision.permits
                continue
            outcomes[index] = decision
            if isinstance(decision, Held):
                self.permits[name] = request.permits
                if request.wake is not None:
                    self.waiting.append(row)


def decide(state: State, request: Acquire) -> Grant | Held | Mismatch:
    """What becomes of an acquire; ``Held.ticket`` is left for the store, which knows the line's numbers."""
    mine = next((holding for holding in state.holdings if holding.claim_id == request.claim_id), None)
    other = state.permits is not None and state.permits != request.permits
    if other and mine is None and (state.permits == 0 or not request.resize):
        return Mismatch(state.permits or 0)
    if mine is not None:
        # It may give some of its permits back (a writer becomes a reader), but never get more without asking anew.
        take = min(mine.take, request.take)
        # (Had the name been given another number of permits since, a claim that only repeats itself leaves it so.)
        permits = state.permits or request.permits
        left = permits - sum(holding.take for holding in state.holdings)
        return Grant(mine.slot, mine.fencing_token, mine, take, left + mine.take - take, permits)
    left = request.permits - sum(holding.take for holding in state.holdings)
    place = LAST_TICKET if request.ticket is None else request.ticket
    own = next((waiter.ticket for waiter in state.line if waiter.claim_id == request.claim_id), place)
    place = min(place, own)
    kept = sum(
        waiter.take
        for waiter in state.line
        if waiter.ticket < place and waiter.claim_id != request.claim_id and waiter.silent_for < LINE_GRACE_S
    )
    if left - kept >= request.take:
        taken = {holding.slot for holding in state.holdings}
        slot = next(number for number in range(1, len(taken) + 2) if number not in taken)
        return Grant(slot, state.fencing_token + 1, None, request.take, left - request.take, request.permits)
    ahead = any(waiter.ticket < place and waiter.claim_id != request.claim_id for waiter in state.line)
    if left >= request.take:  # what is there is kept for those ahead, who ask within the grace
        return Held(None, state.fencing_token, 0.0, LINE_GRACE_S, None, True)
    first = min(state.holdings, key=lambda holding: holding.ends_in, default=None)
    if first is None:  # fewer permits in all than it would take: the facade does not let that happen
        return Held(None, state.fencing_token, 0.0, LINE_GRACE_S, None, ahead)
    free_in = max(0.0, first.ends_in)  # 0: it is over, and pinned
    return Held(first.holder, first.fencing_token, first.acquired_at, free_in, None, ahead)
