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

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import LINE_GRACE_S, Granted, Held, Mismatch, StoreBusy
from dibs.stores.mysql_pools_plain import plainly
from dibs.stores.mysql_sql import EPOCH, GRACE, NOW
from dibs.stores.mysql_values import by_name, document, hexed, literal, us
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
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
SELECT w.name, w.ticket FROM {asked} STRAIGHT_JOIN {line} AS w FORCE INDEX (PRIMARY)
ON w.name = UNHEX(a.name) AND w.claim_id = UNHEX(a.claim_id)"""
STAY = f"""\
INSERT INTO {{line}} (name, claim_id, wake, take, ticket, seen_at)
SELECT UNHEX(a.name), UNHEX(a.claim_id), UNHEX(a.wake), a.take, a.ticket, {NOW} FROM {{asked}}
ON DUPLICATE KEY UPDATE seen_at = {NOW}, take = VALUES(take)"""

# Pools in which nobody has held anything for a while, and for which nobody waits. They go as a whole, and only after
# the floor has been raised to their tokens.
_UNUSED = f"""\
NOT EXISTS (SELECT 1 FROM {{lease}} AS l WHERE l.name = p.name
AND (l.expires_at > {NOW} - INTERVAL %d MICROSECOND %s))
AND NOT EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = p.name AND w.seen_at > {GRACE})"""
IDLE_NAMES = 1000
IDLE = f"""\
SELECT p.name FROM {{pool}} AS p WHERE p.name >= x'%s' AND p.name < x'%s' AND {_UNUSED}
ORDER BY p.name LIMIT {IDLE_NAMES}"""
RAISE_FLOOR = """\
UPDATE {meta} SET value = GREATEST(value, (SELECT COALESCE(MAX(p.fencing_token), 0) FROM {pool} AS p
WHERE p.name IN (%s))) WHERE what = 'token_floor'"""
STILL_IDLE = f"""\
SELECT p.name FROM {{pool}} AS p WHERE p.name IN (%s) AND {_UNUSED}
AND p.fencing_token <= (SELECT m.value FROM {{meta}} AS m WHERE m.what = 'token_floor')"""
FORGET_SLOTS = "DELETE FROM {lease} WHERE name IN (%s) AND take IS NOT NULL"
FORGET_LINE = "DELETE FROM {line} WHERE name IN (%s)"
FORGET = "DELETE FROM {pool} WHERE name IN (%s)"


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
    """The statements, with the tables of one store in them. All but ``idle`` run inside a transaction."""

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
        self._idle, self._raise_floor, self._still_idle = text(IDLE), text(RAISE_FLOOR), text(STILL_IDLE)
        self._forget = [text(FORGET_SLOTS), text(FORGET_LINE), text(FORGET)]

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, rows: list[Row], plain: bool, outcomes: list[Any], now_us: int, execute: Execute) -> bool:
        """Decide these acquires, one a name, in the order of names; whether anything was written.

        Where they may be ``plain``, only those are looked at closely that are not.
        """
        asked: dict[str, tuple[int, Acquire]] = {name: (index, request) for name, index, request in rows}
        heads = self._locked(list(asked), execute)
        given, seen = self._given([asked[name][1] for name in heads if plain], execute)
        seen |= self._look({name: one for name, one in asked.items() if name not in given}, heads, execute)
        grants: list[tuple[Acquire, Grant]] = []
        resized: list[Acquire] = []
        waiting: list[Acquire] = []
        for name, (index, request) in asked.items():
            one = seen[name]
            if one.is_lock:
                outcomes[index] = Mismatch(0)
                continue
            permits, token = heads[name]
            decision = given.get(name) or decide(State(permits, max(token, one.token), one.holdings, one.line), request)
            if isinstance(decision, Grant):
                grants.append((request, decision))
                since = now_us / 1e6 if decision.again is None else decision.again.acquired_at
                outcomes[index] = Granted(decision.fencing_token, since, decision.slot)
                continue
            outcomes[index] = decision
            if isinstance(decision, Held):
                if request.permits != permits:
                    resized.append(request)
                if request.wake is not None:
                    waiting.append(request)
        self._grant(grants, seen, now_us, execute)
        noted = {request.name: (request.permits, 0) for request in resized}
        for request, grant in grants:
            if grant.again is None or heads[request.name][0] != grant.permits:
                noted[request.name] = grant.permits, grant.fencing_token
        if noted:
            names = [_name(name) for name in sorted(noted)]
            limits = by_name(names, [str(noted[name][0]) for name in sorted(noted)])
            tokens = by_name(names, [str(noted[name][1]) for name in sorted(noted)])
            execute(self._note % (limits, tokens, ",".join(names)))
        for request, ticket in self._line(waiting, seen, execute):
            index = asked[request.name][0]
            outcomes[index] = outcomes[index]._replace(ticket=ticket)
        return bool(grants or resized or waiting)

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

    def _look(
        self, asked: dict[str, tuple[int, Acquire]], heads: dict[str, tuple[int, int]], execute: Execute
    ) -> dict[str, _Seen]:
        """Read the pools that are locked; make those of new names, whose heads are added."""
        if not asked:
            return {}
        seen = self._see(list(asked), execute)
        over = [name for name in asked if seen[name].over]
        if over:
            self._pins.drop(over, execute)
            execute(self._end % _names(over))
            seen |= self._see(over, execute)
        new = [name for name in asked if name not in heads and not seen[name].is_lock]
        if new:
            execute(self._make % document(f'["{hexed(name)}",{asked[name][1].permits}]' for name in new))
            heads.update(self._locked(new, execute))
            if any(name not in heads for name in new):
                raise TablesMissing("there is no token floor")  # they were emptied
            seen |= self._see(new, execute)
        return seen

    def _locked(self, names: list[str], execute: Execute) -> dict[str, tuple[int, int]]:
        rows: Sequence[tuple[Any, ...]] = execute(self._lock % _names(names)).rows
        return {name.decode(): (int(permits), int(token)) for name, permits, token in rows}

    def _see(self, names: list[str], execute: Execute) -> dict[str, _Seen]:
        found = {name: _Seen() for name in names}
        listed = _names(names)
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
            tokens, where = of.tree(of.tokens), (",".join(of.names), ",".join(f"({slot})" for slot in of.slots))
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

    def _line(self, requests: list[Acquire], seen: dict[str, _Seen], execute: Execute) -> list[tuple[Acquire, int]]:
        """Put those who wait in line, or note that they have been seen there; their tickets."""
        tickets: list[tuple[Acquire, int]] = []
        entering: dict[str, Acquire] = {}
        for request in requests:
            places = (waiter.ticket for waiter in seen[request.name].line if waiter.claim_id == request.claim_id)
            ticket = next(places, request.ticket)
            if ticket:
                tickets.append((request, ticket))
            else:
                entering[request.name] = request
        if tickets:
            execute(self._stay % document(f"[{_waiter(request)},{ticket}]" for request, ticket in tickets))
        if entering:
            execute(self._enter % document(f"[{_waiter(request)}]" for request in entering.values()))
            claims = document(f'["{hexed(name)}","{hexed(r.claim_id)}"]' for name, r in entering.items())
            rows: Sequence[tuple[Any, ...]] = execute(self._places % claims).rows
            tickets += [(entering[name.decode()], int(ticket)) for name, ticket in rows]
        return tickets

    # -- transfer -------------------------------------------------------------------------------------------------

    def transfer(self, request: Transfer, now_us: int, execute: Execute) -> Granted | None:
        """Put one claim in the place of another, under the pool's next token; None when there is no such lease."""
        heads = self._locked([request.name], execute)
        if request.name not in heads:
            return None
        self._pins.drop_ended(request.name, request.slot, execute)
        name, claim, lasting = _name(request.name), hexed(request.claim_id), us(request.ttl)
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

    # -- purge ----------------------------------------------------------------------------------------------------

    def idle(self, execute: Execute, older_than_us: int, first: str, before: str) -> list[str]:
        """The first names of pools that seem unused, in order; the floor has been raised to their tokens."""
        rows: Sequence[tuple[Any, ...]] = execute(self._idle % (hexed(first), hexed(before), older_than_us, "")).rows
        names = [name.decode() for (name,) in rows]
        if names:
            execute(self._raise_floor % _names(names))
        return names

    def purge(self, names: list[str], older_than_us: int, execute: Execute) -> int:
        """Forget those of the pools that are unused indeed; how many slots they had."""
        self._locked(names, execute)
        self._pins.drop(names, execute)
        execute(self._end % _names(names))  # what is not over now is seen by its claim, and nobody else can take any
        unused = _names(names), older_than_us, "OR l.claim_id IS NOT NULL"
        rows: Sequence[tuple[Any, ...]] = execute(self._still_idle % unused).rows
        if not rows:
            return 0
        idle = _names(sorted(name.decode() for (name,) in rows))
        slots, *_ = [execute(statement % idle).affected for statement in self._forget]
        return slots


def _name(name: str) -> str:
    return f"x'{hexed(name)}'"


def _names(names: Sequence[str]) -> str:
    return ",".join([_name(name) for name in names])


class _Columns:
    """What grants write, as literals, column by column; ``slots`` are names with numbers."""

    def __init__(self, grants: list[tuple[Acquire, Grant]]) -> None:
        self.names = [_name(request.name) for request, _ in grants]
        self.slots = [f"{_name(request.name)},{grant.slot}" for request, grant in grants]
        self.claims = [f"x'{hexed(request.claim_id)}'" for request, _ in grants]
        self.holders = [literal(request.holder) for request, _ in grants]
        self.infos = [literal(request.info) for request, _ in grants]
        self.takes = [str(grant.take) for _, grant in grants]
        self.tokens = [str(grant.fencing_token) for _, grant in grants]
        self.lasting = [str(us(request.ttl)) for request, _ in grants]

    def tree(self, values: list[str]) -> str:
        """The value for a row of these names."""
        return by_name(self.names, values)


def _waiter(request: Acquire) -> str:
    wake = hexed(request.wake or "")
    return f'"{hexed(request.name)}","{hexed(request.claim_id)}","{wake}",{request.take}'
