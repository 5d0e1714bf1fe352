"""Permits on MySQL and MariaDB: read under a row lock, decide, write, in one short transaction.

A lock is decided by one conditional write. Whether a semaphore has a permit left takes a look at everybody who holds
one, so a transaction first locks the name's row in the pool table, in the order of names; a renewal or release does
without that lock. READ COMMITTED lets every statement see what was committed before it began, so what is read under the
lock is all that was granted. Names where it is plain that there are enough are added up by the server; of the others
every holder is read. (A lone acquire where it is plain needs no lock: see dibs.stores.mysql_pools_plain.) Holders are
rows of the lease table, as of locks, one for each slot. A slot's row stays as long as its pool: the first slot's stands
where a lock's would, so that only one of them can be made.

The server ends a transaction whose client has stopped (see IDLE_TRANSACTION_S); one whose connection is gone, at once.
"""

from __future__ import annotations

from operator import itemgetter

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch, StoreBusy
from dibs.stores.mysql_pools_plain import plainly
from dibs.stores.mysql_sql import EPOCH, GRACE, NOW
from dibs.stores.mysql_values import by_key, document, hexed, literal, quoted, quoted_all, us
from dibs.stores.permits import Grant, Holding, State, Verdicts, Waiting, decide_all
from dibs.stores.tables import TablesMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.store import Acquire, Transfer
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_pins import Pins
    from dibs.stores.mysql_pools_plain import Tally
    from dibs.stores.rounds import Row

    Execute = Callable[[str], Answer]

LOCK = "SELECT name, permits, fencing_token FROM {pool} WHERE name IN (%s) ORDER BY name FOR UPDATE"
# Pools of new names. The floor is locked against a purge that would raise it, as for locks.
MAKE = """\
INSERT INTO {pool} (name, permits, fencing_token)
SELECT UNHEX(a.name), a.permits, m.value
FROM {asked} STRAIGHT_JOIN (SELECT value FROM {meta} WHERE what = 'token_floor' LOCK IN SHARE MODE) AS m
WHERE TRUE ON DUPLICATE KEY UPDATE permits = {pool}.permits"""
# The slots, free ones too, or the one row of a lock; and the line.
READ = f"""\
SELECT l.name, l.slot, l.claim_id, l.take, l.holder, l.fencing_token,
TIMESTAMPDIFF(MICROSECOND, {EPOCH}, l.acquired_at), TIMESTAMPDIFF(MICROSECOND, {NOW}, l.expires_at)
FROM {{lease}} AS l FORCE INDEX (PRIMARY) WHERE l.name IN (%s)
UNION ALL
SELECT w.name, NULL, w.claim_id, w.take, NULL, w.ticket, NULL, TIMESTAMPDIFF(MICROSECOND, w.seen_at, {NOW})
FROM {{line}} AS w FORCE INDEX (PRIMARY) WHERE w.name IN (%s)"""
# A renewal does not take the lock on the pool: while it is being committed, a lease that goes on may seem to be over.
# So leases that seem over are ended under their own locks, where that is looked at once more, before anybody counts.
# One that is pinned goes on to be counted.
END = f"""\
UPDATE {{lease}} AS l FORCE INDEX (PRIMARY) SET l.claim_id = NULL, l.holder = NULL, l.info = NULL
WHERE l.name IN (%s) AND l.take IS NOT NULL AND l.claim_id IS NOT NULL AND l.expires_at <= {NOW} AND {{unpinned}}"""

