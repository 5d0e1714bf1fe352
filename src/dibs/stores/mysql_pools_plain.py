"""A permit on MySQL and MariaDB where it is plain that there are enough: one look at most, and one conditional write.

The look is one SELECT, in one snapshot: the pool's limit and token, and what its slots amount to. The server adds them
up, so that a thousand holders are one row of the answer. The write is one UPDATE of the pool and of a free slot, made
only if nobody is in line and the pool's token and limit are as they were seen. Every grant raises the token, so none
came in between; releases and renewals since then took nothing away. A client that finds a name as it left it itself,
with nothing held, writes at once the next time. One that was overtaken leaves off looking for a while.

What is not plain (too little left, somebody in line, a claim that holds already, a lease that seems over, another
limit, a name that is a lock, a gap among the slots) is left for dibs.stores.mysql_pools. So nobody is refused here, and
who is granted, ``decide`` would have granted, too.
"""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.store import Granted
from dibs.stores.mysql_sql import EPOCH, NOW
from dibs.stores.mysql_values import hexed, literal, quoted_all, us
from dibs.stores.permits import Grant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.store import Acquire
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_link import Connection

    Execute = Callable[[str], Answer]

# Of the names that are plain to see: those whose slots are numbered from 1 without a gap (a row without permits, a
# lock's, would be one), none of them held by a claim that asks, seeming over, or under a token that the pool does not
# know, and with nobody in line. The last column is the first slot that is free and was held before.
TALLY = f"""\
SELECT p.name, p.permits, p.fencing_token, COUNT(l.take) AS slots, SUM(IF(l.claim_id IS NULL, 0, l.take)),
MIN(IF(l.claim_id IS NULL, l.slot, NULL))
FROM {{pool}} AS p FORCE INDEX (PRIMARY) STRAIGHT_JOIN {{lease}} AS l FORCE INDEX (PRIMARY) ON l.name = p.name
WHERE p.name IN (%s) GROUP BY p.name
HAVING slots = MAX(l.slot) AND MAX(l.fencing_token) <= p.fencing_token
AND NOT MAX(l.claim_id IS NOT NULL AND (l.claim_id IN (%s) OR l.expires_at <= {NOW}))
AND NOT EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = p.name)"""
# The pool's row is locked before the slot's, as by those who decide under its lock. A free slot has no info; one that
# is given would make the server write a temporary table to disk, so who gives one goes the long way.
SEIZE = f"""\
UPDATE {{pool}} AS p FORCE INDEX (PRIMARY) STRAIGHT_JOIN {{lease}} AS l FORCE INDEX (PRIMARY) ON l.name = p.name
SET p.fencing_token = %d, l.claim_id = x'%s', l.holder = %s, l.take = %d, l.fencing_token = %d,
l.acquired_at = TIMESTAMPADD(MICROSECOND, %d, {EPOCH}), l.expires_at = {NOW} + INTERVAL %d MICROSECOND
WHERE p.name = x'%s' AND p.permits = %d AND p.fencing_token = %d
AND l.name = x'%s' AND l.slot = %d AND l.take IS NOT NULL AND l.claim_id IS NULL
AND NOT EXISTS (SELECT 1 FROM {{line}} AS w WHERE w.name = x'%s')"""
# Of so many names a client remembers how it went the last time.
REMEMBERED_MAX = 1000
# Who was overtaken by another's grant takes so many permits under the pool's lock before it looks without it again.
LOCKED_TIMES = 10


class Tally(NamedTuple):
    """What the server says of a name that is plain to see."""

    permits: int
    fencing_token: int
    #: Those that have a row, held or not: the numbers from 1 to this one.
    slots: int
    taken: int
    #: The smallest of them that nobody holds, if there is one.
    free: int | None


def plainly(tally: Tally, request: Acquire) -> Grant | None:
    """What ``decide`` would grant, where this is enough to tell."""
    left = tally.permits - tally.taken - request.take
    if tally.permits != request.permits or left < 0:
        return None
    return Grant(tally.free or tally.slots + 1, tally.fencing_token + 1, None, request.take, left, tally.permits)


class _Last(NamedTuple):
    """How it went with a name the last time."""

    #: What there is to see as long as nobody else is granted permits, once ours are given back; None where that is not
    #: known.
    tally: Tally | None = None
    #: It had been so that time, too: nobody but us was granted any in between.
    alone: bool = False
    #: For so many more times it is not worth to look.
    locked_times: int = 0


class Plain:
    """The statements, with the tables of one store in them."""

    def __init__(self, text: Callable[..., str]) -> None:
        self._tally, self._seize = text(TALLY), text(SEIZE)
        self._last: dict[str, _Last] = {}

    def tallies(self, requests: list[Acquire], execute: Execute) -> dict[str, Tally]:
        """Of the names of these requests those that are plain to see."""
        names = quoted_all(request.name for request in requests)
        claims = quoted_all(request.claim_id for request in requests)
        rows: Sequence[tuple[Any, ...]] = execute(self._tally % (names, claims)).rows
        return {
            name.decode(): Tally(int(permits), int(token), int(slots), int(taken), None if free is None else int(free))
            for name, permits, token, slots, taken, free in rows
        }

    def take(self, request: Acquire, connection: Connection, deadline: Deadline) -> tuple[Granted | None, bool]:
        """What is granted; where nothing is, whether it may be plain all the same to who holds the pool's lock.

        So it is when somebody else was granted permits meanwhile, and when there is no row yet for another slot.
        """
        name = request.name
        last = self._last.pop(name, _Last())
        if last.locked_times:
            self._remember(name, _Last(locked_times=last.locked_times - 1))
            return None, True
        if last.tally is not None and last.alone:
            granted = self._write(last.tally, True, request, connection, deadline)
            if granted is not None:
                return granted, True
        tally = self.tallies([request], partial(connection.ask, deadline=deadline)).get(name)
        if tally is None or plainly(tally, request) is None:
            return None, False
        if tally.free is None:
            return None, True
        granted = self._write(tally, tally == last.tally, request, connection, deadline)
        if granted is None:
            self._remember(name, _Last(locked_times=LOCKED_TIMES))
        return granted, True

    def _write(
        self, tally: Tally, alone: bool, request: Acquire, connection: Connection, deadline: Deadline
    ) -> Granted | None:
        grant = plainly(tally, request)
        if grant is None:
            return None
        name, token, now_us = hexed(request.name), grant.fencing_token, connection.server_now(deadline)
        lease = hexed(request.claim_id), literal(request.holder), grant.take, token, now_us, us(request.ttl)
        seen = name, tally.permits, tally.fencing_token, name, grant.slot, name
        if not connection.write(self._seize, (token, *lease, *seen), deadline):
            return None
        if not tally.taken:
            self._remember(request.name, _Last(tally._replace(fencing_token=token), alone))
        return Granted(token, now_us / 1e6, grant.slot)

    def _remember(self, name: str, last: _Last) -> None:
        if len(self._last) >= REMEMBERED_MAX:
            self._last.clear()
        self._last[name] = last
