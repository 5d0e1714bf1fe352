"""The contract between dibs and a store that keeps queues: the acts on jobs.

A *job* is a row that is worked by one claim at a time until it is done. It is, at each moment, in exactly one state:

* *ready*: somebody may take it now; a claim that has expired leaves it ready, without anybody's doing;
* *later*: it is ready at its ``due_at``: it was put with a delay, or failed and is to be tried again;
* *claimed*: a take granted it, and the claim is in force;
* *done*, *dead* or *cancelled*: it has ended. A done or cancelled job leaves, unless it was asked to be kept for some
  time; a dead one stays, with its last error, until somebody revives or forgets it.

A *claim* is granted to as many jobs as a take asked for, under one fencing token that is greater than every earlier
token of each of these jobs, and until one moment. Whatever ends a job names that token, and works once and only while
the claim is in force: the row is changed where the id and the token are, and the claim has not expired. A job's *tries*
are counted when it is claimed, so one that kills its worker counts, too; a job that is found ready with no tries left
is dead from then on. A claim that expired, instead of being ended, is one of the job's *crashes*; a job that has
crashed ``CRASHES_MAX`` times is claimed alone, so that its neighbours are not counted dead with it.

Jobs are taken in the order of their priority (the greatest first), of ``due_at``, and of their ids. Of a *group* with
a limit of n only the n live jobs with the smallest ids may be claimed, and only while fewer than n of the group are (a
job that is revived, replaced, or committed late, joins it before some that are worked). So at most n of a group are
worked at a time, if all who take have that limit, and with a limit of 1 in the order in which they were put, also while
one waits for its next try. However many jobs of busy groups come first, a take finds those that may be claimed behind
them; it may find fewer than it asked for, and a job without a group somewhat later than its turn.

Every act is atomic by itself, and repeating it is safe: a put is told by its queue and ``put_id``, a take by its
``claim_id``; what was ended once is reported as gone. A put is told for as long as one of its jobs has not ended,
whoever has claimed, given back or failed them meanwhile. (Once all have ended, it may be put once more: jobs run at
least once.) As in the contract of leases a store never waits, retries or reads a clock of this process.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple, Protocol
from dibs.store import Held

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

    from dibs.clock import Deadline
    from dibs.door import Answer, Said

# Jobs of one put, and of one take.
PUT_MAX = 10_000
TAKE_MAX = 1_000
PAYLOAD_BYTES_MAX = 2**20
# Error texts are kept up to so many characters.
ERROR_CHARS_MAX = 4096
PRIORITY_MAX = 100
GROUP_LIMIT_MAX = 1_000
# After so many crashes a job is claimed alone.
CRASHES_MAX = 2
# A store remembers where its last take ended and looks on from there, so that what ended lately need not be passed over
# again. What lies before that place is looked at as well when a take finds less than it asked for, and again and again:
# after this time, or this many times as long as the last such look took, whichever is longer.
LOOK_BACK_S = 0.5
LOOK_BACK_PART = 20
# Hints of one store and queue are at least this far apart. Whoever was woken and found nothing, or asked before so much
# time had gone by since the last hint came, looks again after twice this time, since the hint of what was put meanwhile
# may have been left out.
HINT_EVERY_S = 0.005

READY, LATER, CLAIMED, DONE, DEAD, CANCELLED = "ready", "later", "claimed", "done", "dead", "cancelled"
STATES = (READY, LATER, CLAIMED, DONE, DEAD, CANCELLED)
# The error of a job that is found without tries left, since its last claim expired.
NO_TRIES_LEFT = "on its last try its claim ran out: its worker ended without a word, or took longer than max_hold"

# Why what is asked for must wait.
KEY_LOCKED = "a transaction that is still open has put or changed a job with the same key"
JOB_LOCKED = "a transaction that is still open has locked one of these jobs"

#: What a put does about a live job with the same key.
RAISE, KEEP, REPLACE = "raise", "keep", "replace"
ON_CONFLICT = (RAISE, KEEP, REPLACE)
#: How a claim on a job ends, besides done and dead: it is tried again later, or given back and the try not counted.
RETRY, BACK = "retry", "back"
ENDS = (DONE, DEAD, RETRY, BACK)


class NewJob(NamedTuple):
    """A job as it is put. ``payload`` is JSON text, or bytes; ``max_tries`` 0 means without limit.

    It is due ``delay`` seconds from the put, or at ``at`` (Unix time), both by the store's clock.
    """

    payload: str | bytes
    priority: int = 0
    delay: float = 0.0
    at: float | None = None
    key: str | None = None
    group: str | None = None
    max_tries: int = 0


class Put(NamedTuple):
    """Put jobs, all or none, in their order. No two of them have the same key.

    Where a live job of the queue has the key of one of them: KEEP keeps that one, and the new one is left out. REPLACE
    gives it the new payload, priority, due time, group and tries, unless it is claimed. Otherwise, and with RAISE,
    nothing is put: KeyTaken.
    """

    name: str
    put_id: str
    jobs: tuple[NewJob, ...]
    on_conflict: str = RAISE


class Take(NamedTuple):
    """Claim up to ``n`` jobs for ``ttl`` seconds. Repeated for a claim in force, it is told the same jobs again.

    Of none (``n`` is 0) it claims nothing, and is told what the claim has: thus a take is undone whose answer was lost.

    Answered Taken, or Held when there is none: its ``free_in`` says after how many seconds one is due or a claim on one
    expires (infinity: nothing is known of), and nothing else of it means anything. ``wake`` is as in Acquire.
    """

    name: str
    claim_id: str
    n: int
    ttl: float
    holder: str
    group_limit: int = 0
    wake: str | None = None


class Extend(NamedTuple):
    """Let the claim on these jobs last until ``ttl`` seconds from now at least. Answered Extended."""

    name: str
    ids: tuple[int, ...]
    fencing_token: int
    ttl: float


class Finish(NamedTuple):
    """End the claim on these jobs, in one way for all of them. Answered Finished.

    DONE: ``note`` is the result (JSON text); it is kept with the job for ``keep`` seconds, if that is not 0. RETRY:
    the jobs are due again after ``delay`` seconds, with ``note`` as their last error; those that have no tries left are
    dead. DEAD: whatever tries are left. BACK: they are as they were before the claim, and the try is not counted.

    ``elsewhere``: whoever asks is not who took them, and so may meet a transaction in which that one ends them: RowBusy
    is the outcome then, soon.
    """

    name: str
    ids: tuple[int, ...]
    fencing_token: int
    end: str
    note: str | None = None
    delay: float = 0.0
    keep: float = 0.0
    elsewhere: bool = False


JobRequest = Put | Take | Extend | Finish


class PutDone(NamedTuple):
    """The ids of the jobs, in their order; of those left out or replaced (see Put), that of the live one.

    A put that is repeated may find that some have left meanwhile, so that their ids are known no more: those are 0, or
    there are fewer ids than jobs.
    """

    ids: tuple[int, ...]


class KeyTaken(NamedTuple):
    """A live job has this key; nothing was put."""

    key: str
    id: int
    claimed: bool


class TakenJob(NamedTuple):
    """A job as whoever works it sees it. ``tries`` counts this one; ``created_at`` is Unix time, for people."""

    id: int
    payload: str | bytes
    tries: int
    max_tries: int
    crashes: int
    created_at: float
    key: str | None
    group: str | None


class Taken(NamedTuple):
    """The jobs of a claim, and its token. ``acquired_at`` is Unix time by the store's clock, for people."""

    fencing_token: int
    acquired_at: float
    jobs: tuple[TakenJob, ...]


