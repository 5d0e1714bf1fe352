"""Taking jobs from the queues of MySQL and MariaDB: where to look, what to choose, and how it is claimed.

A take is a short transaction: a scan in claim order locks what it finds, skipping what others have locked, and an
UPDATE by the primary key claims it. Nothing in it waits for anybody.

*Where to look.* Rows of jobs that are done stay in the index for a while, for as long as some transaction may want to
see them, and a scan has to pass over them. So it begins where the last one of this connection ended, in each priority.
What lies before is looked at when nothing else is found, and every now and then (LOOK_BACK_S). The end of a job of a
group may give its turn to one that was passed over: it most likely stands behind that job, so the next scan begins
there. Nothing rests on these places but speed. Priorities that are not known are scanned from their beginnings.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import boot_now
from dibs.jobs import CRASHES_MAX, LOOK_BACK_PART, LOOK_BACK_S, PRIORITY_MAX, Taken, TakenJob
from dibs.store import Held
from dibs.stores import mysql_jobs_sql as sql
from dibs.stores.mysql_sql import NOW
from dibs.stores.mysql_values import hexed, us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.jobs import Take
    from dibs.stores.mysql_drivers import Answer

    Execute = Callable[[str], Answer]
    # Where a scan of one priority begins: after this due_at and id, or at its beginning.
    Ranks = dict[int, "tuple[str, int] | None"]

# Scans of one take: as many jobs may be passed over that have no tries left, or must be claimed alone.
SCANS_MAX = 100
# Queues whose places are remembered.
QUEUES_MAX = 1000
# Of so many jobs of groups it is remembered where they were when they were claimed.
GROUPED_MAX = 10_000
# A take that finds some, but fewer than it asked for, looks back only where the last such look was as short as this.
SHORT_LOOK_S = 0.05


class Row(NamedTuple):
    """A row of a scan."""

    id: int
    rank: int
    due_at: str
    payload: str | bytes
    tries: int
    max_tries: int
    crashes: int
    crashed: bool
    token: int
    created_us: int
    key: str | None
    group: str | None
    now_us: int

    def told(self) -> TakenJob:
        """As it is told to whoever has claimed it already."""
        return TakenJob(
            self.id,
            self.payload,
            self.tries,
            self.max_tries,
            self.crashes,
            self.created_us / 1e6,
            self.key,
            self.group,
        )


class Found:
    """What a take has found so far."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.chosen: list[Row] = []
        #: Jobs without tries left.
        self.spent: list[int] = []
        #: There is no more to be had by this take.
        self.full = False
        #: Some were locked by somebody.
        self.locked = False

    def add(self, row: Row) -> None:
        """Decide on a job that is ready, and is locked by this take."""
        if self.full:
            return
        crashes = row.crashes + row.crashed
        if row.max_tries and row.tries >= row.max_tries:
            self.spent.append(row.id)
        elif crashes < CRASHES_MAX:
            self.chosen.append(row)
            self.full = len(self.chosen) == self._wanted
        elif not self.chosen:
            self.chosen.append(row)
            self.full = True


class Queue:
    """What a connection remembers of a queue."""

    def __init__(self) -> None:
        self.ranks: Ranks = {}
        #: Where jobs of groups that are worked stand.
        self._grouped: dict[int, tuple[int, str]] = {}
        #: When to look back, by the boot clock, and how long it took the last time.
        self.look_at = float("-inf")
        self.look_took_s = 0.0
        #: When to search, and behind which group (see dibs.stores.mysql_jobs_turns).
        self.search_at = float("-inf")
        self.searched: str | None = None

    def claimed(self, chosen: Sequence[Row], *, grouped: bool) -> None:
        self.ranks |= {row.rank: (row.due_at, row.id) for row in chosen}
        if grouped:
            if len(self._grouped) >= GROUPED_MAX:
                self._grouped.clear()
            self._grouped |= {row.id: (row.rank, row.due_at) for row in chosen if row.group is not None}

    def ended(self, jobs: Sequence[int]) -> None:
        """These jobs have ended; of those that were of a group, the next may be taken."""
        for job in jobs if self._grouped else ():
            rank, due_at = self._grouped.pop(job, (0, ""))
            end = self.ranks.get(rank)
            if due_at and end is not None and end > (due_at, job) and self.look_took_s <= SHORT_LOOK_S:
                self.ranks[rank] = due_at, job

    def looked_back(self, began: float, found: Found) -> None:
        if found.full:  # so it has not looked at the priorities behind
            reached = found.chosen[-1].rank
            self.ranks |= dict.fromkeys(rank for rank in self.ranks if rank > reached)
        self.look_took_s = boot_now() - began
        self.look_at = began + max(LOOK_BACK_S, LOOK_BACK_PART * self.look_took_s)