# A slot that had been held before, one that never was, and the claim's own. Values that differ from name to name are
# search trees, as in the statements for locks: an UPDATE that joins rows with texts in them takes five times as long.
TAKE = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET claim_id = %s, holder = %s, info = %s, take = %s, fencing_token = %s,
acquired_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), expires_at = {NOW} + INTERVAL %s MICROSECOND
WHERE name IN (%s) AND (name, slot) IN (%s) AND take IS NOT NULL AND claim_id IS NULL AND fencing_token < %s"""
TAKE_NEW = (
    "INSERT INTO {lease} (name, slot, claim_id, holder, info, take, fencing_token, acquired_at, expires_at) VALUES %s"
)
NEW = f"""\
(%s, %s, %s, %s, %s, %s, TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), {NOW} + INTERVAL %s MICROSECOND)"""
TAKE_AGAIN = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET holder = %s, info = %s, take = %s,
expires_at = GREATEST(expires_at, {NOW} + INTERVAL %s MICROSECOND)
WHERE name IN (%s) AND (name, slot, claim_id) IN (%s) AND take IS NOT NULL"""
# A slot in force changes hands; and the repetition of that by the claim that holds already.
MOVE = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET holder = %s, info = %s, fencing_token = %d,
acquired_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), expires_at = {NOW} + INTERVAL %d MICROSECOND, claim_id = x'%s'
WHERE name = %s AND slot = %d AND take IS NOT NULL AND claim_id = x'%s' AND expires_at > {NOW}
AND {{unpinned_of_lease}}"""
MOVED = f"""\
UPDATE {{lease}} FORCE INDEX (PRIMARY) SET expires_at = GREATEST(expires_at, {NOW} + INTERVAL %d MICROSECOND)
WHERE name = %s AND slot = %d AND take IS NOT NULL AND claim_id = x'%s' AND expires_at > {NOW}"""
NOTE = """\
UPDATE {pool} FORCE INDEX (PRIMARY) SET permits = %s, fencing_token = GREATEST(fencing_token, %s) WHERE name IN (%s)"""

# Who is granted leaves the line, and so do those who ask no more.
LEAVE = f"""\
DELETE w FROM {{asked}} STRAIGHT_JOIN {{line}} AS w FORCE INDEX (PRIMARY) ON w.name = UNHEX(a.name)
WHERE w.claim_id = UNHEX(a.claim_id) OR w.seen_at <= {GRACE}"""
# Who is refused and wants to wait: at the end of the line, or seen alive in line, or back in line.
ENTER = f"""\
INSERT INTO {{line}} (name, claim_id, wake, take, seen_at)
SELECT UNHEX(a.name), UNHEX(a.claim_id), UNHEX(a.wake), a.take, {NOW} FROM {{asked}}"""
PLACES = """\
SELECT w.name, w.claim_id, w.ticket FROM {asked} STRAIGHT_JOIN {line} AS w FORCE INDEX (PRIMARY)
ON w.name = UNHEX(a.name) AND w.claim_id = UNHEX(a.claim_id)"""
STAY = f"""\
INSERT INTO {{line}} (name, claim_id, wake, take, ticket, seen_at)
SELECT UNHEX(a.name), UNHEX(a.claim_id), UNHEX(a.wake), a.take, a.ticket, {NOW} FROM {{asked}}
ON DUPLICATE KEY UPDATE seen_at = {NOW}, take = VALUES(take)"""


class _Seen:
    """What was read of a name."""

    __slots__ = ("holdings", "is_lock", "line", "over", "slots", "token")

    def __init__(self) -> None:
        self.is_lock = False
        #: Those that have a row, held or not.
        self.slots: set[int] = set()
        self.token = 0
        self.holdings: list[Holding] = []
        #: A lease seems to be over.
        self.over = False
        self.line: list[Waiting] = []


class Pools:
    """The statements, with the tables of one store in them. All run inside a transaction."""

    def __init__(
        self,
        text: Callable[..., str],
        pins: Pins,
        tallies: Callable[[list[Acquire], Execute], dict[str, Tally]],
    ) -> None:
        self._pins = pins
        #: What the slots of names amount to that are plain to see.
        self._tallies = tallies
        self._lock = text(LOCK)
        self._make = text(MAKE, "name", "permits")
        self._read = text(READ)
        self._end = text(END)
        self._take, self._take_new, self._take_again = text(TAKE), text(TAKE_NEW), text(TAKE_AGAIN)
        self._move, self._moved = text(MOVE), text(MOVED)
        self._note = text(NOTE)
        self._leave = text(LEAVE, "name", "claim_id")
        self._enter = text(ENTER, "name", "claim_id", "wake", "take")
        self._places = text(PLACES, "name", "claim_id")
        self._stay = text(STAY, "name", "claim_id", "wake", "take", "ticket")

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, rows: list[Row], plain: bool, outcomes: list[Any], now_us: int, execute: Execute) -> bool:
        """Decide these acquires, in the order of names; whether anything was written. Those of a name differ in claims.

        Where they may be ``plain``, only those are looked at closely that are not.
        """
        asked: dict[str, list[Row]] = {}
        for row in rows:
            asked.setdefault(row[0], []).append(row)
        heads = self._locked(list(asked), execute)
        given, seen = self._given([asked[name][0][2] for name in heads if plain and len(asked[name]) == 1], execute)
        closely = {name: rows_of[0][2].permits for name, rows_of in asked.items() if name not in given}
        seen |= self._look(closely, heads, execute)
        verdicts, now = Verdicts(), now_us / 1e6
        for name, rows_of in asked.items():
            requests, one = [row[2] for row in rows_of], seen[name]
            decisions: Sequence[Grant | Held | Mismatch]
            if name in given:
                decisions = [given[name]]
            elif one.is_lock:
                decisions = [Mismatch(0)] * len(rows_of)
            else:
                permits, token = heads[name]
                state = State(permits, max(token, one.token), one.holdings, one.line)
                decisions = decide_all(state, requests, now)
            verdicts.add(rows_of, decisions, outcomes)
        for (_, index, _), grant in verdicts.grants:
            since = now if grant.again is None else grant.again.acquired_at
            outcomes[index] = Granted(grant.fencing_token, since, grant.slot)
        self._grant([(row[2], grant) for row, grant in verdicts.grants], seen, now_us, execute)
        noted = self._note_heads(verdicts, heads, execute)
        for index, ticket in self._line(verdicts.waiting, seen, execute):
            outcomes[index] = outcomes[index]._replace(ticket=ticket)
        return bool(verdicts.grants or noted or verdicts.waiting)

    def _given(self, requests: list[Acquire], execute: Execute) -> tuple[dict[str, Grant], dict[str, _Seen]]:
        """What is granted without a closer look at pools that are locked."""
        given, seen = dict[str, Grant](), dict[str, _Seen]()
        tallies = self._tallies(requests, execute) if requests else {}
        for request in requests:
            tally = tallies.get(request.name)
            grant = tally and plainly(tally, request)
            if tally and grant:
                given[request.name] = grant
                seen[request.name] = _Seen()
                seen[request.name].slots = set() if tally.free is None else {tally.free}
        return given, seen

    def _look(self, asked: dict[str, int], heads: dict[str, tuple[int, int]], execute: Execute) -> dict[str, _Seen]:
        """Read the pools that are locked; make those of new names, of so many permits, whose heads are added."""
        if not asked:
            return {}
        seen = self._see(list(asked), execute)
        over = [name for name in asked if seen[name].over]
        if over:
            self._pins.drop(over, execute)
            execute(self._end % quoted_all(over))
            seen |= self._see(over, execute)
        new = [name for name in asked if name not in heads and not seen[name].is_lock]
        if new:
            execute(self._make % document(f'["{hexed(name)}",{asked[name]}]' for name in new))
            heads.update(self._locked(new, execute))
            if any(name not in heads for name in new):
                raise TablesMissing("there is no token floor")  # they were emptied
            seen |= self._see(new, execute)
        return seen

    def _locked(self, names: list[str], execute: Execute) -> dict[str, tuple[int, int]]:
        rows: Sequence[tuple[Any, ...]] = execute(self._lock % quoted_all(names)).rows
        return {name.decode(): (int(permits), int(token)) for name, permits, token in rows}

    def _see(self, names: list[str], execute: Execute) -> dict[str, _Seen]:
        found = {name: _Seen() for name in names}
        listed = quoted_all(names)
        rows: Sequence[tuple[Any, ...]] = execute(self._read % (listed, listed)).rows
        for name, slot, claim, take, holder, number, since_us, left_us in rows:
            one = found[name.decode()]
            if slot is None:
                one.line.append(Waiting(int(number), claim.decode(), int(take), int(left_us) / 1e6))
                continue
            one.token = max(one.token, int(number))
            if take is None:
                one.is_lock = True
                continue
            one.slots.add(int(slot))
            if claim is not None:
                since, left = int(since_us) / 1e6, int(left_us) / 1e6
                who = claim.decode(), int(take), (holder or b"").decode()
                one.holdings.append(Holding(int(slot), *who, int(number), since, left))
                one.over = one.over or left <= 0
        return found

    def _grant(
        self, grants: list[tuple[Acquire, Grant]], seen: dict[str, _Seen], now_us: int, execute: Execute
    ) -> None:
        old: list[tuple[Acquire, Grant]] = []
        new: list[tuple[Acquire, Grant]] = []
        again: list[tuple[Acquire, Grant]] = []
        for request, grant in grants:
            of_kind = again if grant.again else old if grant.slot in seen[request.name].slots else new
            of_kind.append((request, grant))
        done = 0
        if old:
            of = _Columns(old)
            tokens, where = of.tree(of.tokens), (",".join(of.names), ",".join(of.keys))
            written = of.tree(of.claims), of.tree(of.holders), of.tree(of.infos), of.tree(of.takes), tokens
            done += execute(self._take % (*written, now_us, of.tree(of.lasting), *where, tokens)).affected
        if new:
            of = _Columns(new)
            columns = of.slots, of.claims, of.holders, of.infos, of.takes, of.tokens, of.lasting
            rows = [NEW % (*values, now_us, lasting) for *values, lasting in zip(*columns, strict=True)]
            done += execute(self._take_new % ",".join(rows)).affected
        if again:
            of = _Columns(again)
            written_again = of.tree(of.holders), of.tree(of.infos), of.tree(of.takes), of.tree(of.lasting)
            of_claims = [f"({slot},{claim})" for slot, claim in zip(of.slots, of.claims, strict=True)]
            done += execute(self._take_again % (*written_again, ",".join(of.names), ",".join(of_claims))).affected
        if done < len(grants):
            raise StoreBusy("a lease ended or was made while its permits were asked for")
        leaving = [
            f'["{hexed(request.name)}","{hexed(request.claim_id)}"]'
            for request, _ in grants
            if any(
                waiter.claim_id == request.claim_id or waiter.silent_for >= LINE_GRACE_S
                for waiter in seen[request.name].line
            )
        ]
        if leaving:
            execute(self._leave % document(leaving))

    def _note_heads(self, verdicts: Verdicts, heads: dict[str, tuple[int, int]], execute: Execute) -> bool:
        """Write the numbers of permits and the tokens that have changed; whether any has."""
        tokens = {row[0]: grant.fencing_token for row, grant in verdicts.grants if grant.again is None}
        noted = sorted(name for name, now in verdicts.permits.items() if name in tokens or now != heads[name][0])
        if noted:
            names = [quoted(name) for name in noted]
            limits = by_key(names, [str(verdicts.permits[name]) for name in noted])
            last = by_key(names, [str(tokens.get(name, 0)) for name in noted])
            execute(self._note % (limits, last, ",".join(names)))
        return bool(noted)

    def _line(self, waiting: list[Row], seen: dict[str, _Seen], execute: Execute) -> list[tuple[int, int]]:
        """Put those who wait in line, or note that they have been seen there; their tickets, by their places."""
        tickets: list[tuple[int, int]] = []
        staying: list[str] = []
        entering: dict[tuple[str, str], Row] = {}
        for name, index, request in waiting:
            places = (waiter.ticket for waiter in seen[name].line if waiter.claim_id == request.claim_id)
            ticket = next(places, request.ticket)
            if ticket:
                tickets.append((index, ticket))
                staying.append(f"[{_waiter(request)},{ticket}]")
            else:
                entering[name, request.claim_id] = name, index, request
        if staying:
            execute(self._stay % document(staying))
        if entering:
            # In the order of the call, which is that of arrival.
            arrived = sorted(entering.values(), key=itemgetter(1))
            execute(self._enter % document(f"[{_waiter(request)}]" for _, _, request in arrived))
            claims = document(f'["{hexed(name)}","{hexed(claim)}"]' for name, claim in entering)
            rows: Sequence[tuple[Any, ...]] = execute(self._places % claims).rows
            tickets += [(entering[name.decode(), claim.decode()][1], int(ticket)) for name, claim, ticket in rows]
        return tickets

    # -- transfer -------------------------------------------------------------------------------------------------

    def transfer(self, request: Transfer, now_us: int, execute: Execute) -> Granted | None:
        """Put one claim in the place of another, under the pool's next token; None when there is no such lease."""
        heads = self._locked([request.name], execute)
        if request.name not in heads:
            return None
        self._pins.drop_ended(request.name, request.slot, execute)
        name, claim, lasting = quoted(request.name), hexed(request.claim_id), us(request.ttl)
        one = self._see([request.name], execute)[request.name]
        permits, token = heads[request.name]
        token = max(token, one.token) + 1
        written = literal(request.holder), literal(request.info), token, now_us, lasting, claim
        if execute(self._move % (*written, name, request.slot, hexed(request.from_claim))).affected:
            execute(self._note % (permits, token, name))
            return Granted(token, now_us / 1e6, request.slot)
        if not execute(self._moved % (lasting, name, request.slot, claim)).affected:
            return None
        mine = next((holding for holding in one.holdings if holding.slot == request.slot), None)
        return None if mine is None else Granted(mine.fencing_token, mine.acquired_at, mine.slot)

    def settle(self, names: list[str], execute: Execute) -> None:
        """Lock these pools, so that nobody can take any, and end what is over: who holds then is seen by its claim."""
        self._locked(names, execute)
        self._pins.drop(names, execute)
        execute(self._end % quoted_all(names))


class _Columns:
    """What grants write, as literals, column by column; ``slots`` are names with numbers."""

    def __init__(self, grants: list[tuple[Acquire, Grant]]) -> None:
        grants = sorted(grants, key=lambda grant: (grant[0].name, grant[1].slot))
        self.names = [quoted(request.name) for request, _ in grants]
        self.slots = [f"{quoted(request.name)},{grant.slot}" for request, grant in grants]
        self.keys = [f"({slot})" for slot in self.slots]
        self.claims = [quoted(request.claim_id) for request, _ in grants]
        self.holders = [literal(request.holder) for request, _ in grants]
        self.infos = [literal(request.info) for request, _ in grants]
        self.takes = [str(grant.take) for _, grant in grants]
        self.tokens = [str(grant.fencing_token) for _, grant in grants]
        self.lasting = [str(us(request.ttl)) for request, _ in grants]

    def tree(self, values: list[str]) -> str:
        """The value for a row of these names and slots."""
        return by_key(self.keys, values, "(name, slot)")


def _waiter(request: Acquire) -> str:
    wake = hexed(request.wake or "")
    return f'"{hexed(request.name)}","{hexed(request.claim_id)}","{wake}",{request.take}'
