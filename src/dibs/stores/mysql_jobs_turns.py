"""Takes from the queues of MySQL and MariaDB with a limit for each group: whose turn it is, and how that is found.

*The limit.* A job may be claimed when it is one of the first n of its group, and fewer than n of the group are claimed.
The former alone would do, if no job joined a group before others that are worked. But some do: one that was put within
somebody's transaction, which has its id before others can see it; one that is revived, or replaced. Claimed jobs are
found by the index of the claims, where there are few. So that nobody claims between the counting and the claiming,
takes with a limit from one queue go one after the other: each first locks a row that stands for the queue, and counts
in statements that begin after that. It locks that row before any job, and waits for no job, so nobody waits in a
circle.

*The search.* A take looks at free jobs in the claim order. Where LOOK_MAX of them wait for their turns, it lets go of
the lock, and steps from group to group in their index, however many jobs each has; the jobs without a group stand
in one stretch of the same index. What it finds it claims under the lock, where it is looked at once more.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from zlib import crc32

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.clock import boot_now
from dibs.jobs import LOOK_BACK_PART
from dibs.stores import mysql_jobs_sql as sql
from dibs.stores.mysql_jobs_take import Found, after, held, rows_of
from dibs.stores.mysql_values import hexed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from typing import Any

    from dibs.jobs import Take, Taken
    from dibs.store import Held
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_jobs_take import Queue, Ranks, Takes

    Execute = Callable[[str], Answer]
    Work = Callable[[Execute], "Outcome"]

# Free jobs that are looked at in the claim order: first so many more than are wanted, then so many. As long as some of
# them have their turn it goes on, with twice as many each time, and so often at most.
LOOK_FIRST, LOOK_MAX = 20, 200
LOOKS_MAX = 7
# Groups of one search; the next one goes on behind them. And how many jobs more than are wanted it brings, since others
# may have claimed some of them when it has the lock.
SEARCH_GROUPS_MAX = 200
SEARCH_SPARE = 20
# After a search that took longer there is none for LOOK_BACK_PART times as long as it took.
SEARCH_SHORT_S = 0.003
# How often one take buries jobs without tries left, and looks again at what they kept waiting.
ROUNDS_MAX = 100
# When to ask again, where a job that has its turn was locked by somebody.
LOCKED_S = 0.05
# Queues share so many rows to lock, so that there are no more of them, whatever queues come and go.
LOCKS_MAX = 1000


class _NoLock(Exception):
    """The row that is to be locked has not been made yet."""


class _Place(NamedTuple):
    """Where a job is in the claim order, and in which group."""

    rank: int
    due_at: str
    id: int
    group: str | None


class Outcome(NamedTuple):
    """What came of a transaction."""

    taken: Taken | None
    spent: list[int]
    #: A job that has its turn was locked by somebody.
    locked: bool
    #: There may be jobs behind those that were looked at.
    deep: bool = False


class Turns:
    """The takes with a limit of one connection."""

    def __init__(self, takes: Takes, text: Callable[[str], str], certifies: Callable[[], bool]) -> None:
        self._takes = takes
        self._certifies = certifies
        self._lock, self._mark_lock, self._make_lock = text(sql.LOCK_QUEUE), text(sql.MARK_LOCK), text(sql.MAKE_LOCK)
        self._look, self._last, self._lock_free = text(sql.LOOK), text(sql.LAST_FREE), text(sql.LOCK_FREE)
        self._worked, self._ungrouped = text(sql.WORKED), text(sql.UNGROUPED)
        self._first_of_next = text(sql.FIRST_OF_NEXT)
        self._next_over, self._next_due = text(sql.NEXT_OVER), text(sql.NEXT_DUE)

    def take(
        self,
        take: Take,
        ask: Execute,
        transaction: Callable[[Work], Outcome],
        bury: Callable[[Sequence[int]], object],
    ) -> Taken | Held:
        """Claim jobs in a transaction; ``bury`` those that are found to have no tries left."""
        queue = self._takes.queue(take.name)
        locked = partial(self._locked, take.name, ask, transaction)
        for _ in range(ROUNDS_MAX):
            outcome = locked(partial(self._in_order, take, queue))
            unseen = outcome.deep
            if unseen and not outcome.spent and boot_now() >= queue.search_at:
                places, unseen = self._searched(take, queue, ask)
                if places:
                    outcome = locked(partial(self._among, take, places))
            if outcome.spent:
                bury(outcome.spent)
            if outcome.taken or not outcome.spent:
                break
        taken = outcome.taken or self._takes.again(take, ask)
        if taken:
            return taken
        soon = [self._next_in(take.name, queue, ask)]
        if outcome.locked:
            soon.append(LOCKED_S)
        if unseen:
            soon.append(max(0.0, queue.search_at - boot_now()))
        return held(min(soon))

    def _next_in(self, name: str, queue: Queue, ask: Execute) -> float:
        """When the next job is due or the next claim expires: what is free and waits for its turn waits for these."""
        due = [self._next_due % (hexed(name), rank) for rank in queue.ranks]
        return self._takes.soonest([self._next_over % hexed(name), *due], ask)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _locked(self, name: str, ask: Execute, transaction: Callable[[Work], Outcome], work: Work) -> Outcome:
        lock = hexed(f"take_{crc32(name.encode()) % LOCKS_MAX}")

        def locked(execute: Execute) -> Outcome:
            if not execute(self._lock % lock).rows:
                raise _NoLock
            outcome = work(execute)
            if outcome.taken and self._certifies():
                execute(self._mark_lock % lock)
            return outcome

        try:
            return transaction(locked)
        except _NoLock:
            # Outside of the transaction: those that make it at once would wait for each other's ends.
            ask(self._make_lock % lock)
            return transaction(locked)

    def _in_order(self, take: Take, queue: Queue, execute: Execute) -> Outcome:
        """What comes first in the claim order: from the beginning, or behind the last that was taken."""
        began = boot_now()
        look_back = began >= queue.look_at
        looks: list[Found] = []
        deep = False
        for from_beginning in (True, False) if look_back else (False, True):
            if from_beginning:
                queue.ranks = dict.fromkeys(self._takes.live_ranks(take.name, queue, execute)) | queue.ranks
            elif not any(queue.ranks.values()):
                continue
            look, more = self._looked(take, dict.fromkeys(queue.ranks) if from_beginning else queue.ranks, execute)
            looks.append(look)
            deep = more if from_beginning else deep
            if look.full or (look.chosen and look_back):
                break
        if look_back:
            queue.looked_back(began, looks[0])
        return self._claimed(take, looks, execute, deep)

    def _looked(self, take: Take, ranks: Ranks, execute: Execute) -> tuple[Found, bool]:
        """What has its turn behind these places, as far as the jobs there bring any; and whether there are more."""
        found = Found(take.n)
        name, first, most = hexed(take.name), None, min(take.n + LOOK_FIRST, LOOK_MAX)
        for _ in range(LOOKS_MAX):
            where = f"j.queue = x'{name}' AND ({after(ranks, first)})"
            count = len(found.chosen)
            self._choose(take, where, most, found, execute)
            if found.full:
                break
            rows = execute(self._last % (where, most - 1)).rows
            if not rows:
                return found, False
            if most >= LOOK_MAX and len(found.chosen) == count:
                break
            (last,) = _places(rows)
            ranks, first = {**ranks, last.rank: (last.due_at, last.id)}, last.rank
            most = max(LOOK_MAX, 2 * most)
        return found, True

    def _among(self, take: Take, places: Sequence[_Place], execute: Execute) -> Outcome:
        """What a search has found, if it has its turn still."""
        found = Found(take.n)
        where = sql.at_places(hexed(take.name), [place[:3] for place in places])
        self._choose(take, where, len(places), found, execute)
        return self._claimed(take, [found], execute)

    def _choose(self, take: Take, where: str, most: int, found: Found, execute: Execute) -> None:
        """Of so many that are free choose those that have their turn, and lock them, unless somebody has."""
        name = hexed(take.name)
        rows = execute(self._look % (where, hexed(take.claim_id), name, most, take.group_limit - 1)).rows
        # What has come before them since the last look lets this one see some of them again.
        chosen = {row.id for row in found.chosen}
        places = [place for place in _places(rows) if place.id not in chosen]
        worked = self._worked_of(take, {place.group for place in places if place.group is not None}, execute)
        worked.update(row.group for row in found.chosen if row.group is not None)
        while not found.full:
            places = [place for place in places if place.group is None or worked[place.group] < take.group_limit]
            if not places:
                break
            missing = take.n - len(found.chosen)
            some, places = places[:missing], places[missing:]
            at_places = sql.at_places(name, [place[:3] for place in some])
            locked = {row.id: row for row in rows_of(execute(self._lock_free % at_places).rows)}
            for place in some:
                row = locked.get(place.id)
                if row is None or row.group != place.group:  # it was replaced, and is another job now
                    found.locked = True
                elif row.group is None or worked[row.group] < take.group_limit:
                    count = len(found.chosen)
                    found.add(row)
                    if row.group is not None:
                        worked[row.group] += len(found.chosen) - count

    def _worked_of(self, take: Take, groups: Collection[str], execute: Execute) -> Counter[str]:
        """How many jobs of each of these groups are claimed, wherever they are."""
        worked: Counter[str] = Counter()
        if not groups:
            return worked
        name, over = hexed(take.name), {}
        rows = execute(self._worked % (name, ",".join(f"x'{hexed(group)}'" for group in sorted(groups)))).rows
        for *where, in_force in rows:
            (job,) = _places([where])
            worked[job.group or ""] += 1
            if in_force != b"1":
                over[job.id] = job
        if over:
            # An extension that was asked for in time may be about to be committed. What nobody has locked is over.
            at_places = sql.at_places(name, [job[:3] for job in over.values()])
            for row in rows_of(execute(self._lock_free % at_places).rows):
                worked[over[row.id].group or ""] -= 1
        return worked

    def _claimed(self, take: Take, looks: list[Found], execute: Execute, deep: bool = False) -> Outcome:
        """Claim what the last look chose that chose any."""
        spent = sorted({job for look in looks for job in look.spent})
        for look in reversed(looks):
            if look.chosen:
                return Outcome(self._takes.claimed(take, look.chosen, execute), spent, locked=False)
        return Outcome(None, spent, any(look.locked for look in looks), deep)

    # -- the search -----------------------------------------------------------------------------------------------

    def _searched(self, take: Take, queue: Queue, ask: Execute) -> tuple[list[_Place], bool]:
        """The first in the claim order of what is free among the first jobs of each group, and without a group.

        And whether there are groups that it did not come to.
        """
        began, begun_at = boot_now(), queue.searched
        name, most = hexed(take.name), take.n + SEARCH_SPARE
        found = _places(ask(self._ungrouped % (name, most)).rows)
        for _ in range(SEARCH_GROUPS_MAX):
            behind = ">= x''" if queue.searched is None else f"> x'{hexed(queue.searched)}'"
            rows = ask(self._first_of_next % (name, name, behind, take.group_limit)).rows
            if not rows:
                queue.searched = None
                break
            found += _places(place for *place, free in rows if free == b"1")
            queue.searched = _places([rows[0][:4]])[0].group
        now = boot_now()
        queue.search_at = now + LOOK_BACK_PART * (now - began) if now - began > SEARCH_SHORT_S else now
        return sorted(found, key=lambda place: place[:3])[:most], (begun_at, queue.searched) != (None, None)


def _places(rows: Iterable[Sequence[Any]]) -> list[_Place]:
    return [
        _Place(int(rank), due_at.decode(), int(job), None if group is None else group.decode())
        for rank, due_at, job, group in rows
    ]
