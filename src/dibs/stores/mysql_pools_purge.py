"""Permits on MySQL and MariaDB that nobody has held for a while: pools are purged as a whole, their tokens kept."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.stores.mysql_sql import GRACE, NOW
from dibs.stores.mysql_values import hexed, quoted_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_pools import Pools

    Execute = Callable[[str], Answer]

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


class IdlePools:
    """The statements, with the tables of one store in them."""

    def __init__(self, text: Callable[..., str], pools: Pools) -> None:
        self._pools = pools
        self._idle, self._raise_floor, self._still_idle = text(IDLE), text(RAISE_FLOOR), text(STILL_IDLE)
        self._forget = [text(FORGET_SLOTS), text(FORGET_LINE), text(FORGET)]

    def idle(self, execute: Execute, older_than_us: int, first: str, before: str) -> list[str]:
        """The first names of pools that seem unused, in order; the floor has been raised to their tokens."""
        rows: Sequence[tuple[Any, ...]] = execute(self._idle % (hexed(first), hexed(before), older_than_us, "")).rows
        names = [name.decode() for (name,) in rows]
        if names:
            execute(self._raise_floor % quoted_all(names))
        return names

    def purge(self, names: list[str], older_than_us: int, execute: Execute) -> int:
        """Forget those of the pools that are unused indeed; how many slots they had."""
        self._pools.settle(names, execute)
        unused = quoted_all(names), older_than_us, "OR l.claim_id IS NOT NULL"
        rows: Sequence[tuple[Any, ...]] = execute(self._still_idle % unused).rows
        if not rows:
            return 0
        idle = quoted_all(sorted(name.decode() for (name,) in rows))
        slots, *_ = [execute(statement % idle).affected for statement in self._forget]
        return slots
