"""What PostgreSQL is told to run a caller's query: in a transaction that only reads, with the planner's freedom back.

Whether somebody holds a key is looked up row by row, in a subquery that cannot become a join: so rows come in the
query's order, and no more of them are read than are wanted and held.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.queries import filled

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.queries import Query

# What our connections take from the planner (see dibs.stores.postgres_link), a caller's query is given back. Not JIT:
# the planner expects to look up what is held for every row, and would compile for 150 ms what then takes 2.
_WAYS = ("hashjoin", "mergejoin", "seqscan", "bitmapscan", "material")
_FREED = ("plan_cache_mode", *(f"enable_{way}" for way in _WAYS))
BEFORE = "BEGIN TRANSACTION READ ONLY; " + " ".join(f"SET LOCAL {name} TO DEFAULT;" for name in _FREED)
_HELD = """\
SELECT true FROM {lease} AS l WHERE l.name = {prefix} || q.dibs_key::text AND l.claim_id IS NOT NULL
    AND l.expires_at > clock_timestamp() LIMIT 1"""


def held(query: Query, lease: str, literal: Callable[[object], str]) -> str:
    """What brings a row where somebody has the lease on the row of a query, ``q``."""
    return _HELD.format(lease=lease, prefix=literal(query.prefix))


def statement(query: Query, held: str, literal: Callable[[object], str]) -> str:
    """The statement that finds what is asked for."""
    found = f"SELECT * FROM (\n{filled(query, literal)}) AS q (dibs_key)\n"
    if query.only is not None:
        return f"{found}WHERE q.dibs_key IN ({', '.join(map(literal, query.only))})"
    return f"{found}WHERE ({held}) IS NULL\nLIMIT {query.limit:d}"
