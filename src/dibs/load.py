"""What the takers of a queue in one process do, counted, and told to the others.

Every take and every end is counted in slots of a few seconds; the last minute of them is the process's *load*. It is
written into the store every few seconds as a short lease beside the queue, as notes of waiters are, and ends with the
process. Whoever wants to know how many workers a queue needs (``dibs.advice``) reads what all processes have written.

How deep the queue is costs the store a look at all of it, so only one process looks at a time: the first that finds no
fresh number among what the others have written.
"""

from __future__ import annotations

import json
from collections import deque
from hashlib import sha256
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any, cast
from dibs.clock import wall_now
from dibs.names import info_in
from dibs.store import Acquire, Release

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.jobs import JobStore
    from dibs.session import Session
    from dibs.store import Store, StoredLease

# What is told is about this long a time, in so many slots.
WINDOW_S = 60.0
SLOTS = 12
# A process that stopped telling is forgotten after this part of the window.
FORGOTTEN_PART = 0.5

#: What is counted. taken: jobs that were claimed. returned: jobs that went back, to be taken again. ended: jobs that
#: left. held_s: seconds of work on them. asked, won: takes, and those that were granted something. empty: takes that
#: were told there was nothing; raced: those of them that a hint had called. short: takes that got less than they asked
#: for. late: ends that came too late. take_s: seconds that takes waited for the store.
COUNTED = ("taken", "returned", "ended", "held_s", "asked", "won", "empty", "raced", "short", "late", "take_s")


def load_key(namespace: str, queue: str) -> str:
    """What the names of the leases begin with in which the loads of a queue are told."""
    return f"{namespace}~load:{sha256(queue.encode()).hexdigest()[:24]}/"


class Load:
    """The takers of one queue in this process."""

    def __init__(self, session: Session, namespace: str, queue: str, window_s: float) -> None:
        self._session = session
        self._clock = session.clock
        self._mutex = session.clock.mutex()
        self._queue = queue
        self._queue_key = f"{namespace}~queue:{queue}"
        self._prefix = load_key(namespace, queue)
        self.window_s = window_s
        self._slot_s = window_s / SLOTS
        limits = session.address.capabilities
        self._ttl = min(max(window_s * FORGOTTEN_PART, limits.ttl_min_s), limits.ttl_max_s)
        self._began = self._clock.now()
        self._slots: deque[tuple[float, dict[str, float]]] = deque()
        #: When the store was asked how deep the queue is (Unix time), and what it said.
        self._depths: deque[tuple[float, int]] = deque()
        #: Who takes jobs here, and when each did last.
        self._takers: dict[object, tuple[float, int]] = {}
        self._tell_at = self._began + self._slot_s
        self._claim: str | None = None

    def count(self, **counted: float) -> None:
        """Add to what is counted now; see ``COUNTED``."""
        with self._mutex:
            now = self._clock.now()
            if not self._slots or now - self._slots[-1][0] >= self._slot_s:
                self._slots.append((now, dict.fromkeys(COUNTED, 0.0)))
                self._drop_old(now)
            slot = self._slots[-1][1]
            for what, amount in counted.items():
                slot[what] += amount

    def _drop_old(self, now: float) -> None:
        while now - self._slots[0][0] > self.window_s:
            self._slots.popleft()

    def taker(self, owner: object, workers: int = 1) -> None:
        """Somebody takes jobs here, for so many workers."""
        # By number where it is a thread: one that works after another is no more than one.
        whom = owner() if isinstance(owner, ref) else owner
        with self._mutex:
            self._takers[getattr(whom, "ident", owner)] = (self._clock.now(), workers)

    def tell(self) -> None:
        """Tell the others, if it is time to. Nothing is waited for."""
        now = self._clock.now()
        if now < self._tell_at or self._session.closed:
            return
        self._tell_at = now + self._slot_s
        self._session.queue(self._session.new_act(self._telling))
        self._session.lane.start()

    # -- in the claim lane -----------------------------------------------------------------------------------------

    def _telling(self, store: Store, deadline: Deadline) -> None:
        others = read(store, self._prefix, deadline)
        wall = wall_now()
        latest = max((sample[0] for told in others for sample in told["depths"]), default=float("-inf"))
        if wall - latest >= self._slot_s:
            depths = cast("JobStore", store).jobs.depths(self._queue_key, self._queue_key + "\x01", deadline)
            self._depths.append((wall, sum(depth.ready + depth.later for depth in depths)))
        while self._depths and wall - self._depths[0][0] > self.window_s:
            self._depths.popleft()
        session, key = self._session, self._prefix + self._session.client_id
        requests: list[Any] = [] if self._claim is None else [Release(key, self._claim)]
        self._claim = session.new_claim()
        info = json.dumps(self.told(), separators=(",", ":"))
        requests.append(Acquire(key, self._claim, self._ttl, session.holder, info))
        store.act(requests, deadline)

    def told(self) -> dict[str, Any]:
        """What is written for the others."""
        with self._mutex:
            return self._told(self._clock.now())

    def _told(self, now: float) -> dict[str, Any]:
        slots = [slot for began, slot in self._slots if now - began <= self.window_s]
        for owner in [owner for owner, (at, _) in self._takers.items() if now - at > self.window_s]:
            del self._takers[owner]
        return {
            "queue": self._queue[:100],
            "seconds": round(min(self.window_s, now - self._began), 3),
            "workers": sum(workers for _, workers in self._takers.values()),
            **{what: round(sum(slot[what] for slot in slots), 4) for what in COUNTED},
            "depths": [(round(at, 3), depth) for at, depth in self._depths],
        }


def read(store: Store, prefix: str, deadline: Deadline) -> list[dict[str, Any]]:
    """What all processes have told of a queue."""
    rows: list[StoredLease] = store.leases(prefix, prefix + "\U0010ffff", deadline)
    return [told for row in rows if (told := info_in(row.info)) is not None]
