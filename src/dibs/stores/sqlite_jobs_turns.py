"""Which jobs of an SQLite queue a take gets when only so many of a group may be claimed.

A job may be, when it is among the first of its group and fewer than so many of the group are. (A job that is revived
may come to be the first while later ones are worked.)

A group with a thousand jobs has one that may be taken, and 999 that stand in the way of other groups' in the claim
order. So that order is looked through for ``LOOK_MAX`` jobs only. When there is none among them that has its turn, the
first jobs of each group are looked up, which takes a step in an index for each group, however many jobs it has. Jobs
without a group that stand behind so many can be found only by passing over all before them; that is done every now and
then (``LOOK_BACK_S``, ``LOOK_BACK_PART``).
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now
from dibs.jobs import LOOK_BACK_PART, LOOK_BACK_S

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Sequence

    from dibs.jobs import Take

# Jobs of the claim order that are looked at first.
LOOK_MAX = 200
# Queues of which is remembered when all of the claim order was looked through.
QUEUES_MAX = 1000


class Turns:
    def __init__(self, sql: dict[str, str]) -> None:
        self._sql = sql
        #: When to look through all of the claim order again, by queue.
        self._look_at: dict[str, float] = {}

    def rows(
        self, db: sqlite3.Connection, take: Take, priorities: Sequence[tuple[int, float]], wall: float
    ) -> Generator[tuple[Any, ...], None, None]:
        """Rows that may be claimed, in the claim order: as many as are wanted, or fewer."""
        due = [priority for priority, first_due in priorities if first_due <= wall]
        limit, looked = take.group_limit, 0
        #: How many of each group are worked.
        worked = Counter(group for (group,) in db.execute(self._sql["worked"], (take.name,)))
        ids: list[int] = []

        def choose(job: int, group: str | None) -> None:
            if group is None or worked[group] < limit:
                worked[group] += group is not None
                ids.append(job)

        for priority in due:
            values = (limit, limit, take.name, priority, wall, LOOK_MAX - looked)
            with closing(db.execute(self._sql["turns"], values)) as seen:
                for job, group, has_its_turn in seen:
                    looked += 1
                    if has_its_turn:
                        choose(job, group)
                    if len(ids) == take.n:
                        break
            if len(ids) == take.n or looked == LOOK_MAX:
                break
        if not ids and looked == LOOK_MAX:
            for job, group in self._behind(db, take, due, wall):
                choose(job, group)
        for job in ids[: take.n]:
            yield db.execute(self._sql["this"], (job,)).fetchone()

    def _behind(
        self, db: sqlite3.Connection, take: Take, due: Sequence[int], wall: float
    ) -> list[tuple[int, str | None]]:
        """Those that stand further behind, in the claim order: the first of each group, and some without one."""
        name = take.name
        found: list[tuple[Any, ...]]
        found = db.execute(self._sql["firsts"], (name, name, name, name, take.group_limit, wall)).fetchall()
        began = boot_now()
        if began >= self._look_at.get(name, 0.0):
            for priority in due:
                found += db.execute(self._sql["ungrouped"], (name, priority, wall, take.n)).fetchall()
            if len(self._look_at) >= QUEUES_MAX:
                self._look_at.clear()
            took_s = boot_now() - began
            self._look_at[name] = began + max(LOOK_BACK_S, LOOK_BACK_PART * took_s)
        found.sort(key=lambda row: row[:3])
        return [(job, group) for *_, job, group in found]
