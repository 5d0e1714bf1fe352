"""Where takes from a queue on PostgreSQL look: which stretches of its order, one after the other.

The order is that of an index: rank (the greatest priority has the smallest), due_at, id. Jobs that were done leave dead
entries in the index, which cannot be removed while any transaction of the database is older than their end, and each
scan would pass over all of them. So the end of the last take is remembered for each rank, and the next one looks on
from there. What lies behind is looked at, too, whenever a take finds fewer than it asked for, unless that has turned
out to be slow; and first of all from time to time. The end of a job of a group may give its turn to one that was passed
over: it most likely stands behind that job, so the next take looks on from there. Whether there is anything at all in
the ranks between and around those that are known is looked at each time, since an urgent job may be there.

Nothing rests on what is remembered but how soon a job is found.
"""

from __future__ import annotations

from itertools import pairwise

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.jobs import LOOK_BACK_PART, LOOK_BACK_S, PRIORITY_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of so many queues the places are remembered, and of so many claims that they were asked for.
QUEUES_MAX = 1_000
CLAIMS_MAX = 1_000
# Of so many jobs of groups it is remembered where they were when they were claimed.
GROUPED_MAX = 10_000
# Looking behind is done by every take that finds too few, as long as it takes no longer than this.
LOOK_CHEAP_S = 0.002
_ID_MAX = 2**63 - 1


class Stretch(NamedTuple):
    """Of a rank what lies after one place and up to another.

    Moments are microseconds since 2000; None: from the beginning, or up to what is due now.
    """

    rank: int
    from_due: int | None
    from_id: int
    to_due: int | None
    to_id: int


class Place:
    """What is known of one queue."""

    def __init__(self, ranks: list[int]) -> None:
        #: By rank where the last take ended, None: at the beginning. The usual priority is always among them.
        self._ends: dict[int, tuple[int, int] | None] = dict.fromkeys([0, *ranks])
        #: The last claims that were asked for.
        self.claims: dict[str, None] = {}
        #: Where jobs of groups that are worked stood: rank and due.
        self._grouped: dict[int, tuple[int, int]] = {}
        self._looked_at = float("-inf")
        self._took: tuple[float, float] = (0.0, 0.0)

    @property
    def wait_s(self) -> float:
        """How long after a look behind there is none. A single slow one says little."""
        took = min(self._took)
        return 0.0 if took <= LOOK_CHEAP_S else max(LOOK_BACK_S, LOOK_BACK_PART * took)

    def is_due(self, now: float) -> bool:
        """Whether a take should begin at the beginning."""
        return self.rest_s(now) <= 0

    def may_look_behind(self, now: float) -> bool:
        return now >= self._looked_at + self.wait_s

    def rest_s(self, now: float) -> float:
        """For how long no take begins at the beginning."""
        return self._looked_at + max(LOOK_BACK_S, self.wait_s) - now

    def looked_behind(self, now: float, took_s: float) -> None:
        self._looked_at = now
        self._took = (self._took[1], took_s)

    def rewind(self, ranks: list[int]) -> None:
        """Begin at the beginning, of these ranks and those that were known."""
        self._ends = dict.fromkeys([*self._ends, *ranks])

    def passed(self, rank: int, due: int, job: int) -> None:
        """A take has ended there."""
        before = self._ends.get(rank)
        if before is None or before < (due, job):
            self._ends[rank] = due, job

    def given_back(self, rank: int, due: int, job: int) -> None:
        """That job is free again."""
        end = self._ends.get(rank)
        if end is not None and end >= (due, job):
            self._ends[rank] = due, job - 1

    def claimed_in_group(self, rank: int, due: int, job: int) -> None:
        if len(self._grouped) >= GROUPED_MAX:
            self._grouped.clear()
        self._grouped[job] = rank, due

    def ended(self, jobs: Iterable[int], now: float) -> None:
        """These jobs have ended; of those that were of a group, the next may be taken."""
        for job in jobs if self._grouped else ():
            stood = self._grouped.pop(job, None)
            if stood is not None and self.may_look_behind(now):
                self.given_back(*stood, job)

    def asked(self, claim_id: str) -> bool:
        """Remember that claim; whether it was there already."""
        known = claim_id in self.claims
        self.claims[claim_id] = None
        if len(self.claims) > CLAIMS_MAX:
            del self.claims[next(iter(self.claims))]
        return known

    def answered(self, claim_id: str) -> None:
        """That claim has got nothing, and knows it."""
        self.claims.pop(claim_id, None)

    def learn(self, ranks: list[int]) -> None:
        """There are these ranks, too."""
        self._ends = {**dict.fromkeys(ranks), **self._ends}

    def stretches(self, *, behind: bool) -> list[Stretch]:
        """The known ranks, in their order, but for what lies behind; that, too, as the last, if it is asked for."""
        ends = sorted(self._ends.items())
        stretches = []
        for rank, end in ends:
            due, job = end or (None, 0)
            stretches.append(Stretch(rank, due, job, None, _ID_MAX))
        if behind:
            stretches += [Stretch(rank, None, 0, *end) for rank, end in ends if end is not None]
        return stretches

    def gaps(self) -> list[tuple[int, int]]:
        """The ranks that are not known: from the first to the last of each gap. (If all are known, an empty one.)"""
        known = [-PRIORITY_MAX - 1, *sorted(self._ends), PRIORITY_MAX + 1]
        gaps = [(rank + 1, after - 1) for rank, after in pairwise(known) if after - rank > 1]
        return gaps or [(1, 0)]


class Places:
    """The places of all queues that one store object takes from."""

    def __init__(self) -> None:
        self._of: dict[str, Place] = {}

    def get(self, queue: str) -> Place | None:
        return self._of.get(queue)

    def begin(self, queue: str, ranks: list[int]) -> Place:
        if len(self._of) >= QUEUES_MAX:
            del self._of[next(iter(self._of))]
        place = self._of[queue] = Place(ranks)
        return place

    def forget(self) -> None:
        """What was asked for last may have been done or not: begin again."""
        self._of.clear()
