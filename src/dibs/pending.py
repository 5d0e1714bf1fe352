"""Asks that wait for a call to the store: in which order, and which of them travel together.

Everything here happens under the session's mutex, and knows nothing of who serves (``dibs.lane``). A Ctrl-C may come
between any two lines: an ask may be in two places then, and be asked twice, but it is in one at least.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.ask import ALONE, LEASES
from dibs.errors import StoreUnavailable
from dibs.store import Release, Renew

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dibs.ask import Ask

# Requests in one call to the store.
BATCH_MAX = 1000
# Bytes of payload in one call to the store, unless a single ask has more.
WEIGHT_MAX = 2**24
# Asks that wait for a place in a batch; more acquires are refused at once.
QUEUE_MAX = 100_000
# From so many tasks on, that ask at the same time, half of them travel while the others work.
CROWD_MIN = 50
# An event loop works no longer than this for a task, between an answer and the next ask.
TURN_S = 20e-6
FOREVER = float("inf")
# What goes before other requests.
_FIRST = frozenset((Release, Renew))


class Pending:
    """What waits for its call, and what waits until it may be asked for again."""

    __slots__ = ("_crowd", "_most", "hands_over", "asks", "later", "later_at", "others", "releases_only")

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        #: How many of them are no requests on leases.
        self.others = 0
        #: What was put off, and when it is to be queued again.
        self.later: list[Ask] = []
        self.later_at = FOREVER
        #: The last batch was only the releases of what waited; the next takes everything.
        self.releases_only = False
        #: Who waits in other processes has a place in the store's line, and so its turn, however close to a release the
        #: next request of this process is sent. Without a line they need the moment in which the name is nobody's.
        self.hands_over = True
        #: How many tasks have lately asked at the same time, and how many of them a call may serve.
        self._crowd = 0
        self._most = BATCH_MAX

    def put(self, ask: Ask) -> None:
        if ask.kind != LEASES:
            self.others += 1
        self.asks.append(ask)
        ask.under_way = False
        ask.in_lane = True

    def put_back(self, asks: list[Ask]) -> None:
        """In front: they were in a batch, and were not sent."""
        self.asks[:0] = asks
        self.others += sum(ask.kind != LEASES for ask in asks)
        for ask in asks:
            ask.under_way = False

    def put_off(self, ask: Ask, until: float) -> None:
        self.later.append(ask)
        self.later_at = min(self.later_at, until)

    def ask_again(self) -> None:
        """Queue what was put off."""
        for ask in self.later:
            self.put(ask)
        self.later.clear()
        self.later_at = FOREVER

    def fail_later(self, error: BaseException) -> None:
        """What was put off fails."""
        for ask in self.later:
            ask.failed(error)
        self.later.clear()
        self.later_at = FOREVER

    def divided(self) -> tuple[list[Ask], list[Ask], int]:
        """The next batch, what is left then, and how many ``others`` those are. (Nothing is taken out here.)

        An Act goes alone, asks of another kind in calls of their own. Where releases wait beside acquires, the releases
        go first by themselves: they are quick, and whoever is told of one may ask again in time for the call that the
        acquires then share. There everything goes, again the releases first, so that nobody is refused what comes free
        a moment later, and then passed. So it does at once where what is released is asked for: that is a hand-over.
        (Renewals that holders ask for go with the releases: none may come after its release.)
        """
        asks = self.asks
        if len(asks) == 1:
            asks[0].under_way = True
            return asks, [], 0
        size, kind = BATCH_MAX, LEASES
        if self.others:
            kind = asks[0].kind
            size = _together(asks)
        batch, rest = asks[:size], asks[size:]
        releases = [ask for ask in batch if type(ask.request) in _FIRST]
        mixed = bool(releases) and len(releases) < len(batch)
        acquires = [ask for ask in batch if type(ask.request) not in _FIRST] if mixed else []
        hand_over = mixed and self.hands_over and _hand_over(releases, acquires)
        self.releases_only = mixed and not self.releases_only and not hand_over
        if mixed:
            batch, rest = (releases, acquires + rest) if self.releases_only else (releases + acquires, rest)
        if len(batch) > self._most:
            share = self._share(batch)
            # (What is released ends; renewals might keep the acquires of others from their turn for ever.)
            if not mixed or self.releases_only or share > len(releases) or not any(map(_renews, releases)):
                batch, rest = batch[:share], batch[share:] + rest
        for ask in batch:
            ask.under_way = True
        return batch, rest, self.others if kind == LEASES else self.others - len(batch)

    def carried(self, batch: list[Ask], took_s: float) -> None:
        """Note how long a call of at least CROWD_MIN asks has taken, so as to divide those that follow.

        Were the asks of all tasks in one call, the store would rest while the event loop serves them, and the loop
        while they travel. So of a crowd each call takes a half, unless calls last so long that fewer are better: longer
        than the loop works for another half.
        """
        tasks = sum([ask._listener is not None for ask in (*batch, *self.asks)])
        self._crowd = max(tasks, self._crowd - self._crowd // 8)
        quick = took_s < TURN_S * max(len(batch), self._crowd // 2) and self._crowd >= CROWD_MIN
        self._most = max(CROWD_MIN, (self._crowd + 1) // 2) if quick else BATCH_MAX

    def _share(self, batch: list[Ask]) -> int:
        """How many of these make a call when the tasks are many: what one caller asks for stays together."""
        most = self._most
        for place, ask in enumerate(batch):
            if ask._listener is not None:
                if not most:
                    return place
                most -= 1
        return len(batch)

    def give_up(self, now: float, error: Exception) -> None:
        """What has waited behind failing calls for its whole patience has failed like them.

        But for what is owed: unsent, it would leave a grant to its ttl that nobody has. So would a release, which is
        owed from now on, though whoever waits for it is told that the store has not confirmed it.
        """
        # What is put here when one of them has failed, as the release behind its Before, has waited as long.
        while late := {ask: None for ask in self.asks if now >= ask.give_up_at and not ask.owed}:
            unsent = StoreUnavailable(str(error), maybe_applied=False)
            try:
                _fail(late, unsent)  # before they leave the queue, so that a Ctrl-C in between forgets none, sends none
            except BaseException:
                _fail(late, unsent)  # the next call may succeed, and nobody would answer them any more
                raise
            self.asks = [ask for ask in self.asks if ask.owed or ask not in late]
            self.others = sum(ask.kind != LEASES for ask in self.asks)


def _hand_over(releases: list[Ask], acquires: list[Ask]) -> bool:
    """Whether what one of them releases is what another of this process waits for."""
    released = {ask.request[0] for ask in releases if type(ask.request) is Release}
    return not released.isdisjoint([ask.request[0] for ask in acquires])


def _renews(ask: Ask) -> bool:
    return type(ask.request) is Renew


def _fail(late: Iterable[Ask], error: StoreUnavailable) -> None:
    for ask in late:
        if type(ask.request) is Release:
            ask.owed = ask.afterwards = True
        else:
            ask.dropped = True
        ask.in_lane = False
        if not ask.maybe_applied:
            ask.trouble = error
        ask.failed(error)


def _together(asks: list[Ask]) -> int:
    """How many of the first asks are of one kind, and not too much for one call; at least one."""
    kind, weight = asks[0].kind, 0
    if kind == ALONE:
        return 1
    for place, ask in enumerate(asks[:BATCH_MAX]):
        weight += ask.weight
        if place and (ask.kind != kind or weight > WEIGHT_MAX):
            return place
    return BATCH_MAX
