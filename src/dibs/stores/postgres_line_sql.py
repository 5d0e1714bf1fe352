"""The SQL of whom a release or a grant tells on PostgreSQL: who is next in line, or several for whom there is enough.

Of a lock only the first in line can have it. Permits may be enough for several, and each of them would otherwise be
told by the grant to the one before it: a round trip for each, while the permits are used by nobody. A NOTIFY makes
commits wait for each other, so nobody is told in vain, and without a waiter there is none.
"""

from __future__ import annotations

from dibs.store import LINE_GRACE_S, TOLD_MAX

# A release looks into the line as its statement begins. Whoever takes a place meanwhile is not seen there and finds the
# name held until that statement is over. So a waiter who is the first in line asks once more, when it certainly is.
UNSEEN_S = 0.02
# Of whoever is in line: it still asks.
ALIVE = f"w.seen_at > clock_timestamp() - interval '{LINE_GRACE_S} s'"
# Tell those for whom so many permits are enough, beside all who are before them; how many were told. The first is told
# in any case: another release, at this very moment, may make the rest of the room for it.
_TOLD = f"""\
(SELECT count(pg_notify(n.wake, n.name)) FROM (
            SELECT w.name, w.wake, sum(w.take) OVER o AS upto, row_number() OVER o AS nth
            FROM {{line}} AS w WHERE w.name = %(name)s AND %(those)s
            WINDOW o AS (ORDER BY w.ticket ROWS UNBOUNDED PRECEDING)
            LIMIT least(greatest(%(left)s, 0), {TOLD_MAX})
        ) AS n WHERE n.nth = 1 OR n.upto <= %(left)s)"""
# How much is left when so many permits of a name are given back, counted as the statement began. (Of a lock: its one.)
_ROOM = """\
(SELECT CASE WHEN %(take)s IS NULL THEN 1 ELSE greatest(0, (
            SELECT p.permits - h.taken + %(take)s FROM {pool} AS p, (
                SELECT sum(x.take) AS taken FROM {lease} AS x
                WHERE x.name = %(name)s AND x.take IS NOT NULL AND x.claim_id IS NOT NULL) AS h
            WHERE p.name = %(name)s)) END AS room OFFSET 0) AS r"""


def told_of_grant(name: str, but: str, left: str) -> str:
    """Tell whoever is next, where a grant has left so many permits; not those of these claims."""
    return _TOLD % {"name": name, "those": f"w.claim_id <> ALL ({but}) AND {ALIVE}", "left": left}


def told_of_release(name: str, take: str, leaving: str = "false") -> str:
    """Tell whoever is next, if anybody is in line. (Who waits for permits asks all the time, or is dead.)"""
    those = f"({take} IS NULL OR {ALIVE}) AND NOT {leaving}"
    return f"""\
CASE WHEN EXISTS (SELECT FROM {{line}} AS w WHERE w.name = {name}) THEN (
        SELECT {_TOLD % {"name": name, "those": those, "left": "r.room"}}
        FROM {_ROOM % {"name": name, "take": take}}) END"""