class Takes:
    """The takes of one connection, but for those with a limit (see dibs.stores.mysql_jobs_turns)."""

    def __init__(self, text: Callable[[str], str]) -> None:
        self._scan, self._claim = text(sql.SCAN), text(sql.CLAIM)
        self._taken, self._extend = text(sql.TAKEN), text(sql.EXTEND)
        self._next, self._next_due, self._next_rank = text(sql.NEXT), text(sql.NEXT_DUE), text(sql.NEXT_RANK)
        self._queues: dict[str, Queue] = {}

    def take(self, take: Take, execute: Execute) -> tuple[Taken | None, list[int]]:
        """Inside a transaction: what was claimed, and jobs that were found to have no tries left."""
        queue = self.queue(take.name)
        found = Found(take.n)
        if boot_now() < queue.look_at:
            self._choose(take, queue.ranks, found, execute)
        some = bool(found.chosen) and queue.look_took_s > SHORT_LOOK_S
        if not found.full and not (some and boot_now() < queue.look_at):
            began = boot_now()
            ranks: Ranks = dict.fromkeys(self.live_ranks(take.name, queue, execute))
            found = Found(take.n)
            self._choose(take, ranks, found, execute)
            queue.ranks = ranks | queue.ranks
            queue.looked_back(began, found)
        return self.claimed(take, found.chosen, execute) if found.chosen else None, found.spent

    def claimed(self, take: Take, chosen: Sequence[Row], execute: Execute) -> Taken:
        """Inside a transaction: claim these, which it has locked, and remember where they were."""
        self.queue(take.name).claimed(chosen, grouped=take.group_limit > 0)
        token, now_us = max(row.token for row in chosen) + 1, chosen[0].now_us
        crashed = ",".join(str(row.id) for row in chosen if row.crashed) or "0"
        places = sql.at_places(hexed(take.name), [(row.rank, row.due_at, row.id) for row in chosen])
        claim = hexed(take.claim_id), hexed(take.holder), now_us, us(take.ttl)
        execute(self._claim % (crashed, token, *claim, places))
        jobs = (row._replace(tries=row.tries + 1, crashes=row.crashes + row.crashed).told() for row in chosen)
        return Taken(token, now_us / 1e6, tuple(jobs))

    def look_back(self, name: str) -> None:
        """With the next take: jobs were put back in their places."""
        self.queue(name).look_at = float("-inf")

    def ended(self, name: str, jobs: Sequence[int]) -> None:
        queue = self._queues.get(name)
        if queue is not None:
            queue.ended(jobs)

    def again(self, take: Take, ask: Execute) -> Taken | None:
        """What the claim has already, which goes on for ``ttl`` seconds at least."""
        values = hexed(take.claim_id), hexed(take.name)
        rows = rows_of(ask(self._taken % values).rows)
        if not rows:
            return None
        ids = ",".join(str(row.id) for row in sorted(rows))
        ours = f"j.id IN ({ids}) AND j.claim_id = x'{hexed(take.claim_id)}' AND {sql.IN_FORCE}"
        ask(self._extend % ("job_id", us(take.ttl), ours))
        rows = rows_of(ask(self._taken % values).rows)
        return Taken(rows[0].token, rows[0].now_us / 1e6, tuple(row.told() for row in rows)) if rows else None

    def next_in(self, take: Take, ask: Execute) -> float:
        """After how many seconds there may be something."""
        name = hexed(take.name)
        ranks = self.live_ranks(take.name, self.queue(take.name), ask)
        return self.soonest(
            [next_one % (name, rank) for next_one in (self._next, self._next_due) for rank in ranks], ask
        )

    def soonest(self, asked: Sequence[str], ask: Execute) -> float:
        """The smallest of these numbers of microseconds, in seconds."""
        if not asked:
            return float("inf")
        (row,) = ask(f"SELECT {','.join(asked)}").rows
        return min((max(0.0, int(value) / 1e6) for value in row if value is not None), default=float("inf"))

    def live_ranks(self, name: str, queue: Queue, ask: Execute) -> list[int]:
        """The priorities in which there are jobs: behind each that is known the next one, until all are known."""
        known = set(queue.ranks)
        while True:
            asked = [self._next_rank % (hexed(name), rank) for rank in (-PRIORITY_MAX - 1, *known)]
            (row,) = ask(f"SELECT {','.join(asked)}").rows
            found = {int(rank) for rank in row if rank is not None}
            if found <= known:
                return sorted(found)
            known |= found

    def queue(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None:
            if len(self._queues) >= QUEUES_MAX:
                self._queues.clear()
            queue = self._queues[name] = Queue()
        return queue

    def _choose(self, take: Take, ranks: Ranks, found: Found, execute: Execute) -> None:
        """Scan, and decide on each job that is ready and was not locked by anybody."""
        name = hexed(take.name)
        where = after(ranks)
        for _ in range(SCANS_MAX):
            missing = take.n - len(found.chosen)
            rows = rows_of(execute(self._scan % (name, where, hexed(take.claim_id), name, missing)).rows)
            for row in rows:
                found.add(row)
            if found.full or len(rows) < missing:
                return
            last = rows[-1]
            where = after({**ranks, last.rank: (last.due_at, last.id)}, last.rank)


def held(free_in: float) -> Held:
    return Held(None, 0, 0.0, free_in)


def after(ranks: Ranks, first: int | None = None) -> str:
    """The condition for what lies behind these places, in the priorities from ``first`` on (None: in all)."""
    wanted, before = [], first
    for rank in sorted(ranks):
        if first is not None and rank < first:
            continue
        if before is None:
            wanted.append(f"j.priority_rank < {rank:d}")
        elif rank > before + 1:
            wanted.append(f"j.priority_rank > {before:d} AND j.priority_rank < {rank:d}")
        place = ranks[rank]
        if place is None:
            wanted.append(f"j.priority_rank = {rank:d} AND j.due_at <= {NOW}")
        else:
            due_at, job = place
            wanted.append(f"j.priority_rank = {rank:d} AND j.due_at = '{due_at}' AND j.id > {job:d}")
            wanted.append(f"j.priority_rank = {rank:d} AND j.due_at > '{due_at}' AND j.due_at <= {NOW}")
        before = rank
    if before is None:
        return "TRUE"
    return " OR ".join([*wanted, f"j.priority_rank > {before:d}"])


def rows_of(rows: Sequence[tuple[Any, ...]]) -> list[Row]:
    return [
        Row(
            int(job),
            int(rank),
            due_at.decode(),
            payload_bytes if payload is None else payload.decode(),
            int(tries),
            int(max_tries),
            int(crashes),
            crashed == b"1",
            int(token),
            int(created_us),
            None if key is None else key.decode(),
            None if group is None else group.decode(),
            int(now_us),
        )
        for (
            job,
            rank,
            due_at,
            payload,
            payload_bytes,
            tries,
            max_tries,
            crashes,
            crashed,
            token,
            created_us,
            key,
            group,
            now_us,
        ) in rows
    ]