class Extended(NamedTuple):
    """The claim goes on until ``expires_at`` (Unix time), except on the jobs that are ``gone``."""

    expires_at: float
    gone: tuple[int, ...] = ()


class Finished(NamedTuple):
    """The claim has ended, except on the jobs that are ``gone``: it was not in force on them, and nothing was done."""

    gone: tuple[int, ...] = ()


class Elsewhere:
    """Somebody else's connection leads to another database than the store's, and nothing was done there."""


# What a take of none is told whose claim has nothing.
NOTHING_CLAIMED = Held(None, 0, 0.0, float("inf"))

JobOutcome = PutDone | KeyTaken | Taken | Held | Extended | Finished
WithinOutcome = PutDone | KeyTaken | Finished | Elsewhere


class StoredJob(NamedTuple):
    """A job as the store shows it to people. Times are Unix seconds by the store's clock.

    ``error`` is the last error, ``result`` what a done one was done with; ``holder`` and ``expires_at`` are of its last
    claim, ``ended_at`` of one that is done, dead or cancelled.
    """

    id: int
    state: str
    payload: str | bytes
    priority: int
    tries: int
    max_tries: int
    crashes: int
    fencing_token: int
    created_at: float
    due_at: float
    key: str | None
    group: str | None
    holder: str | None
    expires_at: float | None
    error: str | None
    result: str | None
    ended_at: float | None


class Depth(NamedTuple):
    """How many jobs of a queue are in which state, and for how many seconds the oldest ready one has been."""

    name: str
    ready: int
    later: int
    claimed: int
    dead: int
    oldest_s: float


class JobStore(Protocol):
    """What a store has besides whose capabilities say ``queue``."""

    jobs: Jobs


class Jobs(Protocol):
    """The queues of a store, on its connection."""

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        """Carry out every request, each by itself: first each Finish, then each Extend, each Put, and each Take.

        Those of one kind are carried out in the order given. Sends hints (``HINT_EVERY_S``) once others can see what
        was put or given back, and that a job of a group has ended, which leaves room for the next. Raises as
        ``Store.act``. The outcome of a Put is RowBusy, soon, when a transaction that is open has put or changed a job
        with one of its keys (for a Finish see there).
        """
        ...

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, Answer, WithinOutcome]:
        """The same for somebody else's connection to the same database: statements to be run there one by one.

        What the store's own connection must be asked is asked before this returns; the statements do not use it, so
        they may be run in any thread. ``files`` are those that an SQLite connection has. No hint is sent, since nobody
        knows when it is committed. InvalidOption when that connection cannot be to this database; Elsewhere, as far as
        the store can tell, when it is to another of the same kind, and then nothing has been done there.
        """
        ...

    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        """Of the queues with ``first <= name < before`` that have any jobs, also ended ones, by name."""
        ...

    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        """The first ``limit`` jobs in that state: in the order in which they are taken; ended ones the latest first."""
        ...

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None: ...

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        """End live jobs, whoever works them; keep them for ``keep`` seconds. Which of them were live.

        RowBusy, soon, when a transaction that is open has locked one of them.
        """
        ...

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        """Make dead jobs (None: all of the queue) ready, with all their tries before them; how many.

        One whose key a live job has meanwhile stays dead. RowBusy as above.
        """
        ...

    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        """Delete jobs (None: all of the queue) that ended ``older_than`` seconds ago or before; how many."""
        ...

    def schema(self) -> str:
        """What ``setup`` of the store runs for queues."""
        ...
